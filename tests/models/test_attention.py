"""Attention: every kernel that runs here equals the step-by-step softmax; those that do not are refused."""

from __future__ import annotations

import pytest
import torch

from vit_scale.errors import UserError
from vit_scale.models import create_model
from vit_scale.models.attention import Attention, check_attention_backend
from vit_scale.models.pos_embed import RelativeBias, RotaryEmbedding

BACKENDS = ("auto", "flash", "efficient", "cudnn", "math")


def runs_here(backend: str, **needs: object) -> bool:
    try:
        check_attention_backend(backend, "cpu", **needs)
    except UserError:
        return False
    return True


@pytest.mark.parametrize("backend", [b for b in BACKENDS if runs_here(b)])
@pytest.mark.parametrize("position", ["none", "rope", "relative"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_every_backend_that_runs_here_equals_the_explicit_path(backend: str, position: str, qk_norm: bool) -> None:
    if not runs_here(backend, bias=position == "relative"):
        pytest.skip(f"{backend} has no gradient for a bias")
    results = []
    for kind in (backend, "explicit"):
        torch.manual_seed(0)
        where = {"none": None, "rope": RotaryEmbedding((3, 4), 1, 16), "relative": RelativeBias((3, 4), 1, 2)}[position]
        attention = Attention(32, 2, qk_norm=qk_norm, position=where, backend=kind)
        x_BND = torch.randn(2, 13, 32, requires_grad=True)
        y_BND = attention(x_BND)
        gradients = torch.autograd.grad(y_BND.square().sum(), [x_BND, *attention.parameters()])
        results.append([y_BND, *gradients])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_flash_and_math_run_on_a_cpu() -> None:
    assert runs_here("flash")
    assert runs_here("math")


@pytest.mark.parametrize("backend", ["efficient", "cudnn"])
@pytest.mark.skipif(torch.accelerator.is_available(), reason="a GPU may have them")
def test_a_backend_that_the_device_lacks_is_refused_at_construction(backend: str) -> None:
    with pytest.raises(UserError, match=f"model.attention = {backend}.*cpu"):
        create_model("vit_mu", attention=backend)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="a GPU's flash kernel has dropout")
def test_a_backend_that_cannot_do_what_the_model_needs_is_refused() -> None:
    with pytest.raises(UserError, match="with dropout"):
        create_model("vit_mu", attention="flash", attn_dropout=0.1)


def test_attention_weights_sum_to_one_and_explain_the_output() -> None:
    model = create_model("vit_mu", qk_norm=True).train()
    x = torch.randn(2, 3, 32, 32)
    weights = model.attention_weights(x)
    assert model.training
    assert [tuple(w.shape) for w in weights] == [(2, 2, 17, 17)] * 2
    for w in weights:
        torch.testing.assert_close(w.sum(dim=-1), torch.ones(2, 2, 17))
    block = model.blocks[0]
    tokens = block.norm1(model._embed(x)[0])
    values = block.attn.qkv(tokens)[..., -32:].unflatten(-1, (2, 16)).transpose(1, 2)
    expected = block.attn.proj((weights[0] @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(block.attn(tokens), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_queries_of_the_first_tokens_are_those_of_all(bias: bool) -> None:
    attention, x_BND = Attention(32, 2, qkv_bias=bias), torch.randn(3, 9, 32)
    torch.testing.assert_close(attention(x_BND, queries=2), attention(x_BND)[:, :2], atol=1e-6, rtol=1e-5)


def test_attention_dropout_acts_in_training_only() -> None:
    for backend in ("auto", "explicit"):
        attention = Attention(32, 2, attn_dropout=0.5, backend=backend)
        x_BND = torch.randn(1, 9, 32)
        assert not torch.equal(attention(x_BND), attention(x_BND))
        attention.eval()
        assert torch.equal(attention(x_BND), attention(x_BND))
