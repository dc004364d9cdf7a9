"""Maps and pictures of single images, and plots of statistics: what is shown and where."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from vit_scale.attention_report import pictures
from vit_scale.attention_report.figures import similarity_figure, spectrum_figure, statistics_figure
from vit_scale.attention_report.maps import AttentionMaps, image_maps
from vit_scale.attention_report.measure import AttentionMeter, AttentionStatistics
from vit_scale.attention_report.statistics import rollout
from vit_scale.models import create_model
from vit_scale.models.attention_weights import attention_maps, attention_weights

SMALL: dict[str, Any] = {"img_size": 16, "patch_size": 4, "num_classes": 3}
X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def statistics(**options: Any) -> AttentionStatistics:
    meter = AttentionMeter(create_model("vit_mu", **(SMALL | options)), spectrum_images=1)
    meter.add(X, torch.arange(2))
    return meter.statistics()


@pytest.mark.parametrize(
    "options",
    [{"pool": "cls", "class_token": True, "registers": 2}, {"pool": "mean", "class_token": False, "registers": 3}],
    ids=["class token", "mean"],
)
def test_maps_of_the_last_block_are_those_of_attention_maps(options: dict) -> None:
    model = create_model("vit_mu", **SMALL, **options)
    found = image_maps(model, X)
    expected = attention_maps(model, X)
    weights = [each.clone() for each in attention_weights(model, X)]
    prefix = model.num_prefix_tokens
    if options["class_token"]:
        assert found.class_token is not None
        torch.testing.assert_close(found.class_token[0].flatten(2), weights[0][:, :, 0, prefix:])
    else:
        assert found.class_token is None
    assert len(found.patches) == 2
    mean = found.shown[-1].mean(1)
    torch.testing.assert_close(mean / mean.sum((1, 2), keepdim=True), expected)
    torch.testing.assert_close(found.patches[1].flatten(2), weights[1][:, :, prefix:, prefix:].mean(2))
    product = rollout(weights)
    queries = product[:, 0] if options["class_token"] else product[:, prefix:].mean(1)
    torch.testing.assert_close(found.rollout.flatten(1), queries[:, prefix:])


def _maps() -> tuple[torch.Tensor, AttentionMaps]:
    pixels = torch.full((2, 3, 16, 16), 128, dtype=torch.uint8)
    maps = image_maps(create_model("vit_mu", pool="mean", class_token=False, **SMALL), X)
    spot = torch.zeros(4, 4)
    spot[0, 0] = 1.0
    return pixels, dataclasses.replace(maps, patches=[spot.expand(2, 2, 4, 4)] * 2, rollout=spot.expand(2, 4, 4))


def test_heat_is_where_the_attention_is() -> None:
    pixels, maps = _maps()
    tile = pictures._heat(pictures._resized(pixels[0]), maps.rollout[0])
    array = np.asarray(tile.image).astype(int)
    assert array[2, 2].sum() > array[-2, -2].sum() + 100, "the upper left corner is bright"
    assert tile.caption == "0.0 to 16.0", "all attention on one of 16 patches"


def test_pictures_have_a_tile_per_block_and_head() -> None:
    pixels, maps = _maps()
    few = pictures.heads_picture(pixels[0], maps, 0, blocks=[1], heads=[0], title="a title")
    more = pictures.heads_picture(pixels[0], maps, 0, blocks=[0, 1], heads=[0, 1], title="a title")
    assert more.height - few.height >= pictures.TILE
    overview = pictures.overview_picture(pixels, maps, blocks=[0, 1], names=["", ""])
    assert overview.width > 4 * pictures.TILE
    assert overview.height > 2 * pictures.TILE
    assert pictures.side_by_side([few, more]).size == (few.width + more.width, more.height)


def test_images_of_any_shape_and_channels_fit_their_tile() -> None:
    assert pictures._resized(torch.zeros(1, 20, 40, dtype=torch.uint8)).size == (104, 52)
    assert pictures._resized(torch.zeros(4, 600, 300, dtype=torch.uint8)).size == (52, 104)


def test_blocks_are_spread_from_the_first_to_the_last() -> None:
    assert pictures.spread_blocks(4, 6) == [0, 1, 2, 3]
    assert pictures.spread_blocks(24, 4) == [0, 8, 15, 23]


def test_plots_have_a_line_per_run_and_panels_only_for_what_there_is() -> None:
    with_class, without = statistics(pool="cls", class_token=True), statistics(pool="mean", class_token=False, depth=3)
    shown = [place for place in statistics_figure([("a", without)]).axes if place.axison]
    assert [place.get_title(loc="left") for place in shown] == [
        "Attention distance", "Entropy", "Effective rank", "Similarity to other heads",
    ]  # fmt: skip
    both = statistics_figure([("a", with_class), ("b", without)]).axes
    assert [place.axison for place in both] == [True] * 5 + [False]
    lines = {line.get_label(): line.get_xydata() for line in both[0].get_lines() if line.get_label() in ("a", "b")}
    np.testing.assert_allclose(lines["a"][:, 1], [block.distance.mean() for block in with_class.blocks])
    assert len(lines["b"]) == 3


def test_spectrum_and_similarity_have_a_place_per_run_and_block() -> None:
    runs = [("a", statistics()), ("b", statistics(depth=3))]
    spectrum = spectrum_figure(runs)
    assert spectrum is not None
    assert [len(place.get_lines()) for place in spectrum.axes[:2]] == [2, 3]
    assert spectrum.axes[0].get_lines()[0].get_ydata()[0] == 1
    similarity = similarity_figure(runs)
    assert similarity is not None
    assert sum(bool(place.images) for place in similarity.axes) == 5
    without = dataclasses.replace(runs[0][1], spectrum_images=0)
    assert spectrum_figure([("a", without)]) is None
    assert similarity_figure([("a", statistics(num_heads=1))]) is None
