"""From gradients to weights: norm, clipping, and the guard that lets nothing non-finite reach the optimizer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def guarded_step(
    optimizer: torch.optim.Optimizer, clip_norm: float, scaler: torch.amp.GradScaler | None = None
) -> torch.Tensor:
    """Clip, step unless the gradient is non-finite, clear gradients; return the gradient norm, on the device.

    Gradients are averaged over ranks before, so all ranks see the same norm and decide the same way. `scaler` is the
    loss scaler of fp16.
    """
    if scaler is not None:
        scaler.unscale_(optimizer)
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads, foreach=True)
    if scaler is not None:
        _scaled_step(optimizer, scaler, grads, norm, clip_norm)
    elif getattr(optimizer, "_step_supports_amp_scaling", False):
        _fused_step(optimizer, norm, clip_norm)
    else:
        _plain_step(optimizer, grads, norm, clip_norm)
    optimizer.zero_grad(set_to_none=True)
    return norm


def _clip_divisor(norm: torch.Tensor, clip_norm: float) -> torch.Tensor:
    """Return what gradients are divided by: 1 within the limit. The same formula as DeepSpeed's."""
    return ((norm + 1e-6) / clip_norm).clamp(min=1.0) if clip_norm else torch.ones_like(norm)


def _fused_step(optimizer: torch.optim.Optimizer, norm: torch.Tensor, clip_norm: float) -> None:
    """Step with a fused kernel, which divides by `grad_scale` and skips on `found_inf` itself, without a host sync."""
    optimizer.grad_scale = _clip_divisor(norm, clip_norm)  # type: ignore[attr-defined]
    optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
    optimizer.step()


def _plain_step(optimizer: torch.optim.Optimizer, grads: list[torch.Tensor], norm: torch.Tensor, clip: float) -> None:
    """Step without such a kernel: read the norm on a CPU, where it costs nothing; undo the step on a GPU."""
    torch._foreach_div_(grads, _clip_divisor(norm, clip))
    if norm.device.type != "cpu":
        _undoable_step(optimizer, grads, norm.isfinite())
    elif norm.isfinite():
        optimizer.step()


@torch.no_grad()
def _undoable_step(optimizer: torch.optim.Optimizer, grads: list[torch.Tensor], good: torch.Tensor) -> None:
    """Step, then undo it on the device if `good` is false.

    Needs a temporary copy of weights and optimizer state at every step. Counters that an optimizer keeps on the host
    cannot be undone; they run ahead by the skipped steps.

    Old or new is chosen by multiplying the bits, as integers, by 0 or 1: exact for every number and NaN, and a few
    kernels for all tensors instead of several for each.
    """
    bad = ~good
    _multiply_bits_(grads, good)
    tensors = [tensor for tensor in _tensors_of(optimizer) if tensor.device == good.device]
    before = [torch.empty_like(tensor) for tensor in tensors]
    torch._foreach_copy_(before, tensors)
    optimizer.step()
    _multiply_bits_(tensors, good)
    _multiply_bits_(before, bad)
    for new, old in zip(_bits_by_type(tensors), _bits_by_type(before), strict=True):
        torch._foreach_add_(new, old)


def _multiply_bits_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Keep `tensors` if `factor` is true, otherwise set them to zero."""
    for bits in _bits_by_type(tensors):
        torch._foreach_mul_(bits, factor.to(bits[0].dtype))


def _bits_by_type(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return views of `tensors` as integers, grouped by size of an element."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        bits = tensor.detach().view(_INTEGERS[tensor.element_size()])
        groups.setdefault(bits.dtype, []).append(bits)
    return list(groups.values())


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield weights with a gradient and the existing optimizer state."""
    yield from (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    for entries in optimizer.state.values():
        yield from (value for value in entries.values() if isinstance(value, torch.Tensor))


def _scaled_step(
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    grads: list[torch.Tensor],
    norm: torch.Tensor,
    clip: float,
) -> None:
    """Step in fp16: the loss scaler skips non-finite steps and lowers its scale."""
    torch._foreach_div_(grads, _clip_divisor(norm, clip))
    scaler.step(optimizer)
    scaler.update()
