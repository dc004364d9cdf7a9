"""Attention within windows, dilated windows and bands of rows: a dense masked softmax, computed without the mask."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from vit_scale.cost.timm_check import check_against_timm
from vit_scale.errors import UserError
from vit_scale.kernels import Shortcut, cpu, cpu_attention, flex
from vit_scale.kernels.fast_block import attention_forward
from vit_scale.kernels.watch import remember_types
from vit_scale.models import create_model
from vit_scale.models.attention import Attention, check_attention_kernel
from vit_scale.models.attention_weights import attention_weights
from vit_scale.models.layers.pos_embed import RelativeBias, RotaryEmbedding
from vit_scale.models.layers.token_groups import Grouping
from vit_scale.models.linear_attention import LinearAttention
from vit_scale.models.sparse_attention import GroupedAttention, group_indices, may_attend
from vit_scale.models.weights.init import init_weights
from vit_scale.models.weights.load import fit_weights
from vit_scale.recipe import build_config

GRID = (4, 8)
GROUPINGS = {
    "window": Grouping(2),
    "shifted": Grouping(2, shifted=True),
    "shifted by less than half": Grouping(4, shifted=True),  # One window covers the rows: only columns are shifted.
    "dilated": Grouping(None, dilation=2),
    "dilated windows": Grouping(2, dilation=2),
    "block": Grouping(2, bands=True),
}
KINDS = {
    "window": {"attention": "window", "window": 2},
    "dilated": {"attention": "dilated", "dilation": 2},
    "block": {"attention": "block", "window": 1},
}


def group_numbers(grouping: Grouping, grid: tuple[int, int]) -> Tensor:
    """Return the group of each patch by the definition of each kind, independent of the code that is tested."""
    row, column = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    if grouping.bands:
        return (row // grouping.window).flatten()
    if grouping.dilation is not None:
        d, span = grouping.dilation, (grouping.window or 10**6) * grouping.dilation
        return (((row // span) * 100 + column // span) * 10_000 + (row % d) * 100 + column % d).flatten()
    shift = [grouping.window // 2 if grouping.shifted and grouping.window < length else 0 for length in grid]
    down, right = (
        (x + (grouping.window - s) % grouping.window) // grouping.window
        for x, s in zip((row, column), shift, strict=True)
    )
    return (down * 100 + right).flatten()


def masked_softmax(q: Tensor, k: Tensor, v: Tensor, grouping: Grouping, grid: tuple[int, int], bias: Tensor | float):
    """Return dense attention in which a patch sees prefix tokens and its group; q, k, v are [B, H, N, K]."""
    group = group_numbers(grouping, grid)
    prefix = q.shape[2] - len(group)
    group = torch.cat([torch.full((prefix,), -1), group])
    seen = (group[:, None] == group) | (group[:, None] < 0) | (group < 0)
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5 + bias
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v


def position_of(name: str, prefix: int) -> nn.Module | None:
    if name == "rope":
        return RotaryEmbedding(GRID, prefix, 16)
    if name == "relative":
        bias = RelativeBias(GRID, prefix, 2)
        nn.init.normal_(bias.relative_position_bias_table)
        return bias
    return None


def reference(attention: GroupedAttention, dense_bias: RelativeBias | None, x: Tensor) -> Tensor:
    q, k, v = attention._heads_of(*attention.split(attention.qkv(x)), None)
    bias = 0.0 if dense_bias is None else dense_bias()
    y = masked_softmax(q, k, v, attention.grouping, attention.grid, bias)
    return attention.proj(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", GROUPINGS)
@pytest.mark.parametrize("position", ["none", "rope", "relative"])
@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_values_and_gradients_equal_a_dense_masked_softmax(kind: str, position: str, prefix: int) -> None:
    torch.manual_seed(0)
    where = position_of(position, prefix)
    options = {"grid": GRID, "prefix": prefix, "grouping": GROUPINGS[kind], "position": where}
    attention = GroupedAttention(32, 2, **options).double()
    x = torch.randn(2, prefix + 32, 32, dtype=torch.float64, requires_grad=True)
    relative = where if position == "relative" else None
    weight = torch.randn(2, prefix + 32, 32, dtype=torch.float64)
    found, expected = attention(x), reference(attention, relative, x)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    leaves = [x, *attention.parameters()]
    ours, dense = (torch.autograd.grad((y * weight).sum(), leaves, retain_graph=True) for y in (found, expected))
    torch.testing.assert_close(ours, dense, atol=1e-6, rtol=0)
    values = attention._heads(attention.split(attention.qkv(x))[2])
    looked_at = attention.proj((attention.weights(x) @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(looked_at, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", GROUPINGS)
@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.skipif(not cpu_attention.is_built(), reason="the kernel was not built")
def test_cpu_kernel_equals_the_plain_code(kind: str, prefix: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "WORTHWHILE_MACS", 0)
    torch.manual_seed(0)
    attention = GroupedAttention(32, 2, grid=GRID, prefix=prefix, grouping=GROUPINGS[kind])
    x = torch.randn(3, prefix + 32, 32, requires_grad=True)
    assert cpu_attention.runs(x.detach(), 2, attention.groups())
    results = []
    for compute in (attention, lambda x: attention_forward(attention, x, None, shortcut=Shortcut())):
        y = compute(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *attention.parameters()])])
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(not cpu_attention.is_built(), reason="the kernel was not built")
def test_cpu_kernel_is_bit_identical_for_any_number_of_threads_and_checks_its_groups() -> None:
    torch.manual_seed(0)
    groups = cpu_attention.groups_of(Grouping(2, shifted=True).groups((4, 4)), 1)
    qkv, threads, found = torch.randn(3, 17, 96, requires_grad=True), torch.get_num_threads(), []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            y = cpu_attention.attend(qkv, 2, groups)
            found.append((y, *torch.autograd.grad(y.square().sum(), qkv)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, three) for one, three in zip(*found, strict=True))
    with pytest.raises(ValueError, match="not all tokens"):
        cpu_attention.attend(torch.randn(1, 18, 96), 2, groups)


@pytest.mark.parametrize("kind", GROUPINGS)
def test_each_patch_is_in_one_group_and_tables_agree(kind: str) -> None:
    grouping = GROUPINGS[kind]
    groups = grouping.groups(GRID)
    assert sorted(patch for group in groups for patch in group) == list(range(32))
    assert {size: sum(len(group) == size for group in groups) for size in grouping.sizes(GRID)} == grouping.sizes(GRID)
    indices, inverse = group_indices(grouping, GRID)
    assert sorted(map(tuple, groups)) == sorted(tuple(group) for index in indices for group in index.tolist())
    assert torch.equal(torch.cat([index.flatten() for index in indices])[inverse], torch.arange(32))
    number = group_numbers(grouping, GRID)
    assert torch.equal(may_attend(grouping, GRID, 0), number[:, None] == number)


def model_of(**options: object) -> nn.Module:
    torch.manual_seed(0)
    return create_model("vit_mu", **({"depth": 3} | options))


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("position", ["learned", "rope", "relative"])
def test_window_as_large_as_the_image_equals_full_bit_for_bit(
    kernels: str, position: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIT_SCALE_KERNELS", kernels)
    monkeypatch.setattr(cpu, "WORTHWHILE_MACS", 0)
    x, results = torch.randn(2, 3, 32, 32), []
    for options in ({}, {"attention": "window", "window": 4}, {"attention": "block", "window": 4}):
        model = model_of(pos_embed=position, patch_dropout=0.5, **options)
        torch.manual_seed(1)
        y = model(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), model.parameters())])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("options", [{}, {"pool": "mean", "class_token": False}, {"distilled": True}, {"registers": 2}])
@pytest.mark.parametrize("kind", KINDS)
def test_shortcuts_change_nothing(kind: str, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block computes only the tokens of the head, which attend to all; stochastic depth skips samples."""
    monkeypatch.setattr(cpu, "WORTHWHILE_MACS", 0)
    model, x, found = model_of(**KINDS[kind], **options, drop_path=0.4), torch.randn(4, 3, 32, 32), []
    for kernels in ("0", "1"):
        monkeypatch.setenv("VIT_SCALE_KERNELS", kernels)
        torch.manual_seed(1)
        y = model(x)
        found.append([y, *torch.autograd.grad(y.square().sum(), model.parameters(), allow_unused=True)])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


