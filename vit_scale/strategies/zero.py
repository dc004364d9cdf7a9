"""DeepSpeed ZeRO: the optimizer state (1), also gradients (2), also weights (3) are partitioned over ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from vit_scale.config import Config
from vit_scale.models.interface import full_shape
from vit_scale.schedule import Plan
from vit_scale.strategies.loss_scale import deepspeed_loss_scale, scale_loss
from vit_scale.strategies.processes import own_cores
from vit_scale.strategies.shards import Shards
from vit_scale.strategies.zero_forward import (
    HALF_DTYPES,
    free_gathered_weights,
    send_in_half_precision,
    use_autocast,
)
from vit_scale.strategies.zero_settings import check_engine, deepspeed_settings
from vit_scale.strategies.zero_shards import Zero3Shards, Zero12Shards

if TYPE_CHECKING:
    from accelerate import Accelerator


class ZeroStrategy:
    """ZeRO-1, ZeRO-2 or ZeRO-3. ZeRO-3 shards a model while it is constructed."""

    def __init__(self, name: str, accelerator: Accelerator, config: Config, precision: str) -> None:
        self.name = name
        self.device = accelerator.device
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        self._accelerator, self._config, self._precision = accelerator, config, precision
        self._first_sharded: Any = None

    @contextmanager
    def constructing(self) -> Iterator[None]:
        """Under ZeRO-3, shard each layer as soon as it is constructed: no rank holds more than one full layer.

        Layers are constructed on the host, with the random draws of any other strategy, so the initial weights are
        the same. A model that initializes its layers after it has registered them (timm's) must be constructed
        outside this context; `place` then shards it tensor by tensor.
        """
        if self.name != "zero3":
            yield
            return
        # Attributes are assigned after their constructor has returned, when the layer has its initial weights.
        handle = register_module_module_registration_hook(lambda parent, name, child: self._shard(child))
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def editing(self, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
        """Give access to the full values of a parameter; all ranks must enter, and the changes of rank 0 count.

        The values of a sharded parameter are an fp32 copy on the host, so that random draws are those of an
        unsharded model.
        """
        if not hasattr(parameter, "ds_id"):
            yield parameter.data
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            full = parameter.data.to("cpu", torch.float32, copy=True)
            yield full
            parameter.data.copy_(full)

    def place(self, model: nn.Module) -> None:
        """Move a constructed model to the device; under ZeRO-3 only this rank's shard of each parameter."""
        if self.name != "zero3":
            model.to(self.device)
            return
        self._shard(model)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self.device)

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> ZeroEngine:
        """Return DeepSpeed's engine for `model`, with settings that follow from the recipe and `plan`."""
        params = sum(full_shape(p).numel() for p in model.parameters() if p.requires_grad)
        self._settings.update(deepspeed_settings(self._config, plan, self.name, self._precision, params=params))
        self._accelerator.gradient_accumulation_steps = plan.accumulation
        dtype = HALF_DTYPES.get(self._precision)
        if dtype is not None:
            use_autocast(model, dtype, self.device, cache_weights=self.name != "zero3")
        wrapped, optimizer = self._accelerator.prepare(model, optimizer)
        check_engine(wrapped, self._config, plan)
        if dtype is not None and self.name == "zero3":
            free_gathered_weights(model)
            send_in_half_precision(model, dtype)
        if dtype is torch.float16:
            scale_loss(wrapped.optimizer)
        if self._settings["zero_optimization"].get("offload_optimizer", {}).get("device") == "cpu":
            use_all_threads()
        return ZeroEngine(self, model, wrapped, optimizer, self._accelerator)

    @property
    def _settings(self) -> dict[str, Any]:
        """DeepSpeed's settings, which it reads when layers are sharded and when the engine is built."""
        return self._accelerator.state.deepspeed_plugin.deepspeed_config  # type: ignore[union-attr]

    def _shard(self, module: nn.Module) -> None:
        """Partition all full parameters of `module` over ranks, with the values of rank 0."""
        import deepspeed

        for p in [p for p in module.parameters() if not hasattr(p, "ds_id")]:
            if self._first_sharded is None:
                # DeepSpeed's constructor takes a module; parameters then know how to convert others.
                deepspeed.zero.Init(module=nn.ParameterList([p]), config_dict_or_path=self._settings)
                self._first_sharded = p
            else:
                self._first_sharded.convert_to_zero_parameters(param_list=[p])


def use_all_threads() -> None:
    """Use this process's share of the cores for the optimizer of offloaded state; all ranks must call it.

    Launchers allow each process a single thread, as if all work were on the GPU. A number that the user has set is
    respected, and data-loading workers keep their single thread.
    """
    cores = own_cores()
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1 and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(cores)


class ZeroEngine:
    """DeepSpeed's engine around a model."""

    def __init__(
        self,
        strategy: ZeroStrategy,
        model: nn.Module,
        wrapped: Any,
        optimizer: torch.optim.Optimizer,
        accelerator: Accelerator,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.device, self.rank, self.world = strategy.device, strategy.rank, strategy.world
        self.shards: Shards = (Zero3Shards if strategy.name == "zero3" else Zero12Shards)(model, wrapped)
        self.input_dtype = next(model.parameters()).dtype
        self.loss_scale = deepspeed_loss_scale(wrapped.optimizer)
        self._strategy, self._wrapped, self._accelerator = strategy, wrapped, accelerator
        self._is_trying = False

    def __call__(self, *args: torch.Tensor) -> Any:
        """Run the forward pass."""
        return self._wrapped(*args)

    def accumulate(self) -> AbstractContextManager[Any]:
        """Let DeepSpeed know which micro-batch is the last of a step."""
        return self._accelerator.accumulate(self._wrapped)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a micro-batch; after the last one of a step, DeepSpeed clips and steps."""
        if self._is_trying:
            self._wrapped.backward(loss)
        else:
            self._accelerator.backward(loss)

    def step(self, clip_norm: float) -> torch.Tensor:
        """Return the gradient norm of the step that the last `backward` took, clipped to the recipe's norm."""
        norm = self._wrapped.get_global_grad_norm()
        return torch.as_tensor(0.0 if norm is None else norm)

    def set_micro_batch(self, plan: Plan) -> None:
        """Use the micro-batch and accumulation steps of `plan` from the next step on."""
        self._accelerator.gradient_accumulation_steps = plan.accumulation
        self._wrapped.set_train_micro_batch_size(plan.micro_batch)
        self._wrapped.set_train_batch_size(plan.global_batch)
        self._wrapped.optimizer.gradient_accumulation_steps = plan.accumulation

    def editing(self, parameter: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Give access to the full values of a parameter; all ranks must enter, and the changes of rank 0 count."""
        return self._strategy.editing(parameter)

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Discard the gradient of the passes inside. Ranks communicate in them as in a step.

        After an error in a forward pass or in the loss the engine is usable if it occurred on every rank.
        """
        zero, before = self._wrapped.optimizer, self._wrapped.optimizer.micro_step_id
        self._is_trying = True
        self._wrapped.set_gradient_accumulation_boundary(is_boundary=False)
        try:
            yield
        except BaseException:
            if isinstance(self.shards, Zero3Shards):
                zero.empty_partition_cache()  # Layers in use keep their full weights otherwise.
            raise
        finally:
            self._is_trying = False
            zero.zero_grad()
            zero.micro_step_id = before
            if isinstance(self.shards, Zero12Shards):
                zero.averaged_gradients, zero.all_grad_tensors = {}, {}

    def future_bytes(self) -> int:
        """Return 0: DeepSpeed allocates its state when the engine is built."""
        return 0
