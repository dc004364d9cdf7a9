"""Which rank holds what: training tensors as pieces of flattened parameters, the same interface for every strategy.

EMA and checkpoints use pieces only, so they do not depend on whether weights are replicated (one process, DDP) or
partitioned (ZeRO). A piece is a view: writing to it changes the run.

- owned pieces: each element of each parameter is owned by exactly one rank, about 1/ranks of it each.
- held pieces (`owned=False`): all pieces that this rank must fill to restore a checkpoint; with ZeRO the owned ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from vit_scale.checkpoints.pieces import Piece, Pieces, Scalars, Whole


class Shards(Protocol):
    """The tensors of a run, as this rank holds them."""

    params: dict[str, nn.Parameter]
    """Trained parameters by name."""
    torch_optimizer: torch.optim.Optimizer
    """The optimizer whose `step` changes the weights; ZeRO wraps it."""

    def weights(self, *, owned: bool) -> Pieces:
        """Return the pieces of the trained weights, in fp32 if the strategy keeps fp32 weights."""

    def optimizer_tensors(self, *, owned: bool) -> dict[str, Pieces]:
        """Return optimizer state that has one element per parameter element, such as `exp_avg`."""

    def optimizer_scalars(self) -> Scalars:
        """Return all other optimizer state: counters, factored moments, flags."""

    def make_optimizer_state(self, tensor_keys: Callable[[str], list[str]], scalars: Scalars) -> None:
        """Create optimizer state as if steps had been taken, for a checkpoint to be read into.

        `tensor_keys` returns the names of the state of a parameter that has one element per parameter element.
        """

    def publish(self) -> None:
        """Make all copies of the weights equal to the owned pieces; all ranks must call it."""

    def whole(self, pieces: Pieces | None = None) -> Whole:
        """Yield full tensors, one at a time, on rank 0 only; all ranks must exhaust it.

        `pieces`: owned pieces of trained parameters, such as their EMA; None yields every weight and buffer.
        """


def gather_pieces(pieces: Pieces, shapes: Mapping[str, torch.Size], device: torch.device) -> Whole:
    """Yield full fp32 tensors of these `shapes` on rank 0, assembled from the owned `pieces` of all ranks.

    Each rank sends its pieces to rank 0 only, so no rank holds more than one full tensor at a time.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        for name, shape in shapes.items():
            yield name, pieces[name].tensor.float().view(shape)
        return
    layouts: list[Any] = [None] * dist.get_world_size()
    own = {name: (piece.start, piece.tensor.numel()) for name, piece in pieces.items()}
    dist.gather_object(own, layouts if dist.get_rank() == 0 else None)
    for name, shape in shapes.items():
        piece = pieces.get(name)
        if dist.get_rank() == 0:
            spans = [layout.get(name) for layout in layouts]
            yield name, _receive(piece, spans, device, shape.numel()).view(shape)
        else:
            if piece is not None:
                # Contiguous and on the device: NCCL sends no host memory, where offloaded state is.
                _exchange([dist.P2POp(dist.isend, piece.tensor.float().to(device).contiguous(), 0)])
            yield name, None


def _receive(own: Piece | None, spans: list[tuple[int, int] | None], device: torch.device, numel: int) -> torch.Tensor:
    """Assemble a flat tensor from pieces whose (start, length) by rank are `spans`."""
    full = torch.empty(numel, dtype=torch.float32, device=device)
    if own is not None:
        full[own.start : own.start + own.tensor.numel()] = own.tensor
    others = [(rank, span) for rank, span in enumerate(spans) if rank > 0 and span is not None]
    _exchange([dist.P2POp(dist.irecv, full[start : start + length], rank) for rank, (start, length) in others])
    return full


def _exchange(operations: list[dist.P2POp]) -> None:
    # Batched, because NCCL then uses the communicator that exists; otherwise it creates one per pair of ranks.
    for request in dist.batch_isend_irecv(operations) if operations else []:
        request.wait()


def to_device(value: Any, device: torch.device) -> Any:
    """Copy a tensor to `device`; return anything else unchanged."""
    return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value