def test_kinds_of_blocks_follow_the_options() -> None:
    model = model_of(attention="window", window=2, global_blocks=[0, -2], depth=5)
    kinds = [type(block.attn) for block in model.blocks]
    assert kinds == [Attention, GroupedAttention, GroupedAttention, Attention, GroupedAttention]
    shifted = [block.attn.grouping.shifted for block in model.blocks if isinstance(block.attn, GroupedAttention)]
    assert shifted == [True, False, False]  # Blocks 1, 2 and 4.
    model = model_of(attention="window", window=2, window_shift=False)
    assert not any(block.attn.grouping.shifted for block in model.blocks)


def test_other_image_sizes_use_their_own_groups() -> None:
    """Also in the weights, and when activation checkpointing computes a block again for another image size."""
    model = model_of(attention="window", window=2)
    model.allow_any_size()
    model.set_activation_checkpointing("full")
    small, large = torch.randn(2, 3, 16, 16), torch.randn(2, 3, 48, 32)
    loss = model(small).square().sum() + model(large).square().sum()
    found = torch.autograd.grad(loss, model.parameters())
    model.set_activation_checkpointing("none")
    parts = [torch.autograd.grad(model(x).square().sum(), model.parameters()) for x in (small, large)]
    torch.testing.assert_close(found, tuple(a + b for a, b in zip(*parts, strict=True)), atol=1e-5, rtol=1e-4)
    *_, weights = attention_weights(model, large)
    assert torch.equal(weights[0, 0] > 0, may_attend(Grouping(2), (6, 4), 1))
    with pytest.raises(UserError, match="3 x 4 patches of this image"):
        model(torch.randn(1, 3, 24, 32))


