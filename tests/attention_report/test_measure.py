"""Statistics over images: of Hugging Face's attention with copied weights, in any batches, one block at a time."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vit_scale.attention_report import maps as maps_module
from vit_scale.attention_report import measure, statistics
from vit_scale.attention_report.layout import check_tokens, token_layout
from vit_scale.attention_report.maps import image_maps
from vit_scale.attention_report.measure import AttentionMeter, affordable_spectra
from vit_scale.errors import UserError
from vit_scale.models import create_model

SMALL: dict[str, Any] = {"img_size": 16, "patch_size": 4, "num_classes": 3}


def images(count: int = 5, height: int = 16, width: int = 16) -> torch.Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(0))


def measured(model: torch.nn.Module, x: torch.Tensor, spectra: int = 2, sizes: tuple[int, ...] = ()) -> Any:
    meter = AttentionMeter(model, spectrum_images=spectra)
    start = 0
    for size in sizes or (len(x),):
        meter.add(x[start : start + size], torch.arange(start, start + size))
        start += size
    return meter.statistics()


def test_statistics_are_those_of_hugging_faces_attentions_with_the_same_weights() -> None:
    model, theirs = _with_hugging_faces_weights()
    x = images(3)
    with torch.no_grad():
        attentions = theirs(pixel_values=x, output_attentions=True).attentions
    found = measured(model, x, spectra=3)
    distances = statistics.patch_distances((4, 4), (4, 4))
    assert len(attentions) == len(found.blocks) == 2
    for weights, block in zip(attentions, found.blocks, strict=True):
        rank = statistics.effective_rank(statistics.singular_values(weights))
        expected = {
            "distance": statistics.attention_distance(weights, distances),
            "entropy": statistics.normalized_entropy(weights),
            "prefix": statistics.prefix_share(weights, 1),
            "similarity": statistics.head_similarity(weights),
            "rank": rank,
        }
        for name, values in expected.items():
            actual = getattr(block, name).float()
            torch.testing.assert_close(actual, values.mean(0), atol=1e-4 if name == "rank" else 1e-5, rtol=1e-4)
    maps = image_maps(model, x)
    torch.testing.assert_close(maps.rollout.flatten(1), statistics.rollout(attentions)[:, 0, 1:])


def _with_hugging_faces_weights() -> tuple[torch.nn.Module, torch.nn.Module]:
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    model = create_model("vit_mu", pool="cls", class_token=True, **SMALL).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, image_size=16, patch_size=4,
        layer_norm_eps=1e-6, attn_implementation="eager",
    )  # fmt: skip
    theirs = ViTModel(config, add_pooling_layer=False).eval()
    own = model.state_dict()
    state = {
        "embeddings.cls_token": own["cls_token"],
        "embeddings.position_embeddings": own["pos_embed"],
        "layernorm.weight": own["norm.weight"],
        "layernorm.bias": own["norm.bias"],
    }
    for kind in ("weight", "bias"):
        state[f"embeddings.patch_embeddings.projection.{kind}"] = own[f"patch_embed.proj.{kind}"]
        for i in range(2):
            block, layer = f"blocks.{i}", f"layers.{i}"
            parts = own[f"{block}.attn.qkv.{kind}"].chunk(3)
            state |= {f"{layer}.attention.{n}_proj.{kind}": part for n, part in zip("qkv", parts, strict=True)}
            names = {"attn.proj": "attention.o_proj", "norm1": "layernorm_before", "norm2": "layernorm_after"}
            names |= {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
            state |= {f"{layer}.{b}.{kind}": own[f"{block}.{a}.{kind}"] for a, b in names.items()}
    theirs.load_state_dict(state)
    return model, theirs


@pytest.mark.parametrize(
    "options",
    [{}, {"registers": 2, "pos_embed": "rope"}, {"pool": "mean", "class_token": False}],
    ids=["class token", "registers", "no class token"],
)
def test_batches_padding_and_chunks_do_not_change_the_numbers(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = create_model("vit_mu", **(SMALL | options)), images()
    expected = measured(model, x)
    meter = AttentionMeter(model, spectrum_images=2)
    meter.add(x[:2], torch.arange(2))
    monkeypatch.setattr(measure, "MAX_WEIGHTS", 1)
    meter.add(torch.cat([x[2:], torch.full_like(x[:1], torch.nan)]), torch.tensor([2, 3, 4, -1]))
    found = meter.statistics()
    assert (found.images, found.spectrum_images) == (expected.images, expected.spectrum_images) == (5, 2)
    for one, other in zip(found.blocks, expected.blocks, strict=True):
        for name in ("distance", "entropy", "prefix", "similarity", "rank", "spectrum"):
            torch.testing.assert_close(getattr(one, name), getattr(other, name), atol=1e-5, rtol=1e-5)


def test_images_of_other_sizes_have_distances_in_their_own_pixels() -> None:
    model = create_model("vit_mu", **SMALL)
    model.allow_any_size()
    for block in model.blocks:
        torch.nn.init.zeros_(block.attn.qkv.weight)  # uniform attention
        torch.nn.init.zeros_(block.attn.qkv.bias)
    found = measured(model, images(1, 24, 32), spectra=1)
    assert found.layout.grid == (6, 8)
    expected = statistics.patch_distances((6, 8), (4, 4)).mean().item()
    assert found.uniform_distance == pytest.approx(expected)
    for block in found.blocks:
        assert block.distance.tolist() == pytest.approx([expected] * 2)
        assert block.entropy.tolist() == pytest.approx([1.0] * 2)
        assert block.rank.tolist() == pytest.approx([1.0] * 2, abs=1e-3)
        assert block.prefix.tolist() == pytest.approx([found.layout.prefix / found.layout.tokens] * 2)


def test_timm_model_has_the_statistics_of_ours_with_the_same_weights() -> None:
    ours = create_model("vit_tiny_patch16_224", img_size=32, num_classes=3)
    theirs = create_model("timm/vit_tiny_patch16_224", img_size=32, num_classes=3)
    theirs.load_state_dict(ours.state_dict())
    x = images(2, 32, 32)
    one, other = measured(ours, x).table(), measured(theirs, x).table()
    assert one.columns == other.columns
    assert len(one.rows) == 12 * 3
    for mine, their in zip(one.rows, other.rows, strict=True):
        assert mine == pytest.approx(their, rel=1e-3)


@pytest.mark.parametrize("look", [measured, image_maps], ids=["statistics", "maps"])
def test_only_one_blocks_weights_are_in_memory(look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: set[int] = set()
    most = 0

    def blocks(model: Any, x: torch.Tensor) -> Iterator[torch.Tensor]:
        nonlocal most
        for index in range(4):
            weights = torch.full((len(x), 2, 17, 17), 1 / 17)
            alive.add(index)
            weakref.finalize(weights, alive.discard, index)
            most = max(most, len(alive))
            yield weights
            del weights

    for module in (measure, maps_module):
        monkeypatch.setattr(module, "attention_weights", blocks)
    look(create_model("vit_mu", **SMALL), images(2))
    assert most == 1
    assert not alive


def test_spectra_are_limited_by_their_cost() -> None:
    model = create_model("vit_mu", **SMALL)  # 2 blocks of 2 heads
    layout = token_layout(model, (16, 16))
    of_image = 4 * layout.tokens**3
    assert affordable_spectra(model, layout, 5 * of_image) == 5
    assert affordable_spectra(model, layout, 10**12) == measure.MAX_SPECTRA
    assert affordable_spectra(model, layout, of_image // 2) == 1, "one image may take a little more"
    assert affordable_spectra(model, layout, of_image // 2, at_least=0) == 0
    assert affordable_spectra(model, layout, of_image // 10) == 0
    found = measured(model, images(2), spectra=0)
    assert found.spectrum_images == 0
    assert found.blocks[0].spectrum is None
    assert {row[-1] for row in found.table().rows} == {None}


def test_model_with_one_head_has_no_similarity() -> None:
    found = measured(create_model("vit_mu", num_heads=1, **SMALL), images(1))
    assert found.blocks[0].similarity_to_others() is None
    assert found.table().rows[0][found.table().columns.index("similarity")] is None


def test_diverged_model_has_empty_cells() -> None:
    model = create_model("vit_mu", **SMALL)
    torch.nn.init.constant_(model.blocks[0].attn.qkv.weight, torch.nan)
    assert measured(model, images(1)).table().rows[0][3:] == [None] * 4


@pytest.mark.parametrize("name", ["timm/test_resnet", "timm/swin_tiny_patch4_window7_224"])
def test_model_without_plain_attention_is_rejected(name: str) -> None:
    model = create_model(name, num_classes=3)
    with pytest.raises(UserError, match="no attention to look at"):
        token_layout(model, (224, 224), name)


def test_blocks_with_other_tokens_are_rejected() -> None:
    layout = token_layout(create_model("vit_mu", **SMALL), (16, 16))
    with pytest.raises(UserError, match="block 3 has 9 tokens, not 1 prefix tokens and 4 x 4 patches"):
        check_tokens(torch.ones(1, 1, 9, 9), layout, 3)
