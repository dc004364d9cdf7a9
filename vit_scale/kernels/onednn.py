"""Linear layers and GELU on a CPU, with oneDNN's matmuls instead of MKL's, which torch calls there.

Shapes: R rows (tokens of all images), I features in, O features out.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from vit_scale.kernels import cpu

_ROWS_PER_CHUNK = 512
"""Rows summed per matmul: few enough that the transposed copy of them stays in the cache."""


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`, differentiable once if oneDNN computes it.

    On a CPU torch first writes the bias to every row and then adds MKL's matmul to it. oneDNN adds the bias within the
    matmul, and its matmuls are faster on an AMD EPYC: by 10%, or 2x if the processor computes AVX-512 vectors at full
    width, which MKL does not use there.
    """
    if cpu.use_custom_matmul(x, weight_OI.shape[0]) and type(weight_OI) in (Tensor, Parameter):
        return _OneDnnLinear.apply(x, weight_OI, bias_O)
    return F.linear(x, weight_OI, bias_O)


def gelu_overwriting_grad(x: Tensor) -> Tensor:
    """Return the exact GELU. On a CPU its backward pass overwrites the incoming gradient.

    Only for an output that is used once: no other consumer may receive the same gradient tensor.
    """
    return _Gelu.apply(x) if cpu.use_custom_elementwise(x) else F.gelu(x)


class _OneDnnLinear(torch.autograd.Function):
    """Every matmul by oneDNN, except the weight gradient on Intel CPUs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight_OI if needs_x else None)
        # resize_, not view: a view returned by a Function must not be overwritten, which a residual sum does.
        return _matmul(_rows(x), weight_OI, bias_O).resize_(*x.shape[:-1], weight_OI.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_RO = _rows(grad)
        return (
            _matmul(grad_RO, weight_OI.t()).resize_(*grad.shape[:-1], weight_OI.shape[1]) if needs_x else None,
            _weight_gradient(grad_RO, _rows(x)) if needs_weight else None,
            grad_RO.sum(0) if needs_bias else None,
        )


class _Gelu(torch.autograd.Function):
    """torch's GELU, with the gradient written over the incoming one: one hidden layer less of peak memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.gelu_backward.grad_input(grad, x, grad_input=grad)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _weight_gradient(grad_RO: Tensor, x_RI: Tensor) -> Tensor:
    """Return the sum over all rows of gradient times input, [O, I]."""
    if cpu.is_intel():
        return grad_RO.t() @ x_RI  # By MKL, which is tuned for it; oneDNN was not measured there.
    # torch copies the operand that is read across rows: make it the narrower one. oneDNN reads the other along rows.
    across, along = (x_RI, grad_RO) if grad_RO.shape[1] > x_RI.shape[1] else (grad_RO, x_RI)
    if _is_slow_along(along.shape[1]):
        across, along = along, across
    along = along.contiguous()  # oneDNN is slow for rows with gaps between them.
    parts = -(-grad_RO.shape[0] // _ROWS_PER_CHUNK)
    total: Tensor | None = None
    for some_across, some_along in zip(across.chunk(parts), along.chunk(parts), strict=True):
        part = _onednn(some_across.t(), some_along.t(), None)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total if across is grad_RO else total.t().contiguous()


def _matmul(x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return _onednn(x_RI, _laid_out(weight_OI, x_RI.shape[0]), bias_O)


def _laid_out(weight_OI: Tensor, rows: int) -> Tensor:
    """Return the weight in the layout that oneDNN reads fastest, copied if the matmul is large enough to pay for it.

    That is with different outputs adjacent in memory: measured on an AMD EPYC, 1.1x to 1.2x as fast with up to 512
    inputs, including the copy.
    """
    outputs, inputs = weight_OI.shape
    if _is_slow_along(outputs):
        return weight_OI.contiguous()
    return weight_OI.t().contiguous().t() if inputs <= 512 and rows >= 2048 else weight_OI


def _is_slow_along(columns: int) -> bool:
    """Return whether oneDNN without AVX-512 reads such rows at half its speed: measured for 3072, 5120 and 6144."""
    return columns > 2048 and columns % 1024 == 0 and cpu.vectors() != "AVX512"


def _onednn(x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_RI, weight_OI, bias_O, "none", [], "")
