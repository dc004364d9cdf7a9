"""From gradients to weights: norm, clipping, and the guard that lets nothing non-finite through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from vit_scale.train.state import TrainState

if TYPE_CHECKING:
    from accelerate import Accelerator


def apply_update(state: TrainState, accelerator: Accelerator, clip_norm: float) -> torch.Tensor:
    """Clip, step the optimiser unless the gradient is not finite, clear gradients; returns the gradient norm.

    The norm is taken after gradients were averaged over processes, so all of them decide alike. Under DeepSpeed the
    engine has already done all of this in `accelerator.backward`.
    """
    if _is_deepspeed(accelerator):
        norm = state.wrapped.get_global_grad_norm()
        return _count(state, torch.as_tensor(0.0 if norm is None else norm))
    if accelerator.scaler is not None:
        accelerator.scaler.unscale_(state.optimizer)
    grads = [p.grad for group in state.optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads, foreach=True)
    if accelerator.scaler is not None:
        _scaled_step(state, accelerator, grads, norm, clip_norm)
    elif getattr(state.optimizer, "_step_supports_amp_scaling", False):
        _fused_step(state.optimizer, norm, clip_norm)
    else:
        _plain_step(state.optimizer, grads, norm, clip_norm)
    state.optimizer.zero_grad(set_to_none=True)
    return _count(state, norm)


def _is_deepspeed(accelerator: Accelerator) -> bool:
    return accelerator.distributed_type.value == "DEEPSPEED"


def _clip_divisor(norm: torch.Tensor, clip_norm: float) -> torch.Tensor:
    """What gradients are divided by: 1 within the limit. The same formula as DeepSpeed's."""
    return ((norm + 1e-6) / clip_norm).clamp(min=1.0) if clip_norm else torch.ones_like(norm)


def _fused_step(optimizer: torch.optim.Optimizer, norm: torch.Tensor, clip_norm: float) -> None:
    """Fused kernels divide by `grad_scale` and skip on `found_inf` themselves: no extra pass, no host sync."""
    optimizer.grad_scale = _clip_divisor(norm, clip_norm)  # type: ignore[attr-defined]
    optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
    optimizer.step()


def _plain_step(optimizer: torch.optim.Optimizer, grads: list[torch.Tensor], norm: torch.Tensor, clip: float) -> None:
    """Optimisers without that support: on a CPU asking costs nothing; a GPU is not asked but told how to undo."""
    torch._foreach_div_(grads, _clip_divisor(norm, clip))
    if norm.device.type != "cpu":
        _undoable_step(optimizer, grads, norm.isfinite())
    elif norm.isfinite():
        optimizer.step()


@torch.no_grad()
def _undoable_step(optimizer: torch.optim.Optimizer, grads: list[torch.Tensor], good: torch.Tensor) -> None:
    """Step, then take it back on the device where `good` is false.

    Costs a copy of weights and optimiser state while it lasts, and their copying at every step. Counters that an
    optimiser keeps on the host cannot be taken back; they run ahead by the skipped steps.
    """
    for grad in grads:
        grad.masked_fill_(~good, 0.0)
    before = [(tensor, tensor.clone()) for tensor in _tensors_of(optimizer) if tensor.device == good.device]
    optimizer.step()
    for tensor, old in before:
        tensor.copy_(torch.where(good, tensor, old))


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Weights with a gradient, and the optimiser's state as far as it exists."""
    yield from (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    for entries in optimizer.state.values():
        yield from (value for value in entries.values() if isinstance(value, torch.Tensor))


def _scaled_step(
    state: TrainState, accelerator: Accelerator, grads: list[torch.Tensor], norm: torch.Tensor, clip: float
) -> None:
    """fp16: the loss scaler skips non-finite updates and lowers its scale."""
    torch._foreach_div_(grads, _clip_divisor(norm, clip))
    accelerator.scaler.step(state.optimizer)  # type: ignore[union-attr]
    accelerator.scaler.update()  # type: ignore[union-attr]


def _count(state: TrainState, norm: torch.Tensor) -> torch.Tensor:
    bad = (~norm.isfinite()).float().to(state.bad_steps.device)
    state.bad_steps += bad
    state.bad_in_a_row = (state.bad_in_a_row + 1) * bad
    return norm