def test_weights_of_a_full_model_load_and_there_is_no_timm_counterpart() -> None:
    full, windowed = model_of(), model_of(attention="window", window=2)
    report = fit_weights(windowed, full.state_dict(), source="full")
    assert {*report.resized, *report.initialized, *report.skipped} == set()
    check = check_against_timm("vit_small_patch16_224")
    assert check.equal
    for options in KINDS.values():
        config = build_config({"model": {"name": "vit_mu", **options}, "schedule": {"steps": 1}}).model
        check = check_against_timm(config)
        assert not check.equal
        assert check.summary().startswith(
            "skipped: no timm counterpart: timm's VisionTransformer does not support model.att"
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "window"}, "requires model.window; for 4 x 4 patches: 1, 2 or 4"),
        (
            {"attention": "window", "window": 3},
            "window = 3 does not divide the 4 x 4 patches of model.img_size = 32",
        ),
        ({"attention": "block", "window": 3}, "use 1, 2 or 4, or another image size"),
        ({"attention": "dilated"}, "requires model.dilation"),
        ({"attention": "dilated", "dilation": 3}, "model.dilation = 3 does not divide"),
        ({"attention": "dilated", "dilation": 2, "window": 4}, "model.window = 4 times model.dilation = 2 does not"),
        ({"window": 2}, "model.window = 2: has no effect with model.attention = full"),
        ({"attention": "window", "window": 2, "global_blocks": [3]}, "model.global_blocks: indices are 0 to 2"),
        ({"attention": "window", "window": 2, "patch_dropout": 0.1}, "model.patch_dropout = 0.1 exclude each other"),
        ({"kernel": "flex"}, "FlexAttention computes model.attention = window, dilated and block, not full"),
        ({"name": "timm/vit_tiny_patch16_224", "attention": "window", "window": 2}, "timm models do not have this"),
    ],
)
def test_invalid_options_are_reported(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        create_model(**{"name": "vit_mu", "depth": 3, **options})


def test_masked_autoencoding_needs_attention_without_groups() -> None:
    from vit_scale.tasks.mae.masked_autoencoding import _check_options

    tree = {"model": {"name": "vit_mu", "attention": "window", "window": 2}, "task": {"name": "mae"}}
    with pytest.raises(UserError, match="model.attention = window and task.name = mae exclude each other"):
        _check_options(build_config(tree | {"schedule": {"steps": 1}}))


def test_every_size_of_progressive_resizing_is_checked_before_training() -> None:
    from vit_scale.data.progressive import make_progressive

    model = model_of(attention="window", window=2)
    make_progressive([(0, 16), (0.5, 32)], 10, model)
    with pytest.raises(UserError, match="3 x 3 patches of size 24 in augment.progressive"):
        make_progressive([(0, 24), (0.5, 32)], 10, model)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="a GPU has FlexAttention")
