"""The options of the ViT: every parameter receives a gradient with each of them, and each has its documented effect."""

from __future__ import annotations

import copy

import pytest
import torch

from vit_scale.errors import UserError
from vit_scale.kernels import accept_hooks, cpu
from vit_scale.models import create_model
from vit_scale.models.variants import VARIANTS
from vit_scale.models.weights.load import fit_weights

OPTIONS: list[dict[str, object]] = [
    {},
    {"pos_embed": "learned_2d"},
    {"pos_embed": "sincos"},
    {"pos_embed": "rope"},
    {"pos_embed": "relative"},
    {"pos_embed": "none"},
    {"pool": "mean"},
    {"pool": "max"},
    {"pool": "tokens"},
    {"pool": "mean", "class_token": False},
    {"registers": 3},
    {"distilled": True},
    {"distilled": True, "registers": 2},
    {"qk_norm": True},
    {"layer_scale": 1e-4},
    {"mlp": "swiglu"},
    {"qkv_bias": False, "bias": False},
    {"dropout": 0.1, "attn_dropout": 0.1},
    {"patch_dropout": 0.5},
    {"patch_dropout": 0.5, "pos_embed": "rope", "registers": 2},
    {"patch_dropout": 0.5, "pos_embed": "relative", "drop_path": 0.4},
    {"patch_dropout": 0.5, "pos_embed": "rope", "drop_path": 0.4},
    {"drop_path": 0.4, "drop_path_mode": "mask"},
    {"drop_path": 0.4, "drop_path_schedule": "uniform"},
    {"img_size": (24, 40), "patch_size": (8, 4), "in_chans": 5},
    {"kernel": "explicit"},
    {"init": "timm"},
    {"init": "kaiming_patch"},
]


def images(model: torch.nn.Module, batch: int = 4) -> torch.Tensor:
    return torch.randn(batch, model.in_chans, *model.img_size)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_parameter_receives_a_gradient(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = create_model("vit_mu", **options).train()
    logits = model(images(model))
    tokens = (17,) if options.get("pool") == "tokens" else ()
    assert logits.shape == (4, *tokens, 10)
    logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("options", [o for o in OPTIONS if "dropout" not in o], ids=str)
def test_skipping_tokens_that_no_head_reads_does_not_change_results(
    options: dict[str, object], checkpointing: str
) -> None:
    """Logits and gradients equal those with all tokens, with the same samples and patches dropped."""
    torch.manual_seed(0)
    model = create_model("vit_mu", **options).train()
    model.set_activation_checkpointing(checkpointing)
    x, outcomes = images(model), []
    for forward in (model, lambda x: model.forward_head(model.forward_features(x))):
        torch.manual_seed(1)
        model.zero_grad()
        logits = forward(x)
        logits.square().mean().backward()
        outcomes.append([logits.detach(), *(parameter.grad for parameter in model.parameters())])
    for found, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "tokens"),
    [({}, 1), ({"registers": 3}, 1), ({"distilled": True}, 2), ({"pool": "mean"}, 17), ({"pool": "tokens"}, 17)],
    ids=str,
)
def test_last_block_computes_only_tokens_that_the_head_reads(options: dict[str, object], tokens: int) -> None:
    model, shapes = create_model("vit_mu", **options), []
    with accept_hooks(model):
        for block in model.blocks:
            block.mlp.register_forward_hook(lambda _module, inputs, _out: shapes.append(inputs[0].shape[1]))
    model(images(model))
    every = 16 + model.num_prefix_tokens
    assert shapes == [every] * (model.depth - 1) + [tokens]
    shapes.clear()
    assert model.forward_features(images(model)).shape[1] == every
    assert shapes == [every] * model.depth


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_parameter_has_a_layer_and_a_weight_decay(options: dict[str, object]) -> None:
    model = create_model("vit_mu", **options)
    undecayed = model.no_weight_decay()
    for name, parameter in model.named_parameters():
        last = 3 if name.startswith(("norm", "fc_norm", "head")) else 0
        expected = int(name.split(".")[1]) + 1 if name.startswith("blocks.") else last
        assert model.layer_id(name) == expected, name
        matrix = name.endswith("weight") and parameter.ndim > 1
        assert (name in undecayed) == (not matrix), name
    assert model.num_layers == 4


