"""One process, DDP or DeepSpeed ZeRO: the recipe chooses the strategy, the launcher the processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from vit_scale.config import Config
from vit_scale.cost.memory import ZERO_REDUCE_BUCKET
from vit_scale.cost.strategy_names import DESCRIPTIONS
from vit_scale.errors import UserError
from vit_scale.launcher import is_main_process, world_size
from vit_scale.strategies.zero_settings import (
    check_offload,
    deepspeed_settings,
    import_deepspeed,
    launcher_stage,
    overruled_settings,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

    from vit_scale.schedule import Plan

T = TypeVar("T")
# Of what accelerate's launcher sets, these would override what the recipe's Accelerator is told.
OVERRIDING_VARIABLES = (
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "ACCELERATE_DYNAMO_BACKEND",
)


def resolve_strategy(asked: str) -> tuple[str, str | None]:
    """The strategy, and a line to print where the launcher's configuration says otherwise.

    `auto` follows the launcher; one process without DeepSpeed is called `single`.
    """
    plain = "ddp" if world_size() > 1 else "single"
    launcher = _launcher_strategy() or plain
    if asked == "auto":
        if launcher not in DESCRIPTIONS:
            raise UserError(
                f"The launcher asks for {launcher}, which is not one of {', '.join(DESCRIPTIONS)}.\n"
                "For sharding use `accelerate launch --use_deepspeed --zero_stage 3`, or parallel.strategy=zero3."
            )
        return launcher, None
    chosen = plain if asked == "ddp" else asked
    if launcher not in (plain, chosen):
        return chosen, f"The launcher asks for {launcher}, the recipe for {asked}: the recipe wins."
    return chosen, None


def _launcher_strategy() -> str | None:
    """What accelerate's launcher was told to shard with, if anything."""
    if _is_on("ACCELERATE_USE_DEEPSPEED"):
        stage = launcher_stage()
        return f"zero{stage}" if stage else None
    if _is_on("ACCELERATE_USE_FSDP"):
        return "FSDP"
    return "Megatron-LM" if _is_on("ACCELERATE_USE_MEGATRON_LM") else None


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() == "true"


def launcher_note(config: Config, plan: Plan, strategy: str, precision: str) -> str | None:
    """A line where the launcher sets what the recipe decides, the strategy aside. Asked before `make_accelerator`."""
    overruled = overruled_settings(config, plan, strategy, precision) if strategy.startswith("zero") else []
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if asked not in ("no", precision):
        overruled.append(f"mixed_precision = {asked} (recipe: {precision})")
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if backend != "no":
        overruled.append(f"dynamo_backend = {backend} (recipe: parallel.compile = {config.parallel.compile})")
    return f"The launcher sets {', '.join(overruled)}: the recipe wins." if overruled else None


def make_accelerator(
    config: Config, plan: Plan, strategy: str, precision: str, *, params: int = ZERO_REDUCE_BUCKET
) -> Accelerator:
    """The Accelerator for `strategy`, whose DeepSpeed settings agree with the plan; `params` is the model's size."""
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    check_offload(config.parallel.offload, strategy)
    common: dict[str, Any] = {
        "mixed_precision": "no" if precision == "fp32" else precision,
        "gradient_accumulation_steps": plan.accumulation,
    }
    has_gpu = torch.cuda.is_available()
    timeout = timedelta(seconds=config.parallel.timeout_seconds)
    group = InitProcessGroupKwargs(backend=None if has_gpu else "gloo", timeout=timeout)
    for variable in OVERRIDING_VARIABLES:
        os.environ.pop(variable, None)
    if not strategy.startswith("zero"):
        # Given a backend, accelerate looks for a process group, which one process does not have.
        handlers = [group] if world_size() > 1 else []
        return Accelerator(cpu=not has_gpu, kwargs_handlers=handlers, **common)
    if world_size() == 1:
        _pretend_to_be_launched()
    plugin = _deepspeed_plugin(strategy, deepspeed_settings(config, plan, strategy, precision, params=params))
    return Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[group], **common)


def _deepspeed_plugin(strategy: str, settings: dict[str, Any]) -> Any:
    try:
        import_deepspeed()
    except ImportError:
        raise UserError(
            f"parallel.strategy = {strategy!r}: needs DeepSpeed, which runs on Linux: pip install deepspeed"
        ) from None
    from accelerate.utils import DeepSpeedPlugin

    return DeepSpeedPlugin(hf_ds_config=settings)


def _pretend_to_be_launched() -> None:
    """DeepSpeed wants a process group even for one process."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    defaults = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for key, value in defaults.items():
        os.environ.setdefault(key, str(value))


def set_micro_batch(accelerator: Accelerator, plan: Plan) -> None:
    """Tell accelerate, and DeepSpeed before its engine is built, of a micro batch that was settled later."""
    accelerator.gradient_accumulation_steps = plan.accumulation
    if (plugin := accelerator.state.deepspeed_plugin) is not None:
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = plan.micro_batch
        plugin.deepspeed_config["gradient_accumulation_steps"] = plan.accumulation


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
