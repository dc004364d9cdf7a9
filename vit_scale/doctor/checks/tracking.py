"""Services on the network: W&B and the Hugging Face Hub. Training works without them."""

from __future__ import annotations

import os

from vit_scale.doctor.check import Check, Setup, broken, skipped, works
from vit_scale.errors import first_line
from vit_scale.hub import is_hub_reachable

OFFLINE_MODES = ("offline", "dryrun", "disabled")


def wandb_login(setup: Setup) -> Check:
    """Check the API key with the server, without a prompt."""
    import wandb

    mode = os.environ.get("WANDB_MODE")
    if mode in OFFLINE_MODES:
        return skipped("W&B", f"WANDB_MODE={mode}")
    setup.stage("waiting for the W&B server")
    try:
        # A second call would not ask the server again, so the key is not looked for first. Without one, none is asked.
        if not wandb.login(prompt=False, verify=True):
            return skipped("W&B", "not logged in: runs are logged offline", "wandb login")
    except Exception as error:  # noqa: BLE001 -- whatever the client raises
        return _failed(first_line(error))
    return works("W&B", "logged in: runs are logged online")


def _failed(message: str) -> Check:
    if "not respond" in message or "busy" in message:
        advice = "runs are logged offline until the server answers; check proxy and WANDB_BASE_URL"
        return broken("W&B", "the server does not answer", advice, required=False)
    return broken("W&B", "the API key is rejected: runs are logged offline", "wandb login --relogin", required=False)


def hub(setup: Setup) -> Check:
    """Check whether datasets and weights can be downloaded."""
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return skipped("Hub", "HF_HUB_OFFLINE is set: only cached datasets and weights")
    if is_hub_reachable():
        return works("Hub", "huggingface.co answers")
    advice = "use datasets and weights on this machine, or set HF_ENDPOINT or a proxy"
    return broken("Hub", "huggingface.co does not answer: only cached datasets and weights", advice, required=False)
