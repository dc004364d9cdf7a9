"""Linear layers and GELU, on a CPU with oneDNN's products instead of those that torch calls there.

Shapes: R rows (tokens of all images), I features in, O features out.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

WORTHWHILE_MACS = 2**25
WORTHWHILE_ELEMENTS = 2**18
"""Less than that takes less time than the Python around it."""


class Linear(nn.Linear):
    """torch's layer, with `linear` for its product."""

    def forward(self, x: Tensor) -> Tensor:
        """Each row on its own."""
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`.

    On a CPU torch first writes the bias to every row and then adds MKL's product to it. oneDNN adds the bias while it
    has the product at hand, and its products themselves are faster by a tenth on an AMD EPYC.
    """
    if _is_plain_fp32_on_cpu(x) and x.numel() * weight_OI.shape[0] >= WORTHWHILE_MACS:
        return _OneDnnLinear.apply(x, weight_OI, bias_O)
    return F.linear(x, weight_OI, bias_O)


def gelu(x: Tensor) -> Tensor:
    """The exact GELU. The gradient that comes back is changed in place on a CPU: of a result that is used only once."""
    return _Gelu.apply(x) if _is_plain_fp32_on_cpu(x) and x.numel() >= WORTHWHILE_ELEMENTS else F.gelu(x)


def _is_plain_fp32_on_cpu(x: Tensor) -> bool:
    """Not autocast's, nor a compiler's, an exporter's or a counter's stand-in of a tensor, which has no size to ask."""
    return (
        type(x) is Tensor
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and torch.backends.mkldnn.is_available()
    )


class _OneDnnLinear(torch.autograd.Function):
    """Products of x and of its gradient by oneDNN; that of the weight's by the one of both that is faster there."""

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
    # oneDNN copies what it reads across rows, here the gradient: worth it only where that is the smaller one.
    if grad_RO.shape[1] < x_RI.shape[1]:
        return _product(grad_RO.t(), x_RI.t())
    return grad_RO.t() @ x_RI


def _product(x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_RI, weight_OI, bias_O, "none", [], "")