def test_patch_order_matters_only_with_position_embeddings() -> None:
    """Without positions, the class token does not see the order of patches; with any kind of positions it does."""
    for kind in ("learned", "learned_2d", "sincos", "rope", "relative", "none"):
        torch.manual_seed(0)
        model = create_model("vit_mu", pos_embed=kind).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        x = images(model, 1)
        swapped = torch.cat([x[..., 16:, :], x[..., :16, :]], dim=-2)
        assert torch.allclose(model(x), model(swapped), atol=1e-4) == (kind == "none"), kind


def test_rope_depends_on_offsets_only() -> None:
    from vit_scale.models.layers.pos_embed import RotaryEmbedding

    q, k = torch.randn(2, 16).unbind()
    rope = RotaryEmbedding((5, 7), 2, 16)
    turned_q = rope(q.expand(1, 1, 37, 16))[0, 0, 2:].unflatten(0, (5, 7))
    turned_k = rope(k.expand(1, 1, 37, 16))[0, 0, 2:].unflatten(0, (5, 7))
    score = turned_q[1, 2] @ turned_k[3, 3]
    torch.testing.assert_close(turned_q[2, 4] @ turned_k[4, 5], score)
    assert not torch.isclose(turned_q[2, 4] @ turned_k[4, 6], score)
    torch.testing.assert_close(rope(q.expand(1, 1, 37, 16))[0, 0, :2], q.expand(2, 16))


def test_sincos_is_fixed_and_distinct_for_every_patch() -> None:
    model = create_model("vit_mu", pos_embed="sincos")
    assert "pos_embed" not in dict(model.named_parameters())
    assert "pos_embed" in model.state_dict()
    assert (model.pos_embed[0, 0] == 0).all()
    assert len(model.pos_embed[0, 1:].unique(dim=0)) == 16


@pytest.mark.parametrize("pos_embed", ["rope", "relative"])
def test_patch_dropout_preserves_the_positions_of_remaining_patches(pos_embed: str) -> None:
    """Dropping patches equals masking them out in the attention."""
    torch.manual_seed(0)
    model = create_model("vit_mu", pos_embed=pos_embed, depth=1, kernel="explicit").eval()
    torch.nn.init.normal_(model.blocks[0].attn.qkv.weight, std=0.5)
    tokens = model._embed(images(model, 2))[0]
    keep = torch.stack([torch.tensor([0, 3, 9, 12]), torch.tensor([0, 16, 1, 5])])
    found = model.blocks[0](tokens.gather(1, keep[..., None].expand(-1, -1, 32)), keep)
    for sample in range(2):
        block = copy.deepcopy(model.blocks[0])
        mask = torch.full((17,), -torch.inf)
        mask[keep[sample]] = 0
        bias = block.attn._bias
        block.attn._bias = lambda q, k, bias=bias, mask=mask: mask + (bias(q, k) if bias(q, k) is not None else 0)
        expected = block(tokens[sample : sample + 1])[0, keep[sample]]
        torch.testing.assert_close(found[sample], expected, atol=1e-5, rtol=1e-4)


def test_patch_dropout_is_off_in_eval_mode_and_preserves_prefix_tokens() -> None:
    model = create_model("vit_mu", patch_dropout=0.75, registers=2).train()
    tokens, keep = model._embed(images(model))
    assert tokens.shape == (4, 3 + 4, 32)
    assert (keep[:, :3] == torch.arange(3)).all()
    assert all(len(row.unique()) == 7 for row in keep)
    assert model.eval()._embed(images(model))[0].shape == (4, 19, 32)


def test_intermediates_are_the_tokens_of_the_requested_blocks() -> None:
    model = create_model("vit_mu", depth=4, img_size=(16, 32), registers=1).eval()
    x = images(model)
    maps = model.forward_intermediates(x, 2)
    assert [tuple(m.shape) for m in maps] == [(4, 32, 2, 4)] * 2
    tokens = model.forward_intermediates(x, [-1, 0], as_maps=False, norm=True)
    torch.testing.assert_close(tokens[0], model.forward_features(x)[:, 2:])
    assert len(model.forward_intermediates(x)) == 4
    with pytest.raises(UserError, match="0 to 3"):
        model.forward_intermediates(x, [4])


def test_intermediates_are_not_changed_by_later_blocks() -> None:
    """Stochastic depth adds in place; returned tensors must not change."""
    torch.manual_seed(0)
    model = create_model("vit_mu", depth=3, drop_path=0.5, drop_path_schedule="uniform").train()
    x = images(model)
    torch.manual_seed(1)
    first = model.forward_intermediates(x, [0])[0]
    torch.manual_seed(1)
    again = model.forward_intermediates(x)[0]
    assert torch.equal(first, again)


