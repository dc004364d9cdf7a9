"""The attention kernel for CPUs: torch's values and gradients, for every shape, number of threads and vector width."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vit_scale.kernels import Shortcut, cpu, cpu_attention
from vit_scale.kernels.fast_block import attention_forward
from vit_scale.models.attention import Attention
from vit_scale.models.layers.pos_embed import RelativeBias, RotaryEmbedding

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or cpu.vectors() not in ("AVX2", "AVX512") or shutil.which("gcc") is None,
    reason="not built: another system, another CPU, or no compiler",
)

SHAPES = [
    (1, 1, 1, 16),
    (2, 5, 2, 16),
    (3, 17, 1, 48),
    (2, 48, 3, 32),
    (1, 49, 2, 64),
    (2, 65, 3, 64),
    (1, 197, 2, 64),
    (1, 130, 2, 80),
    (1, 300, 1, 128),
]
"""Images, tokens, heads, head width: less than a vector, full blocks, and slightly more than either."""


@pytest.fixture(params=["AVX2", "AVX512"])
def vectors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each kernel that this CPU runs."""
    if request.param == "AVX512" and cpu.vectors() != "AVX512":
        pytest.skip("this CPU has no AVX-512")
    monkeypatch.setattr(cpu, "vectors", lambda: request.param)
    cpu_attention._library.cache_clear()
    assert cpu_attention.is_built()
    yield request.param
    cpu_attention._library.cache_clear()


def by_torch(qkv_BNC: Tensor, heads: int) -> Tensor:
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv_BNC.chunk(3, dim=-1))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def value_and_gradient(function: object, qkv_BNC: Tensor, heads: int, grad_BND: Tensor) -> tuple[Tensor, Tensor]:
    leaf = qkv_BNC.clone().requires_grad_()
    y_BND = function(leaf, heads)
    (gradient,) = torch.autograd.grad(y_BND, leaf, grad_BND)
    return y_BND.detach(), gradient


def inputs(images: int, tokens: int, heads: int, width: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    dim = heads * width
    return scale * torch.randn(images, tokens, 3 * dim), torch.randn(images, tokens, dim)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_values_and_gradients_are_as_accurate_as_torchs(
    shape: tuple[int, int, int, int], scale: float, vectors: str
) -> None:
    qkv, grad = inputs(*shape, scale)
    exact = value_and_gradient(by_torch, qkv.double(), shape[2], grad.double())
    torchs = value_and_gradient(by_torch, qkv, shape[2], grad)
    found = value_and_gradient(cpu_attention.attend, qkv, shape[2], grad)
    for ours, other, wanted in zip(found, torchs, exact, strict=True):
        rounding = 4e-6 * max(scale, 1)
        assert (ours - wanted).abs().max() <= 3 * (other - wanted).abs().max() + rounding


def test_results_are_bit_identical_for_any_number_of_threads() -> None:
    qkv, grad = inputs(3, 65, 3, 64)
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.append(value_and_gradient(cpu_attention.attend, qkv, 3, grad))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert torch.equal(other[0], found[0][0])
        assert torch.equal(other[1], found[0][1])


@pytest.mark.parametrize("scores", [500.0, -500.0, 1e10, -1e10])
def test_large_scores_stay_finite(scores: float, vectors: str) -> None:
    """All weight on one token, or none; also if the rounding error of a score exceeds any exponent."""
    qkv, grad = inputs(1, 20, 1, 16)
    qkv[..., :32] = 0
    qkv[:, :, 0], qkv[:, 3, 16] = 4.0, scores
    found = value_and_gradient(cpu_attention.attend, qkv, 1, grad)
    expected = value_and_gradient(by_torch, qkv, 1, grad)
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
    if abs(scores) < 1e3:  # Above that, the gradient of a query is dominated by cancellation errors.
        torch.testing.assert_close(found[1], expected[1], atol=5e-4, rtol=1e-4)
    assert found[1].isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_non_finite_values_are_propagated(bad: float, part: str, vectors: str) -> None:
    """The training loop must detect them: where the formula has them, and in no other image."""
    qkv, grad = inputs(2, 37, 1, 16)
    place = {"query": 3, "key": 16 + 3, "value": 32 + 3}[part]
    qkv[1, 5, place] = bad
    y, gradient = value_and_gradient(cpu_attention.attend, qkv, 1, grad)
    assert y[0].isfinite().all()
    assert gradient[0].isfinite().all()
    exact, _ = value_and_gradient(by_torch, qkv.double(), 1, grad.double())
    assert not exact.isfinite().all()
    assert torch.equal(y.isfinite(), exact.isfinite())
    assert not gradient[1].isfinite().all()


def test_empty_batch_gives_an_empty_result() -> None:
    y, gradient = value_and_gradient(cpu_attention.attend, *(torch.empty(0, 9, 48), 1, torch.empty(0, 9, 16)))
    assert y.shape == (0, 9, 16)
    assert gradient.shape == (0, 9, 48)


def test_inputs_and_gradients_may_have_any_strides() -> None:
    qkv, _ = inputs(2, 65, 2, 64)
    turned = qkv.transpose(0, 1).contiguous().transpose(0, 1)
    assert not turned.is_contiguous()
    assert torch.equal(cpu_attention.attend(turned, 2), cpu_attention.attend(qkv, 2))
    for grad in (torch.ones(1, 1, 1).expand(2, 65, 128), torch.randn(128, 65, 2).permute(2, 1, 0)):
        found = value_and_gradient(cpu_attention.attend, qkv, 2, grad)
        expected = value_and_gradient(by_torch, qkv, 2, grad)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def fast(attention: Attention, x: Tensor, tokens: int | None = None) -> Tensor:
    return attention_forward(attention, x, None, shortcut=Shortcut(tokens))


def test_kernel_is_used_if_it_is_faster_and_supports_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    attend = cpu_attention.attend
    monkeypatch.setattr(
        cpu_attention, "attend", lambda qkv, heads, groups: calls.append(heads) or attend(qkv, heads, groups)
    )
    x = torch.randn(2, 9, 32)
    fast(Attention(32, 2), x)
    assert not calls  # Too small.
    monkeypatch.setattr(cpu, "WORTHWHILE_MACS", 0)
    fast(Attention(32, 2), x)
    fast(Attention(32, 2, attn_dropout=0.1).eval(), x)
    assert calls == [2, 2]
    fast(Attention(32, 4), x)  # Head width 8.
    fast(Attention(32, 2, attn_dropout=0.1), x)
    fast(Attention(32, 2, qk_norm=True), x)
    fast(Attention(32, 2, position=RotaryEmbedding((2, 4), 1, 16)), x)
    fast(Attention(32, 2, position=RelativeBias((2, 4), 1, 2)), x)
    fast(Attention(32, 2, kernel="flash"), x)
    fast(Attention(32, 2), x, tokens=1)
    fast(Attention(32, 2).double(), x.double())
    monkeypatch.setenv("VIT_SCALE_KERNELS", "0")
    fast(Attention(32, 2), x)
    assert calls == [2, 2]


@pytest.mark.parametrize(
    ("qkv", "heads"), [(torch.zeros(1, 9, 72), 1), (torch.zeros(1, 9, 96), 4), (torch.zeros(1, 9, 96).double(), 2)]
)
def test_unsupported_input_is_rejected_before_it_is_read(qkv: Tensor, heads: int) -> None:
    with pytest.raises(ValueError, match=f"{qkv.shape[-1]} channels for {heads} heads, {qkv.dtype}"):
        cpu_attention.attend(qkv, heads)


def test_function_transforms_use_torchs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.func differentiates only torch's operations."""
    monkeypatch.setattr(cpu, "WORTHWHILE_MACS", 0)
    attention, x = Attention(32, 2), torch.randn(2, 9, 32, requires_grad=True)
    (expected,) = torch.autograd.grad(fast(attention, x).square().sum(), x)
    found = torch.func.grad(lambda x: fast(attention, x).square().sum())(x.detach())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_library_that_cannot_be_loaded_is_reported_and_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / f"cpu_attention_avx2{sysconfig.get_config_var('EXT_SUFFIX')}").write_bytes(b"not a library")
    monkeypatch.setattr(cpu_attention, "__file__", str(tmp_path / "cpu_attention.py"))
    monkeypatch.setattr(cpu, "vectors", lambda: "AVX2")
    with pytest.warns(UserWarning, match="Cannot load the CPU attention kernel, using torch's"):
        assert cpu_attention._library.__wrapped__() is None


