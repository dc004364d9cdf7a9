"""Attention: every kernel that runs here equals the step-by-step softmax; unavailable kernels are rejected."""

from __future__ import annotations

import pytest
import torch

from vit_scale.errors import UserError
from vit_scale.models import create_model
from vit_scale.models.attention import Attention, check_attention_kernel
from vit_scale.models.layers.pos_embed import RelativeBias, RotaryEmbedding

KERNELS = ("auto", "flash", "efficient", "cudnn", "math")


def runs_here(kernel: str, **needs: object) -> bool:
    try:
        check_attention_kernel(kernel, "cpu", **needs)
    except UserError:
        return False
    return True


@pytest.mark.parametrize("kernel", [k for k in KERNELS if runs_here(k)])
@pytest.mark.parametrize("position", ["none", "rope", "relative"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_every_kernel_that_runs_here_equals_the_explicit_path(kernel: str, position: str, qk_norm: bool) -> None:
    if not runs_here(kernel, bias=position == "relative"):
        pytest.skip(f"{kernel} has no gradient for a bias")
    results = []
    for kind in (kernel, "explicit"):
        torch.manual_seed(0)
        where = {"none": None, "rope": RotaryEmbedding((3, 4), 1, 16), "relative": RelativeBias((3, 4), 1, 2)}[position]
        attention = Attention(32, 2, qk_norm=qk_norm, position=where, kernel=kind)
        x_BND = torch.randn(2, 13, 32, requires_grad=True)
        y_BND = attention(x_BND)
        gradients = torch.autograd.grad(y_BND.square().sum(), [x_BND, *attention.parameters()])
        results.append([y_BND, *gradients])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_flash_and_math_run_on_a_cpu() -> None:
    assert runs_here("flash")
    assert runs_here("math")


@pytest.mark.parametrize("kernel", ["efficient", "cudnn"])
@pytest.mark.skipif(torch.accelerator.is_available(), reason="a GPU may have them")
def test_unavailable_kernel_is_rejected_at_construction(kernel: str) -> None:
    with pytest.raises(UserError, match=f"model.kernel = {kernel}.*cpu"):
        create_model("vit_mu", kernel=kernel)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="a GPU's flash kernel has dropout")
def test_kernel_without_a_required_feature_is_rejected() -> None:
    with pytest.raises(UserError, match="with dropout"):
        create_model("vit_mu", kernel="flash", attn_dropout=0.1)


def test_weights_sum_to_one_and_explain_the_output() -> None:
    attention, tokens = Attention(32, 2, qk_norm=True), torch.randn(2, 17, 32)
    weights = attention.weights(tokens)
    assert weights.shape == (2, 2, 17, 17)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 2, 17))
    values = attention.qkv(tokens)[..., -32:].unflatten(-1, (2, 16)).transpose(1, 2)
    expected = attention.proj((weights @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(tokens), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("position", [None, RotaryEmbedding((2, 4), 1, 16), RelativeBias((2, 4), 1, 2)])
def test_fewer_queries_give_the_leading_rows_of_the_output(position: object) -> None:
    attention = Attention(32, 2, position=position)
    q, k, v = attention.split(attention.qkv(torch.randn(3, 9, 32)))
    torch.testing.assert_close(attention.attend(q[:, :2], k, v), attention.attend(q, k, v)[:, :2], atol=1e-6, rtol=1e-5)


def test_attention_dropout_is_off_in_eval_mode() -> None:
    for kernel in ("auto", "explicit"):
        attention = Attention(32, 2, attn_dropout=0.5, kernel=kernel)
        x_BND = torch.randn(1, 9, 32)
        assert not torch.equal(attention(x_BND), attention(x_BND))
        attention.eval()
        assert torch.equal(attention(x_BND), attention(x_BND))
