"""The pieces of a model that DeepSpeed ZeRO has partitioned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vit_scale.checkpoints.pieces import Piece, Pieces, Scalars, Whole
from vit_scale.models.interface import full_shape
from vit_scale.strategies.shards import gather_pieces, to_device


class _PartitionedShards:
    """Common to all ZeRO stages: the optimizer works on flat fp32 partitions, here cut back into parameters."""

    def __init__(self, model: nn.Module, engine: Any) -> None:
        self.model, self.zero = model, engine.optimizer
        self.torch_optimizer: torch.optim.Optimizer = engine.optimizer.optimizer
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._device: torch.device = engine.device

    def _place(self, p: nn.Parameter) -> tuple[torch.Tensor, int, int, int] | None:
        """Return the flat partition with a part of `p`, its offset and length there, and its start in `p`."""
        raise NotImplementedError

    def _cut(self, tensor_of: Callable[[torch.Tensor], torch.Tensor]) -> Pieces:
        pieces = {}
        for name, p in self.params.items():
            if place := self._place(p):
                flat, offset, length, start = place
                pieces[name] = Piece(tensor_of(flat).narrow(0, offset, length), start)
        return pieces

    def weights(self, *, owned: bool) -> Pieces:
        """Return the pieces of the fp32 weights."""
        return self._cut(lambda flat: flat.data)

    def optimizer_tensors(self, *, owned: bool) -> dict[str, Pieces]:
        """Return optimizer state that has one element per parameter element."""
        state = self.torch_optimizer.state
        keys = {key: None for flat, entries in state.items() for key, value in entries.items() if _matches(value, flat)}
        return {key: self._cut(lambda flat, key=key: state[flat][key]) for key in keys}  # type: ignore[misc]

    def optimizer_scalars(self) -> Scalars:
        """Return all other optimizer state."""
        scalars: Scalars = {}
        for name, p in self.params.items():
            place = self._place(p)
            if place and (entries := self.torch_optimizer.state.get(place[0])):
                scalars[name] = {k: v for k, v in entries.items() if not _matches(v, place[0])}
        return scalars

    def make_optimizer_state(self, tensor_keys: Callable[[str], list[str]], scalars: Scalars) -> None:
        """Create optimizer state as if steps had been taken."""
        for name, p in self.params.items():
            place = self._place(p)
            if place and name in scalars and not self.torch_optimizer.state.get(place[0]):
                flat = place[0]
                entries = {k: to_device(v, flat.device) for k, v in scalars[name].items()}
                self.torch_optimizer.state[flat] = entries | {k: torch.zeros_like(flat.data) for k in tensor_keys(name)}

    def whole(self, pieces: Pieces | None = None) -> Whole:
        """Yield full fp32 tensors on rank 0: of `pieces`, or every weight and buffer."""
        shapes = {name: full_shape(p) for name, p in self.params.items()}
        yield from gather_pieces(self.weights(owned=True) if pieces is None else pieces, shapes, self._device)
        if pieces is None:
            yield from self._untrained()

    def _untrained(self) -> Whole:
        """Yield buffers and frozen parameters."""
        import deepspeed

        frozen = {name: p for name, p in self.model.named_parameters() if name not in self.params}
        is_main = dist.get_rank() == 0
        for name, tensor in self.model.state_dict().items():
            if name in self.params:
                continue
            sharded = [frozen[name]] if hasattr(frozen.get(name), "ds_id") else []
            with deepspeed.zero.GatheredParameters(sharded):
                full = sharded[0].data if sharded else tensor
                yield name, _in_fp32(full) if is_main else None


class Zero12Shards(_PartitionedShards):
    """ZeRO-1 and ZeRO-2."""

    def _place(self, p: nn.Parameter) -> tuple[torch.Tensor, int, int, int] | None:
        mapping = getattr(p, "_hp_mapping", None)
        if mapping is None:
            return None
        flat = self.zero.single_partition_of_fp32_groups[mapping.param_group_index]
        address = mapping.hp_fragment_address
        return flat, address.start, address.numel, mapping.lp_fragment_address.start

    def publish(self) -> None:
        """Update the weights of the forward pass from the fp32 partitions, on all ranks."""
        self.zero.update_lp_params()


class Zero3Shards(_PartitionedShards):
    """ZeRO-3."""

    def _place(self, p: nn.Parameter) -> tuple[torch.Tensor, int, int, int] | None:
        group, offset, length = self.zero.grad_position[self.zero.get_param_id(p)]
        start = dist.get_rank() * length
        length = min(length, p.ds_numel - start)  # type: ignore[attr-defined]  # the last partition is padded
        return (self.zero.fp32_partitioned_groups_flat[group], offset, length, start) if length > 0 else None

    def publish(self) -> None:
        """Update the partitions that the forward pass gathers, and the small parameters that stay gathered."""
        self.zero._partition_all_parameters()
        for group in range(len(self.zero.fp16_groups)):
            self.zero._reassign_or_swap_out_partitioned_parameters(group)
        if persistent := self.zero.persistent_parameters:
            persistent[0].all_gather(persistent)


def _in_fp32(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to(torch.float32 if value.is_floating_point() else value.dtype)


def _matches(value: Any, flat: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == flat.shape