def test_flex_is_rejected_without_a_gpu_and_with_what_it_lacks() -> None:
    with pytest.raises(UserError, match="model.kernel = flex: FlexAttention has no backward pass on cpu"):
        create_model("vit_mu", attention="window", window=2, kernel="flex")
    for needs, message in (({"dropout": 0.1}, "attn_dropout"), ({"bias": True}, "relative")):
        with pytest.raises(UserError, match=f"model.kernel = flex and model.*{message}"):
            check_attention_kernel("flex", "cuda", **needs)


@pytest.mark.parametrize("kind", ["shifted", "dilated windows", "block"])
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_equals_the_plain_code(kind: str) -> None:
    """Its mask, on a CPU, where it has only a forward pass."""
    attention = GroupedAttention(32, 2, grid=GRID, prefix=1, grouping=GROUPINGS[kind]).eval()
    with torch.no_grad():
        q, k, v = attention.split(attention.qkv(torch.randn(2, 33, 32)))
        expected = attention.attend(q, k, v)
        attention.kernel = "flex"
        torch.testing.assert_close(attention.attend(q, k, v), expected, atol=1e-5, rtol=1e-4)
    flex._block_mask.cache_clear()


def model_of_all_kinds(**options: object) -> nn.Module:
    """One model with a block of each kind: compilers and exporters take long per model."""
    model = model_of(depth=5, registers=1, **options)
    layers = [GroupedAttention(32, 2, grid=(4, 4), prefix=2, grouping=GROUPINGS[kind]) for kind in COMPILED]
    for block, layer in zip(model.blocks, [*layers, LinearAttention(32, 2, random_features=20)], strict=False):
        block.attn = layer
    init_weights(model, "trunc_normal")
    remember_types(model)
    return model


COMPILED = ("window", "shifted", "dilated", "block")


def test_exported_model_gives_the_same_logits_for_each_kind(tmp_path: Path) -> None:
    model, x = model_of_all_kinds().eval(), torch.randn(2, 3, 32, 32)
    batch = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(model, (x,), dynamic_shapes=batch)
    torch.testing.assert_close(program.module()(x[:1]), model(x[:1]), atol=1e-5, rtol=1e-4)
    torch.onnx.export(program, f=tmp_path / "model.onnx", input_names=["images"], verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (logits,) = session.run(None, {"images": x[:1].numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), model(x[:1]).detach(), atol=1e-4, rtol=1e-3)


def test_compiled_blocks_give_the_same_gradients_for_each_kind() -> None:
    results, x = [], torch.randn(2, 3, 32, 32)
    for compiles in (False, True):
        model = model_of_all_kinds(drop_path=0.2, drop_path_mode="mask")
        if compiles:
            model.compile_blocks(backend="eager")
        torch.manual_seed(1)
        y = model(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), model.parameters())])
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)
