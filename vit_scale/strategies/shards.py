"""Who holds what: the tensors of a run as pieces of flattened parameters, alike under every strategy.

EMA and checkpoints work on pieces only, so they neither know nor care whether weights are replicated (one process,
DDP) or partitioned (ZeRO). A piece is a view: writing to it changes the run.

- owned pieces: each element of each parameter is owned by exactly one process, about 1/processes each.
- held pieces: all that this process must fill when a checkpoint is read; under ZeRO the owned ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Scalars = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `start + tensor.numel()` of a flattened parameter, in fp32 where the strategy keeps that."""

    tensor: torch.Tensor
    start: int


Pieces = dict[str, Piece]


class Replicated:
    """One process or DDP: every process has every tensor whole, and owns an equal run of each."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int) -> None:
        self.model, self.optimizer, self.rank, self.world = model, optimizer, rank, world
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def weights(self, *, owned: bool) -> Pieces:
        return {name: piece for name, p in self.params.items() if (piece := self._piece(p.data, owned))}

    def optimizer_tensors(self, *, owned: bool) -> dict[str, Pieces]:
        """`exp_avg` and the like: state that has an element for each element of a parameter."""
        found: dict[str, Pieces] = {}
        for name, p in self.params.items():
            for key, value in self.optimizer.state.get(p, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == p.shape and (piece := self._piece(value, owned)):
                    found.setdefault(key, {})[name] = piece
        return found

    def optimizer_scalars(self) -> Scalars:
        """All other state of the optimiser by parameter: counters, factored moments, flags."""
        return {
            name: {k: v for k, v in entries.items() if not (isinstance(v, torch.Tensor) and v.shape == p.shape)}
            for name, p in self.params.items()
            if (entries := self.optimizer.state.get(p))
        }

    def make_optimizer_state(self, tensor_keys: Callable[[str], list[str]], scalars: Scalars) -> None:
        """Make state as if steps had been taken, for a checkpoint to be read into.

        `tensor_keys` names the state of a parameter that has an element for each of its own.
        """
        for name, p in self.params.items():
            if name in scalars:
                entries = {k: _to(v, p.device) for k, v in scalars[name].items()}
                self.optimizer.state[p] = entries | {k: torch.zeros_like(p) for k in tensor_keys(name)}

    def publish(self) -> None:
        """Make all copies of the weights equal to what their owners have."""
        if self.world == 1:
            return
        for p in self.params.values():
            chunk = -(-p.numel() // self.world)
            whole = torch.empty(chunk * self.world, dtype=p.dtype, device=p.device)
            mine = whole[self.rank * chunk : (self.rank + 1) * chunk].clone()
            if piece := self._piece(p.data, owned=True):
                mine[: piece.tensor.numel()] = piece.tensor
            dist.all_gather_into_tensor(whole, mine)
            p.data.view(-1).copy_(whole[: p.numel()])

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Weights and buffers whole, under timm's names."""
        return self.model.state_dict()

    def _piece(self, tensor: torch.Tensor, owned: bool) -> Piece | None:
        flat = tensor.view(-1)
        if not owned or self.world == 1:
            return Piece(flat, 0)
        chunk = -(-flat.numel() // self.world)
        start, end = self.rank * chunk, min((self.rank + 1) * chunk, flat.numel())
        return Piece(flat[start:end], start) if start < end else None


class _Partitioned:
    """What the ZeRO stages share: the optimiser works on flat fp32 partitions, here cut back into parameters."""

    def __init__(self, model: nn.Module, engine: Any) -> None:
        self.model, self.engine, self.zero = model, engine, engine.optimizer
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def _place(self, p: nn.Parameter) -> tuple[torch.Tensor, int, int, int] | None:
        """The flat partition with a part of `p`, offset and length there, and where the part starts in `p`."""
        raise NotImplementedError

    def _cut(self, tensor_of: Any) -> Pieces:
        pieces = {}
        for name, p in self.params.items():
            if place := self._place(p):
                flat, offset, length, start = place
                pieces[name] = Piece(tensor_of(flat).narrow(0, offset, length), start)
        return pieces

    def weights(self, *, owned: bool) -> Pieces:
        return self._cut(lambda flat: flat.data)

    def optimizer_tensors(self, *, owned: bool) -> dict[str, Pieces]:
        state = self.zero.optimizer.state
        keys = {
            key: None
            for flat, entries in state.items()
            for key, value in entries.items()
            if isinstance(value, torch.Tensor) and value.shape == flat.shape
        }
        return {key: self._cut(lambda flat, key=key: state[flat][key]) for key in keys}

    def optimizer_scalars(self) -> Scalars:
        scalars: Scalars = {}
        for name, p in self.params.items():
            place = self._place(p)
            if place and (entries := self.zero.optimizer.state.get(place[0])):
                flat = place[0]
                scalars[name] = {k: v for k, v in entries.items() if not _same_shape(v, flat)}
        return scalars

    def make_optimizer_state(self, tensor_keys: Callable[[str], list[str]], scalars: Scalars) -> None:
        for name, p in self.params.items():
            place = self._place(p)
            if place and name in scalars and not self.zero.optimizer.state.get(place[0]):
                flat = place[0]
                entries = {k: _to(v, flat.device) for k, v in scalars[name].items()}
                self.zero.optimizer.state[flat] = entries | {k: torch.zeros_like(flat.data) for k in tensor_keys(name)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Weights and buffers whole, in fp32, under timm's names; all processes must call it."""
        shapes = {name: _full_shape(p) for name, p in self.params.items()}
        whole = gather(self.weights(owned=True), shapes, self.engine.device)
        with self._frozen_gathered():
            rest = {k: _whole_precision(v) for k, v in self.model.state_dict().items() if k not in self.params}
        return {name: whole.get(name, rest.get(name)) for name in self.model.state_dict()}  # type: ignore[misc]

    @contextmanager
    def _frozen_gathered(self) -> Iterator[None]:
        import deepspeed

        frozen = [p for p in self.model.parameters() if not p.requires_grad and hasattr(p, "ds_id")]
        with deepspeed.zero.GatheredParameters(frozen):
            yield


class Zero12(_Partitioned):
    """ZeRO-1 and -2."""

    def _place(self, p: nn.Parameter) -> tuple[torch.Tensor, int, int, int] | None:
        mapping = getattr(p, "_hp_mapping", None)
        if mapping is None:
            return None
        flat = self.zero.single_partition_of_fp32_groups[mapping.param_group_index]
        address = mapping.hp_fragment_address
        return flat, address.start, address.numel, mapping.lp_fragment_address.start

    def publish(self) -> None:
        """The weights of the forward pass from the fp32 partitions, on all processes."""
        self.zero.update_lp_params()


class Zero3(_Partitioned):
    """ZeRO-3."""

    def _place(self, p: nn.Parameter) -> tuple[torch.Tensor, int, int, int] | None:
        group, offset, length = self.zero.grad_position[self.zero.get_param_id(p)]
        start = dist.get_rank() * length
        length = min(length, p.ds_numel - start)  # type: ignore[attr-defined]  # the last partition is padded
        return (self.zero.fp32_partitioned_groups_flat[group], offset, length, start) if length > 0 else None

    def publish(self) -> None:
        """The partitions that the forward pass gathers, and the small parameters that stay gathered."""
        self.zero._partition_all_parameters()
        for group in range(len(self.zero.fp16_groups)):
            self.zero._reassign_or_swap_out_partitioned_parameters(group)
        if persistent := self.zero.persistent_parameters:
            persistent[0].all_gather(persistent)


Shards = Replicated | Zero12 | Zero3


def make_shards(model: nn.Module, wrapped: Any, optimizer: torch.optim.Optimizer, strategy: str) -> Shards:
    """The shards of a model that `strategy` has wrapped."""
    if strategy == "zero3":
        return Zero3(model, wrapped)
    if strategy.startswith("zero"):
        return Zero12(model, wrapped)
    spread = dist.is_initialized()
    return Replicated(model, optimizer, dist.get_rank() if spread else 0, dist.get_world_size() if spread else 1)


def gather(pieces: Pieces, shapes: dict[str, torch.Size], device: torch.device) -> dict[str, torch.Tensor]:
    """Whole tensors from the owned pieces of all processes; all must call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {name: pieces[name].tensor.view(shape) for name, shape in shapes.items()}
    whole = {}
    for name, shape in shapes.items():
        # Bits are added as integers: a float sum would turn -0.0 into 0.0.
        buffer = torch.zeros(shape.numel(), dtype=torch.int32, device=device)
        if piece := pieces.get(name):
            buffer[piece.start : piece.start + piece.tensor.numel()] = piece.tensor.float().view(torch.int32).to(device)
        dist.all_reduce(buffer)
        whole[name] = buffer.view(torch.float32).view(shape)
    return whole


def _full_shape(p: nn.Parameter) -> torch.Size:
    return getattr(p, "ds_shape", p.shape)


def _whole_precision(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to(torch.float32 if value.is_floating_point() else value.dtype, copy=True)


def _same_shape(value: Any, flat: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == flat.shape


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value