@pytest.mark.parametrize("pool", ["cls", "mean"])
@pytest.mark.parametrize("as_large", [False, True])
def test_one_pass_returns_logits_and_intermediates(pool: str, as_large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their gradients, although the last block may compute fewer tokens."""
    if as_large:
        monkeypatch.setattr(cpu, "WORTHWHILE_MACS", 0)
        monkeypatch.setattr(cpu, "WORTHWHILE_ELEMENTS", 0)
    torch.manual_seed(0)
    model = create_model("vit_mu", depth=3, pool=pool).train()
    x, blocks = images(model), (0, 2)
    logits, tokens = model(x, intermediates=blocks)
    expected = model(x), *model.forward_intermediates(x, blocks, as_maps=False)
    torch.testing.assert_close((logits, *tokens), expected)
    weights = list(model.parameters())
    ours, theirs = (
        torch.autograd.grad(sum(o.square().sum() for o in outputs), weights)
        for outputs in ((logits, *tokens), expected)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
    with pytest.raises(UserError, match="model.patch_dropout=0"):
        create_model("vit_mu", patch_dropout=0.5)(x, intermediates=[0])


@pytest.mark.parametrize("size", [(16, 24), (48, 32)])
def test_intermediate_maps_are_correct_at_every_accepted_size(size: tuple[int, int]) -> None:
    """Against a model that is built at that size, with resampled positions."""
    torch.manual_seed(0)
    model = create_model("vit_mu", registers=2).eval()
    model.allow_any_size()
    built = create_model("vit_mu", registers=2, img_size=size).eval()
    fit_weights(built, model.state_dict(), source="test")
    x = torch.randn(2, 3, *size)
    for found, expected in zip(model.forward_intermediates(x), built.forward_intermediates(x), strict=True):
        assert found.shape == (2, 32, size[0] // 8, size[1] // 8)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_unexpected_image_size_is_reported() -> None:
    model = create_model("vit_mu")
    with pytest.raises(UserError, match=r"\(3, 32, 32\).*\(3, 64, 64\).*model.img_size"):
        model(torch.randn(1, 3, 64, 64))


def test_allow_any_size_accepts_multiples_of_the_patch_size() -> None:
    model = create_model("vit_mu", img_size=32, patch_size=8)
    model.allow_any_size()
    assert model(torch.zeros(1, 3, 16, 24)).shape == (1, model.num_classes)
    with pytest.raises(UserError, match="not \\(3, 12, 16\\)"):
        model(torch.zeros(1, 3, 12, 16))
    with pytest.raises(UserError, match="supports only the image size of the model"):
        create_model("vit_mu", img_size=32, patch_size=8, pos_embed="rope").allow_any_size()


def test_copy_is_independent() -> None:
    model = create_model("vit_mu", pos_embed="relative").eval()
    twin = copy.deepcopy(model)
    x = images(model)
    before = model(x)
    torch.nn.init.normal_(twin.head.weight)
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("init", ["trunc_normal", "timm", "jax", "kaiming_patch", "whitened"])
def test_initial_weights_have_the_expected_std(init: str) -> None:
    torch.manual_seed(0)
    model = create_model("vit_cifar_small", depth=1, init=init)
    fan_in, fan_out = 192, 768
    patch = {"timm": (3 * 48) ** -0.5, "jax": 48**-0.5, "kaiming_patch": (2 / 48) ** 0.5}
    matrix = (2 / (fan_in + fan_out)) ** 0.5 if init == "jax" else 0.02
    assert model.patch_embed.proj.weight.std().item() == pytest.approx(patch.get(init, 0.02), rel=0.05)
    assert model.blocks[0].mlp.fc1.weight.std().item() == pytest.approx(matrix, rel=0.05)
    assert model.cls_token.std().item() == pytest.approx(1e-6 if init in ("timm", "jax") else 0.02, rel=0.3)
    assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.05)
    assert (model.head.weight == 0).all() == (init == "jax")
    assert (model.blocks[0].attn.qkv.bias == 0).all()


def test_swiglu_has_as_many_parameters_as_gelu() -> None:
    from dataclasses import replace

    for variant in VARIANTS.values():
        gated = replace(variant, mlp="swiglu", mlp_ratio=4.0)
        plain = replace(variant, mlp="gelu", mlp_ratio=4.0)
        assert 3 * gated.mlp_width == pytest.approx(2 * plain.mlp_width, rel=0.04)
