"""What the Hub and its local cache offer. The Hub is checked with a short timeout: its libraries would retry for 30
seconds or more."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

TIMEOUT_SECONDS = 5


def is_hub_reachable() -> bool:
    """Return whether the Hub is reachable now."""
    import huggingface_hub.constants

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=TIMEOUT_SECONDS)
    except Exception:  # noqa: BLE001 - every connection failure means the same; its type depends on the HTTP library
        return False
    return True


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Use only the local cache within this context; never access the network."""
    import huggingface_hub.constants

    settings: list[Any] = [huggingface_hub.constants]
    if "datasets" in sys.modules:
        settings.append(sys.modules["datasets"].config)
    before = [module.HF_HUB_OFFLINE for module in settings]
    for module in settings:
        module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module, value in zip(settings, before, strict=True):
            module.HF_HUB_OFFLINE = value


def has_weights(name: str) -> bool:
    """Return whether the weights `timm/<name>` are in the local cache of the Hub."""
    from huggingface_hub import try_to_load_from_cache

    files = ("model.safetensors", "pytorch_model.bin")
    return any(isinstance(try_to_load_from_cache(name, file), str) for file in files)
