"""How work is spread over processes: the recipe chooses the strategy, the launcher the processes.

A `Strategy` exists before the model; wrapping a model in it gives an `Engine`, all that the training loop sees of it.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from vit_scale.config import Config
from vit_scale.cost.strategy_names import DESCRIPTIONS
from vit_scale.errors import UserError
from vit_scale.launcher import world_size
from vit_scale.schedule import Plan
from vit_scale.strategies.loss_scale import LossScale
from vit_scale.strategies.replicated import ReplicatedStrategy, ddp_options
from vit_scale.strategies.shards import Shards
from vit_scale.strategies.zero import ZeroStrategy
from vit_scale.strategies.zero_settings import (
    check_compile,
    check_offload,
    deepspeed_settings,
    import_deepspeed,
    launcher_stage,
    overridden_settings,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

# Variables of accelerate's launcher that take precedence over the arguments of an Accelerator.
OVERRIDING_VARIABLES = (
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "ACCELERATE_DYNAMO_BACKEND",
)


class Engine(Protocol):
    """A wrapped model and its optimizer. All ranks call each method, in the same order."""

    model: nn.Module
    """The bare module, with timm's parameter names."""
    optimizer: torch.optim.Optimizer
    """Its groups have the learning rate."""
    shards: Shards
    device: torch.device
    rank: int
    world: int
    input_dtype: torch.dtype
    """Dtype of the model inputs: half precision if DeepSpeed keeps the weights of the forward pass in it."""
    loss_scale: LossScale | None
    """Only in fp16."""

    def __call__(self, *args: torch.Tensor) -> Any:
        """Run the forward pass."""

    def accumulate(self) -> AbstractContextManager[Any]:
        """Enter around forward and backward of each micro-batch of a step."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a micro-batch."""

    def step(self, clip_norm: float) -> torch.Tensor:
        """Step the optimizer unless the gradient is non-finite; return the gradient norm, on the device."""

    def set_micro_batch(self, plan: Plan) -> None:
        """Use the micro-batch and accumulation steps of `plan` from the next step on."""

    def editing(self, parameter: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Give access to the full values of an untrained parameter."""

    def trying(self) -> AbstractContextManager[None]:
        """Enter around a forward and backward pass between steps whose gradient is discarded."""

    def future_bytes(self) -> int:
        """Return the bytes on the device that the first step will allocate and keep."""


class Strategy(Protocol):
    """How a model is constructed, edited and wrapped. All ranks call each method, in the same order."""

    name: str
    device: torch.device
    rank: int
    world: int

    def constructing(self) -> AbstractContextManager[None]:
        """Enter around the construction of a model whose layers initialize themselves only in their constructors."""

    def editing(self, parameter: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Give access to the full values of a parameter: writable inside, resharded after."""

    def place(self, model: nn.Module) -> None:
        """Move a constructed model, or this rank's shard of it, to the device."""

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> Engine:
        """Return the engine that trains a placed model."""


def resolve_strategy(requested: str) -> tuple[str, str | None]:
    """Return the strategy, and a warning if it overrides the launcher's configuration.

    `auto` follows the launcher; one process without DeepSpeed is called `single`.
    """
    plain = "ddp" if world_size() > 1 else "single"
    launcher = _launcher_strategy() or plain
    if requested == "auto":
        if launcher not in DESCRIPTIONS:
            raise UserError(
                f"Launcher strategy {launcher} is not supported: must be one of {', '.join(DESCRIPTIONS)}.\n"
                "For sharding use `accelerate launch --use_deepspeed --zero_stage 3`, or parallel.strategy=zero3."
            )
        return launcher, None
    chosen = plain if requested == "ddp" else requested
    if launcher not in (plain, chosen):
        return chosen, f"Launcher strategy {launcher} is overridden by the recipe: parallel.strategy={requested}."
    return chosen, None


def _launcher_strategy() -> str | None:
    """Return the sharding that accelerate's launcher was configured with, if any."""
    if _is_on("ACCELERATE_USE_DEEPSPEED"):
        stage = launcher_stage()
        return f"zero{stage}" if stage else None
    if _is_on("ACCELERATE_USE_FSDP"):
        return "FSDP"
    return "Megatron-LM" if _is_on("ACCELERATE_USE_MEGATRON_LM") else None


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() == "true"


def override_warning(config: Config, plan: Plan, strategy: str, precision: str) -> str | None:
    """Return a warning if the recipe overrides launcher settings, except the strategy; call before `make_strategy`."""
    overridden = overridden_settings(config, plan, strategy, precision) if strategy.startswith("zero") else []
    requested = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if requested not in ("no", precision):
        overridden.append(f"mixed_precision = {requested} (recipe: {precision})")
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if backend != "no":
        overridden.append(f"dynamo_backend = {backend} (recipe: parallel.compile = {config.parallel.compile})")
    return f"Launcher settings overridden by the recipe: {', '.join(overridden)}." if overridden else None


def make_strategy(config: Config, plan: Plan, name: str, precision: str) -> Strategy:
    """Join the other processes and return the strategy `name`."""
    check_offload(config.parallel.offload, name)
    check_compile(config.parallel.compile, name)
    accelerator = _make_accelerator(config, plan, name, precision)
    if name.startswith("zero"):
        return ZeroStrategy(name, accelerator, config, precision)
    return ReplicatedStrategy(name, accelerator)


def _make_accelerator(config: Config, plan: Plan, strategy: str, precision: str) -> Accelerator:
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    settings = deepspeed_settings(config, plan, strategy, precision) if strategy.startswith("zero") else None
    common: dict[str, Any] = {
        # With ZeRO, the strategy itself wraps the model in autocast.
        "mixed_precision": precision if settings is None and precision != "fp32" else "no",
        "gradient_accumulation_steps": plan.accumulation,
    }
    has_gpu = torch.cuda.is_available()
    timeout = timedelta(seconds=config.parallel.timeout_seconds)
    group = InitProcessGroupKwargs(backend=None if has_gpu else "gloo", timeout=timeout)
    for variable in OVERRIDING_VARIABLES:
        os.environ.pop(variable, None)
    if settings is None:
        # Given a backend, accelerate expects a process group, which a single process does not have.
        handlers = [group, ddp_options()] if world_size() > 1 else []
        return Accelerator(cpu=not has_gpu, kwargs_handlers=handlers, **common)
    if world_size() == 1:
        _set_single_process_env()
    return Accelerator(deepspeed_plugin=_deepspeed_plugin(strategy, settings), kwargs_handlers=[group], **common)


def _deepspeed_plugin(strategy: str, settings: dict[str, Any]) -> Any:
    try:
        import_deepspeed()
    except ImportError:
        raise UserError(
            f"parallel.strategy = {strategy!r}: requires DeepSpeed, which runs on Linux: pip install deepspeed"
        ) from None
    from accelerate.utils import DeepSpeedPlugin

    return DeepSpeedPlugin(hf_ds_config=settings)


def _set_single_process_env() -> None:
    """Set the variables of a launcher: DeepSpeed needs a process group even for one process."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    defaults = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for key, value in defaults.items():
        os.environ.setdefault(key, str(value))
