"""Linear attention by random features: its formula in fp64, and softmax attention as the features grow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vit_scale.cost.timm_check import check_against_timm
from vit_scale.errors import UserError
from vit_scale.kernels import Shortcut, cpu, cpu_linear_attention
from vit_scale.kernels.cpu_attention import is_built
from vit_scale.kernels.fast_block import attention_forward
from vit_scale.models import create_model
from vit_scale.models.attention import Attention
from vit_scale.models.layers.pos_embed import RotaryEmbedding
from vit_scale.models.linear_attention import LinearAttention, orthogonal_features
from vit_scale.models.weights.load import fit_weights
from vit_scale.recipe import build_config

needs_kernel = pytest.mark.skipif(not is_built(), reason="the kernel was not built")


def layer(features: int = 40, **options: object) -> LinearAttention:
    torch.manual_seed(0)
    attention = LinearAttention(32, 2, random_features=features, **options)
    attention.draw_features()
    return attention


def formula(q: Tensor, k: Tensor, v: Tensor, directions: Tensor) -> Tensor:
    """Return sum_j w_ij v_j / sum_j w_ij with w_ij = phi(q_i) phi(k_j), by a dense matrix; all are [B, H, N, K]."""
    q, k = (x / x.shape[-1] ** 0.25 for x in (q, k))
    phi_q, phi_k = (torch.exp(x @ directions.T - x.square().sum(-1, keepdim=True) / 2) for x in (q, k))
    weights = phi_q @ phi_k.transpose(-2, -1)
    return weights / weights.sum(-1, keepdim=True) @ v


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"position": RotaryEmbedding((4, 4), 1, 16)}], ids=str)
def test_values_and_gradients_equal_the_dense_formula(options: dict) -> None:
    attention = layer(**options).double()
    attention.epsilon = 0.0
    x = torch.randn(2, 17, 32, dtype=torch.float64, requires_grad=True)
    q, k, v = attention._heads_of(*attention.split(attention.qkv(x)), None)
    dense = formula(q, k, v, attention.random_features)
    expected, found = attention.proj(dense.transpose(1, 2).flatten(2)), attention(x)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    leaves = [x, *attention.parameters()]
    ours, theirs = (torch.autograd.grad(y.square().sum(), leaves, retain_graph=True) for y in (found, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    weights = attention.weights(x)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    torch.testing.assert_close(weights @ v, dense, atol=1e-6, rtol=0)
    leading = attention.attend(*(t[:, :n] for t, n in zip(attention.split(attention.qkv(x)), (2, 17, 17), strict=True)))
    torch.testing.assert_close(leading, dense.transpose(1, 2).flatten(2)[:, :2], atol=1e-6, rtol=0)


@torch.no_grad()
def test_error_against_softmax_falls_with_the_root_of_the_number_of_features() -> None:
    torch.manual_seed(0)
    full = Attention(64, 4)
    nn.init.normal_(full.qkv.weight, std=0.06)
    x, errors = torch.randn(2, 50, 64), {}
    expected = full.weights(x)
    for features in (64, 256, 1024):
        attention = LinearAttention(64, 4, random_features=features)
        found = []
        for _ in range(8):
            attention.draw_features()
            attention.load_state_dict(full.state_dict(), strict=False)
            found.append((attention.weights(x) - expected).square().mean())
        errors[features] = float(torch.stack(found).mean().sqrt())
    for few, many in ((64, 256), (256, 1024)):
        assert errors[few] / errors[many] == pytest.approx(2, rel=0.3)
    assert errors[1024] < 0.1 * float(expected.mean())


def test_features_are_orthogonal_and_as_long_as_normal_vectors() -> None:
    torch.manual_seed(0)
    drawn = orthogonal_features(40, 16)
    assert drawn.shape == (40, 16)
    for block in (drawn[:16], drawn[16:32]):
        unit = nn.functional.normalize(block)
        torch.testing.assert_close(unit @ unit.T, torch.eye(16), atol=1e-5, rtol=0)
    many = torch.cat([orthogonal_features(64, 16) for _ in range(100)])
    assert many.square().sum(1).mean() == pytest.approx(16, rel=0.03)
    assert many.mean(0).abs().max() < 0.06, "every direction is as likely as its opposite"
    torch.testing.assert_close(many.T @ many / len(many), torch.eye(16), atol=0.1, rtol=0)


@needs_kernel
@pytest.mark.parametrize(
    ("images", "tokens", "heads", "width", "features"),
    [(2, 17, 2, 16, 40), (1, 100, 3, 32, 111), (1, 48, 1, 64, 266), (2, 7, 2, 16, 3), (1, 130, 1, 48, 64)],
)
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_cpu_kernel_equals_the_plain_code(
    images: int, tokens: int, heads: int, width: int, features: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "WORTHWHILE_MACS", 0)
    torch.manual_seed(0)
    attention = LinearAttention(heads * width, heads, random_features=features)
    attention.draw_features()
    qkv = (scale * torch.randn(images, tokens, 3 * heads * width)).requires_grad_()
    for queries in (tokens, 1):
        weight = torch.randn(images, queries, heads * width)
        y = cpu_linear_attention.attend(qkv, heads, attention.random_features, attention.epsilon, queries)
        found = y, *torch.autograd.grad((y * weight).sum(), qkv)
        exact, wide = LinearAttention(heads * width, heads, random_features=features).double(), qkv.double()
        exact.load_state_dict(attention.state_dict())
        q, k, v = exact.split(wide)
        y = exact.attend(q[:, :queries], k, v)
        expected = y, *torch.autograd.grad((y * weight).sum(), qkv)
        torch.testing.assert_close(found[0].double(), expected[0], atol=2e-5, rtol=1e-3)
        error = (found[1] - expected[1]).abs().max() / expected[1].abs().max()
        assert error < 2e-4


@needs_kernel
def test_cpu_kernel_is_used_if_it_supports_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    attend = cpu_linear_attention.attend
    monkeypatch.setattr(cpu_linear_attention, "attend", lambda *args: calls.append(1) or attend(*args))
    monkeypatch.setattr(cpu, "WORTHWHILE_MACS", 0)
    x = torch.randn(2, 17, 32)
    for options in ({}, {"qk_norm": True}, {"kernel": "math"}):  # The kernel supports only the first.
        attention = layer(**options)
        for tokens in (None, 1):
            found = attention_forward(attention, x, None, shortcut=Shortcut(tokens))
            torch.testing.assert_close(found, attention(x)[:, : found.shape[1]], atol=1e-5, rtol=1e-4)
        assert len(calls) == 2
    with pytest.raises(ValueError, match="96 channels for 3 heads of 16"):
        attend(torch.randn(1, 9, 96), 3, torch.randn(5, 16), 1e-6)


@needs_kernel
def test_cpu_kernel_is_bit_identical_for_any_number_of_threads_and_propagates_nan() -> None:
    torch.manual_seed(0)
    qkv, directions, threads, found = torch.randn(3, 50, 96), torch.randn(40, 16), torch.get_num_threads(), []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            found.append(cpu_linear_attention.attend(qkv, 2, directions, 1e-6))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)
    for place in (3, 35, 70):
        bad = qkv.clone()
        bad[1, 5, place] = float("nan")
        y = cpu_linear_attention.attend(bad, 2, directions, 1e-6)
        assert not y[1].isfinite().all()
        assert y[0].isfinite().all()


def model_of(**options: object) -> nn.Module:
    torch.manual_seed(0)
    return create_model("vit_mu", **({"attention": "linear", "random_features": 24, "depth": 3} | options))


def test_features_follow_the_seed_and_are_saved_with_the_weights() -> None:
    """Other weights do not depend on them; global blocks have none."""
    model, again, full = model_of(), model_of(), model_of(attention="full", random_features=None)
    state = model.state_dict()
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in state.items())
    assert all(torch.equal(tensor, state[name]) for name, tensor in full.state_dict().items())
    assert set(state) - set(full.state_dict()) == {f"blocks.{i}.attn.random_features" for i in range(3)}
    torch.manual_seed(1)
    other = create_model("vit_mu", attention="linear", random_features=24, depth=3, global_blocks=[-1])
    assert not torch.equal(other.blocks[0].attn.random_features, model.blocks[0].attn.random_features)
    assert type(other.blocks[2].attn) is Attention
    x = torch.randn(2, 3, 32, 32)
    fit_weights(other, state, source="a run")
    assert torch.equal(other.blocks[0].attn.random_features, model.blocks[0].attn.random_features)
    report = fit_weights(model_of(random_features=30), full.state_dict(), source="full")
    assert list(report.initialized.values()) == ["not among the weights"] * 3
    report = fit_weights(model_of(random_features=30), state, source="a run")
    assert list(report.initialized.values()) == ["the weights have 24 random features, the model 30"] * 3
    assert model(x).isfinite().all()
    assert create_model("vit_cifar_small", attention="linear", depth=1).blocks[0].attn.random_features.shape == (
        266,
        64,
    )


def test_patch_dropout_other_sizes_and_recomputation_work() -> None:
    model = model_of(patch_dropout=0.5, pos_embed="rope")
    assert model(torch.randn(2, 3, 32, 32)).isfinite().all()
    model = model_of()
    model.allow_any_size()
    model.set_activation_checkpointing("full")
    model(torch.randn(2, 3, 48, 16)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_half_precision_computes_the_features_in_full_precision() -> None:
    model, x = model_of().eval(), torch.randn(2, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        half = model(x).float()
    torch.testing.assert_close(half, model(x), atol=0.05, rtol=0.05)


def test_there_is_no_timm_counterpart() -> None:
    config = build_config({"model": {"name": "vit_mu", "attention": "linear"}, "schedule": {"steps": 1}}).model
    check = check_against_timm(config)
    assert not check.equal
    assert "does not support model.attention = 'linear'" in check.summary()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pos_embed": "relative"}, "model.attention = linear and model.pos_embed = relative exclude each other"),
        ({"attn_dropout": 0.1}, "model.attention = linear and model.attn_dropout = 0.1 exclude each other"),
        ({"kernel": "flex"}, "FlexAttention computes model.attention = window, dilated and block, not linear"),
        ({"attention": "full"}, "model.random_features = 24: has no effect with model.attention = full"),
    ],
)
def test_invalid_options_are_reported(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        model_of(**options)
