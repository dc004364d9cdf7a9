"""Linear layers and GELU, on a CPU with oneDNN's products instead of those that torch calls there.

Shapes: R rows (tokens of all images), I features in, O features out.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vit_scale.kernels import cpu

_ROWS_OF_A_PART = 512
"""Of a sum over rows: what is copied of them, to be read across, stays in the cache."""


class Linear(nn.Linear):
    """torch's layer, with `linear` for its product."""

    def forward(self, x: Tensor) -> Tensor:
        """Each row on its own."""
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`.

    On a CPU torch first writes the bias to every row and then adds MKL's product to it. oneDNN adds the bias while it
    has the product at hand, and its products themselves are faster on an AMD EPYC: by a tenth, or twice as fast where
    the processor computes vectors of AVX-512 at their full width, which MKL does not use there.
    """
    if cpu.is_worth_a_product(x, weight_OI.shape[0]):
        return _OneDnnLinear.apply(x, weight_OI, bias_O)
    return F.linear(x, weight_OI, bias_O)


def gelu(x: Tensor) -> Tensor:
    """The exact GELU. The gradient that comes back is changed in place on a CPU: of a result that is used only once."""
    return _Gelu.apply(x) if cpu.is_worth_a_pass(x) else F.gelu(x)


class _OneDnnLinear(torch.autograd.Function):
    """Each product by oneDNN, but for the weight's gradient on Intel's CPUs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight_OI if needs_x else None)
        # resize_ and not view: a view that a function returns must not be changed in place, as a residual sum does.
        return _product(_rows(x), weight_OI, bias_O).resize_(*x.shape[:-1], weight_OI.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_RO = _rows(grad)
        return (
            _product(grad_RO, weight_OI.t()).resize_(*grad.shape[:-1], weight_OI.shape[1]) if needs_x else None,
            _weight_gradient(grad_RO, _rows(x)) if needs_weight else None,
            grad_RO.sum(0) if needs_bias else None,
        )


class _Gelu(torch.autograd.Function):
    """torch's, with the gradient in the place of the one that comes in: a hidden layer less at the peak."""

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
    """The sum over all rows of gradient times input, [O, I]."""
    if cpu.is_intel():
        return grad_RO.t() @ x_RI  # By MKL, which is at home there; how oneDNN compares was not measured.
    # torch's call copies what is read across the rows: the narrower one. oneDNN reads the other along them.
    across, along = (x_RI, grad_RO) if grad_RO.shape[1] > x_RI.shape[1] else (grad_RO, x_RI)
    if _is_slow_along(along.shape[1]):
        across, along = along, across
    along = along.contiguous()  # oneDNN has no fast way for rows with gaps between them.
    parts = -(-grad_RO.shape[0] // _ROWS_OF_A_PART)
    total: Tensor | None = None
    for some_across, some_along in zip(across.chunk(parts), along.chunk(parts), strict=True):
        product = _onednn(some_across.t(), some_along.t(), None)
        total = product if total is None else total.add_(product)
    assert total is not None
    return total if across is grad_RO else total.t().contiguous()


def _product(x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return _onednn(x_RI, _laid_out(weight_OI, x_RI.shape[0]), bias_O)


def _laid_out(weight_OI: Tensor, rows: int) -> Tensor:
    """The weight as oneDNN reads it fastest, copied where the product is large enough to pay for that.

    It prefers numbers of different outputs side by side to those of different inputs: measured on an AMD EPYC, 1.1 to
    1.2 times as fast with up to 512 inputs, the copy included.
    """
    outputs, inputs = weight_OI.shape
    if _is_slow_along(outputs):
        return weight_OI.contiguous()
    return weight_OI.t().contiguous().t() if inputs <= 512 and rows >= 2048 else weight_OI


def _is_slow_along(columns: int) -> bool:
    """Whether oneDNN without AVX-512 reads such rows at half its speed: measured for 3072, 5120 and 6144 numbers."""
    return columns > 2048 and columns % 1024 == 0 and cpu.vectors() != "AVX512"


def _onednn(x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_RI, weight_OI, bias_O, "none", [], "")
