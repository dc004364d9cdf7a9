"""Linear layers and GELU on a CPU: torch's values and gradients, whichever library computes them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_scale.kernels import cpu
from vit_scale.kernels.cpu import WORTHWHILE_ELEMENTS, WORTHWHILE_MACS
from vit_scale.kernels.onednn import gelu_overwriting_grad, linear
from vit_scale.models import create_model

OUT = 256
ENOUGH_ROWS = WORTHWHILE_MACS // (OUT * 128)
SHAPES = {
    "rows": (ENOUGH_ROWS, 128),
    "tokens of images": (8, ENOUGH_ROWS // 8, 128),
    "an odd number of rows": (7, ENOUGH_ROWS // 4 + 3, 128),
}


def made_by_onednn(y: Tensor) -> bool:
    return "OneDnnLinear" in type(y.grad_fn).__name__


def leaves(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and bias."""
    torch.manual_seed(0)
    tensors = torch.randn(shape), torch.randn(OUT, shape[-1]) / 10, torch.randn(OUT)
    return tensors[0].requires_grad_(), tensors[1].requires_grad_(), tensors[2].requires_grad_()


def assert_same_gradients(found: Tensor, expected: Tensor, of: list[Tensor], grad: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    pairs = zip(torch.autograd.grad(found, of, grad), torch.autograd.grad(expected, of, grad), strict=True)
    for ours, torchs in pairs:
        # Sums over thousands of rows, in another order.
        torch.testing.assert_close(ours, torchs, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_values_and_gradients_equal_torchs(shape: tuple[int, ...], with_bias: bool) -> None:
    x, weight, bias = leaves(*shape)
    of = [x, weight, bias] if with_bias else [x, weight]
    found = linear(x, weight, bias if with_bias else None)
    assert made_by_onednn(found)
    expected = F.linear(x, weight, bias if with_bias else None)
    assert_same_gradients(found, expected, of, torch.randn_like(expected))


CPUS = {"AMD, AVX-512": ("AVX512", False), "AMD, AVX2": ("AVX2", False), "Intel": ("AVX512", True)}
LAYERS = {
    "wider": (2100, 128, 384),
    "narrower": (2100, 384, 128),
    "as wide": (2100, 256, 256),
    "few rows": (300, 256, 512),
    "to a width that is slow with AVX2": (700, 64, 3072),
    "from such a width": (700, 3072, 64),
}
"""Rows, features in, features out."""


@pytest.mark.parametrize("kind", CPUS.values(), ids=CPUS)
@pytest.mark.parametrize("sizes", LAYERS.values(), ids=LAYERS)
def test_every_matmul_layout_gives_the_same_result(
    sizes: tuple[int, int, int], kind: tuple[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, inputs, outputs = sizes
    monkeypatch.setattr(cpu, "vectors", lambda: kind[0])
    monkeypatch.setattr(cpu, "is_intel", lambda: kind[1])
    torch.manual_seed(0)
    x = torch.randn(rows, inputs, requires_grad=True)
    weight = (torch.randn(outputs, inputs) / inputs**0.5).requires_grad_()
    bias = torch.randn(outputs, requires_grad=True)
    found = linear(x, weight, bias)
    assert made_by_onednn(found)
    expected, grad = F.linear(x, weight, bias), torch.randn(rows, outputs)
    assert_same_gradients(found, expected, [x, weight, bias], grad)
    linear(x, weight, bias).backward(grad)
    assert weight.grad is not None
    assert weight.grad.is_contiguous()


def test_inputs_and_gradients_may_have_any_strides() -> None:
    """A slice of the weight, tokens that are a view, an expanded gradient."""
    x, weight, bias = leaves(8, ENOUGH_ROWS // 2, 128)
    part, half, rest = x.transpose(0, 1), weight[: OUT // 2], bias[OUT // 2 :]
    found = linear(part, half, rest)
    assert made_by_onednn(found)
    assert_same_gradients(found, F.linear(part, half, rest), [x, weight, bias], torch.ones(1, 1, 1).expand(found.shape))


@pytest.mark.parametrize("inputs", [128, 256, 512])
def test_strided_rows_and_expanded_gradients_are_supported(inputs: int) -> None:
    """As in the last block, which computes only the first tokens."""
    rows = -(-WORTHWHILE_MACS // (OUT * inputs))
    x = torch.randn(rows, 3, inputs, requires_grad=True)
    weight, bias = torch.randn(OUT, inputs, requires_grad=True), torch.randn(OUT, requires_grad=True)
    found = linear(x[:, :1], weight, bias)
    assert made_by_onednn(found)
    expected = F.linear(x[:, :1], weight, bias)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    for grad in (torch.randn_like(expected), torch.full((1, 1, 1), 0.1).expand(expected.shape)):
        ours = torch.autograd.grad(found, [x, weight, bias], grad, retain_graph=True)
        torchs = torch.autograd.grad(expected, [x, weight, bias], grad, retain_graph=True)
        torch.testing.assert_close(ours, torchs, atol=2e-3, rtol=1e-4)


def test_result_may_be_changed_in_place() -> None:
    """As residual sums and dropout do."""
    x, weight, bias = leaves(*SHAPES["tokens of images"])
    found = linear(x, weight, bias).mul_(2).add_(1)
    expected = F.linear(x, weight, bias) * 2 + 1
    assert_same_gradients(found, expected, [x, weight, bias], torch.randn_like(expected))


@pytest.mark.parametrize("trained", [0, 1, 2])
def test_frozen_inputs_get_no_gradient_and_nothing_is_saved_for_them(trained: int) -> None:
    tensors = [t.requires_grad_(i == trained) for i, t in enumerate(leaves(*SHAPES["rows"]))]
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        found = linear(*tensors)
    assert made_by_onednn(found)
    assert kept == {0: [tuple(tensors[1].shape)], 1: [tuple(tensors[0].shape)], 2: []}[trained]
    found.sum().backward()
    assert [tensor.grad is not None for tensor in tensors] == [i == trained for i in range(3)]


def test_small_matmul_uses_torch() -> None:
    assert not made_by_onednn(linear(torch.randn(4, 128), *leaves(4, 128)[1:]))


def test_every_matmul_uses_torch_if_kernels_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIT_SCALE_KERNELS", "0")
    assert not made_by_onednn(linear(*leaves(*SHAPES["rows"])))


def test_weight_of_another_tensor_type_uses_torch() -> None:
    """Such as torchao's quantized weights inside an nn.Linear."""
    from torch.testing._internal.two_tensor import TwoTensor

    x, weight, _ = leaves(*SHAPES["rows"])
    found = linear(x.detach(), TwoTensor(weight.detach(), weight.detach()))
    assert torch.equal(found.a, F.linear(x, weight))


def test_autocast_uses_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tested with a stub of torch's layer: some CPUs that advertise bf16 matmuls crash in them."""
    tensors = leaves(*SHAPES["rows"])
    monkeypatch.setattr(F, "linear", lambda *_: "torch's")
    assert made_by_onednn(linear(*tensors))
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(*tensors) == "torch's"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_precisions_other_than_fp32_use_torch(dtype: torch.dtype) -> None:
    found = linear(*(tensor.to(dtype) for tensor in leaves(*SHAPES["rows"])))
    assert found.dtype == dtype
    assert made_by_onednn(found) == (dtype == torch.float32)


def test_compiled_layer_is_one_graph() -> None:
    layer = nn.Linear(128, OUT)
    x = torch.randn(*SHAPES["rows"])
    compiled = torch.compile(
        lambda x: gelu_overwriting_grad(linear(x, layer.weight, layer.bias)), backend="eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(x), F.gelu(F.linear(x, layer.weight, layer.bias)))


def test_gelu_equals_torchs_and_overwrites_the_incoming_gradient() -> None:
    x = torch.randn(2, WORTHWHILE_ELEMENTS, requires_grad=True)
    came = torch.randn_like(x)
    (expected,) = torch.autograd.grad(F.gelu(x), x, came)
    result = gelu_overwriting_grad(x)
    assert torch.equal(result, F.gelu(x))
    (found,) = torch.autograd.grad(result, x, came)
    assert torch.equal(found, expected)
    assert found.data_ptr() == came.data_ptr()


def test_gradient_that_is_used_elsewhere_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The terms of a sum receive the same tensor: each must have the gradient that it has alone."""
    monkeypatch.setattr(cpu, "WORTHWHILE_ELEMENTS", 0)
    torch.manual_seed(0)
    model = create_model("vit_mu").train()
    with torch.no_grad():
        model.head.weight.normal_()
    images = torch.randn(2, model.in_chans, *model.img_size)
    alone, together = images.clone().requires_grad_(), images.clone().requires_grad_()
    model(alone).sum().backward()
    (model(together) + model(together)).sum().backward()
    torch.testing.assert_close(together.grad, 2 * alone.grad)
