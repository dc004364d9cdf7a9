"""One process and DDP: every rank has every tensor in full."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from vit_scale.checkpoints.pieces import Piece, Pieces, Scalars, Whole
from vit_scale.schedule import Plan
from vit_scale.strategies.guarded_step import guarded_step
from vit_scale.strategies.loss_scale import LossScale, torch_loss_scale
from vit_scale.strategies.shards import Shards, gather_pieces, to_device

if TYPE_CHECKING:
    from accelerate import Accelerator

RESERVED_BYTES_PER_PARAM = 8
"""Two fp32 moments, the state of Adam; most other optimizers keep less."""


class ReplicatedStrategy:
    """One process (`single`) or DDP."""

    def __init__(self, name: str, accelerator: Accelerator) -> None:
        self.name = name
        self.device = accelerator.device
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        self._accelerator = accelerator

    def constructing(self) -> AbstractContextManager[None]:
        """Do nothing: every rank constructs the full model."""
        return nullcontext()

    def editing(self, parameter: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Give access to a parameter's values."""
        return nullcontext(parameter.data)

    def place(self, model: nn.Module) -> None:
        """Move a constructed model to the device."""
        model.to(self.device)

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> PlainEngine:
        """Return the engine that trains `model`."""
        if self.world == 1 and self._accelerator.mixed_precision == "no":
            # There is nothing to wrap, but accelerate would import DTensor to find out (0.7 s).
            engine = PlainEngine(model, optimizer)
        else:
            engine = AcceleratedEngine(model, optimizer, self._accelerator)
        engine.set_micro_batch(plan)
        return engine


class PlainEngine:
    """A model on one process, in the precision of its weights."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0, world: int = 1) -> None:
        self.model, self.optimizer, self.rank, self.world = model, optimizer, rank, world
        first = next(model.parameters())
        self.device, self.input_dtype = first.device, first.dtype
        self.shards: Shards = ReplicatedShards(model, optimizer, rank, world)
        self.loss_scale: LossScale | None = None
        self.accumulation = 1
        """Micro-batches per step."""

    def __call__(self, *args: torch.Tensor) -> Any:
        """Run the forward pass."""
        return self.model(*args)

    def accumulate(self) -> AbstractContextManager[Any]:
        """Do nothing: there are no gradients to synchronize."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a micro-batch."""
        (loss / self.accumulation).backward()

    def step(self, clip_norm: float) -> torch.Tensor:
        """Step the optimizer unless the gradient is non-finite; return the gradient norm."""
        return guarded_step(self.optimizer, clip_norm)

    def set_micro_batch(self, plan: Plan) -> None:
        """Use the micro-batch and accumulation steps of `plan` from the next step on."""
        self.accumulation = plan.accumulation

    def editing(self, parameter: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Give access to a parameter's values."""
        return nullcontext(parameter.data)

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Discard the gradient of the passes inside."""
        try:
            yield
        finally:
            self.optimizer.zero_grad(set_to_none=True)

    def future_bytes(self) -> int:
        """Return the bytes of optimizer state that the first step will allocate."""
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        return RESERVED_BYTES_PER_PARAM * sum(p.numel() for p in trained if not self.optimizer.state.get(p))


class AcceleratedEngine(PlainEngine):
    """A model that accelerate wraps: DDP, autocast, or both.

    The optimizer is not wrapped, because accelerate's wrapper hides the attributes of fused kernels.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, accelerator: Accelerator) -> None:
        super().__init__(model, optimizer, accelerator.process_index, accelerator.num_processes)
        self._accelerator, self._wrapped = accelerator, accelerator.prepare(model)
        self.loss_scale = torch_loss_scale(accelerator.scaler)

    def __call__(self, *args: torch.Tensor) -> Any:
        """Run the forward pass."""
        return self._wrapped(*args)

    def accumulate(self) -> AbstractContextManager[Any]:
        """Synchronize gradients only in the last micro-batch of a step."""
        return self._accelerator.accumulate(self._wrapped)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a micro-batch."""
        self._accelerator.backward(loss)

    def step(self, clip_norm: float) -> torch.Tensor:
        """Step the optimizer unless the gradient is non-finite; return the gradient norm."""
        return guarded_step(self.optimizer, clip_norm, self._accelerator.scaler)

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Discard the gradient of the passes inside, without sending it to other ranks."""
        with super().trying(), self._accelerator.no_sync(self._wrapped):
            yield

    def set_micro_batch(self, plan: Plan) -> None:
        """Use the micro-batch and accumulation steps of `plan` from the next step on."""
        self._accelerator.gradient_accumulation_steps = plan.accumulation


def ddp_options() -> Any:
    """Return accelerate's handler with options for DDP.

    Gradients are views of the communication buckets, which saves a copy of them in time and memory. Buffers are not
    sent in each forward pass: ours are constant, and running statistics, which training does not read, are sent before
    they are used (`share_running_statistics`).
    """
    from accelerate.utils import DistributedDataParallelKwargs

    return DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)


