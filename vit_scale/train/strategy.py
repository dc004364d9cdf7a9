"""One process, DDP or DeepSpeed ZeRO: the recipe chooses the strategy, the launcher the processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from vit_scale.config import Config
from vit_scale.errors import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator

    from vit_scale.train.plan import Plan

T = TypeVar("T")
COLLECTIVE_TIMEOUT = timedelta(minutes=10)


def world_size() -> int:
    """Processes that the launcher started, before any of them has spoken to another."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Whether this is the process that speaks, known before any set-up."""
    return int(os.environ.get("RANK", "0")) == 0


def resolve_strategy(asked: str) -> tuple[str, str | None]:
    """The strategy, and a line to print where the launcher's configuration says otherwise.

    `auto` follows the launcher; one process without DeepSpeed is called `single`.
    """
    launcher = _launcher_strategy()
    if asked == "auto":
        return launcher, None
    chosen = "single" if asked == "ddp" and world_size() == 1 else asked
    if launcher.startswith("zero") and launcher != chosen:
        return chosen, f"The launcher asks for {launcher}, the recipe for {asked}: the recipe wins."
    return chosen, None


def _launcher_strategy() -> str:
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        return f"zero{stage}" if stage in ("1", "2", "3") else "ddp"
    return "ddp" if world_size() > 1 else "single"


def make_accelerator(config: Config, plan: Plan, strategy: str, precision: str) -> Accelerator:
    """The Accelerator for `strategy`, whose DeepSpeed settings agree with the plan."""
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    common: dict[str, Any] = {
        "mixed_precision": "no" if precision == "fp32" else precision,
        "gradient_accumulation_steps": plan.accumulation,
    }
    has_gpu = torch.cuda.is_available()
    group = InitProcessGroupKwargs(backend=None if has_gpu else "gloo", timeout=COLLECTIVE_TIMEOUT)
    # The launcher's switch would make accelerate build a DeepSpeed plugin of its own beside the recipe's.
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    if not strategy.startswith("zero"):
        # Given a backend, accelerate looks for a process group, which one process does not have.
        handlers = [group] if world_size() > 1 else []
        return Accelerator(cpu=not has_gpu, kwargs_handlers=handlers, **common)
    if world_size() == 1:
        _pretend_to_be_launched()
    return Accelerator(
        deepspeed_plugin=_deepspeed_plugin(config, plan, strategy, precision), kwargs_handlers=[group], **common
    )


def _deepspeed_plugin(config: Config, plan: Plan, strategy: str, precision: str) -> Any:
    try:
        import deepspeed  # noqa: F401
    except ImportError:
        raise UserError(
            f"parallel.strategy = {strategy!r}: needs DeepSpeed, which runs on Linux: pip install deepspeed"
        ) from None
    from accelerate.utils import DeepSpeedPlugin

    return DeepSpeedPlugin(hf_ds_config=deepspeed_settings(config, plan, strategy, precision))


def deepspeed_settings(config: Config, plan: Plan, strategy: str, precision: str) -> dict[str, Any]:
    """DeepSpeed's configuration, generated from the recipe so that the two cannot disagree."""
    return {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "gradient_clipping": config.optim.clip_norm,
        "zero_optimization": {"stage": int(strategy[-1])},
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


def _pretend_to_be_launched() -> None:
    """DeepSpeed wants a process group even for one process."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    defaults = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for key, value in defaults.items():
        os.environ.setdefault(key, str(value))


def on_main(decide: Callable[[], T]) -> T:
    """What `decide` returns, or raises, on the main process, on all of them."""
    if world_size() == 1:
        return decide()
    import torch.distributed as dist

    outcome: list[Any] = [None]
    if is_main_process():
        try:
            outcome = [(decide(), None)]
        except Exception as error:  # noqa: BLE001 -- whatever it is, the other processes must not wait for it
            outcome = [(None, error)]
    dist.broadcast_object_list(outcome)
    result, raised = outcome[0]
    if raised is not None:
        raise raised
    return result