def test_torchs_attention_is_used_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "WORTHWHILE_MACS", 0)
    torch.manual_seed(0)
    attention, x = Attention(32, 2), torch.randn(2, 9, 32)
    assert cpu_attention.runs(x, 2)
    with_kernel = fast(attention, x)
    monkeypatch.setattr(cpu, "vectors", lambda: "a CPU of another kind")
    cpu_attention._library.cache_clear()
    try:
        assert not cpu_attention.runs(x, 2)
        torch.testing.assert_close(fast(attention, x), with_kernel, atol=1e-6, rtol=1e-5)
    finally:
        cpu_attention._library.cache_clear()


def test_out_of_memory_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        attention_forward = staticmethod(lambda *_: 1)

    monkeypatch.setattr(cpu_attention, "_library", lambda: Full)
    with pytest.raises(MemoryError):
        cpu_attention.attend(torch.randn(1, 9, 96), 2)


@pytest.mark.parametrize("kernel", ["cpu_attention", "cpu_linear_attention"])
def test_kernel_does_not_access_memory_out_of_bounds(kernel: str, root: Path, tmp_path: Path, vectors: str) -> None:
    """With the compiler's sanitizers, on arrays of exactly the required size."""
    kind = {"AVX2": "-mavx2", "AVX512": "-mavx512f"}[vectors]
    flags = ["-g", "-O1", "-std=gnu11", kind, "-mfma", "-fsanitize=address,undefined", "-fno-sanitize=alignment"]
    program, source = root / f"tests/workers/{kernel}_sizes.c", root / f"vit_scale/kernels/{kernel}.c"
    built = ["gcc", *flags, "-fno-sanitize-recover=all", str(program), "-o", str(tmp_path / "sizes"), "-lm"]
    subprocess.run([*built, f'-DKERNEL="{source}"'], check=True, capture_output=True, timeout=120)
    done = subprocess.run([tmp_path / "sizes"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("all shapes\n")


def test_import_does_not_require_compiled_code() -> None:
    code = "import vit_scale.kernels.cpu_attention as a; print(a._library.cache_info().currsize)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "0"