class ReplicatedShards:
    """Every rank holds every tensor in full and owns an equal part of each."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int) -> None:
        self.model, self.torch_optimizer, self.rank, self.world = model, optimizer, rank, world
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def weights(self, *, owned: bool) -> Pieces:
        """Return the pieces of the trained weights."""
        return {name: piece for name, p in self.params.items() if (piece := self._piece(p.data, owned))}

    def optimizer_tensors(self, *, owned: bool) -> dict[str, Pieces]:
        """Return optimizer state that has one element per parameter element."""
        found: dict[str, Pieces] = {}
        for name, p in self.params.items():
            for key, value in self.torch_optimizer.state.get(p, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == p.shape and (piece := self._piece(value, owned)):
                    found.setdefault(key, {})[name] = piece
        return found

    def optimizer_scalars(self) -> Scalars:
        """Return all other optimizer state."""
        return {
            name: {k: v for k, v in entries.items() if not (isinstance(v, torch.Tensor) and v.shape == p.shape)}
            for name, p in self.params.items()
            if (entries := self.torch_optimizer.state.get(p))
        }

    def make_optimizer_state(self, tensor_keys: Callable[[str], list[str]], scalars: Scalars) -> None:
        """Create optimizer state as if steps had been taken."""
        for name, p in self.params.items():
            if name in scalars:
                entries = {k: to_device(v, p.device) for k, v in scalars[name].items()}
                self.torch_optimizer.state[p] = entries | {k: torch.zeros_like(p) for k in tensor_keys(name)}

    def publish(self) -> None:
        """Make all copies of the weights equal to the owned pieces."""
        if self.world == 1:
            return
        for p in self.params.values():
            chunk = -(-p.numel() // self.world)
            full = torch.empty(chunk * self.world, dtype=p.dtype, device=p.device)
            own = full[self.rank * chunk : (self.rank + 1) * chunk].clone()
            if piece := self._piece(p.data, owned=True):
                own[: piece.tensor.numel()] = piece.tensor
            dist.all_gather_into_tensor(full, own)
            p.data.view(-1).copy_(full[: p.numel()])

    def whole(self, pieces: Pieces | None = None) -> Whole:
        """Yield full tensors on rank 0: of `pieces`, or every weight and buffer."""
        if pieces is not None:
            device = next(iter(self.params.values())).device
            yield from gather_pieces(pieces, {name: p.shape for name, p in self.params.items()}, device)
            return
        for name, tensor in self.model.state_dict().items():
            yield name, tensor if self.rank == 0 else None

    def _piece(self, tensor: torch.Tensor, owned: bool) -> Piece | None:
        flat = tensor.view(-1)
        if not owned or self.world == 1:
            return Piece(flat, 0)
        chunk = -(-flat.numel() // self.world)
        start, end = self.rank * chunk, min((self.rank + 1) * chunk, flat.numel())
        return Piece(flat[start:end], start) if start < end else None
