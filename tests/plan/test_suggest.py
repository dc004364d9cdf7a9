"""Suggestions are functions of data, system and time."""

from __future__ import annotations

import dataclasses

import pytest

from vit_scale.plan.look_at_data import DataFacts
from vit_scale.plan.suggest import (
    Candidate,
    batch_size,
    choose,
    epochs_for,
    fine_tuned,
    from_scratch,
    suggest,
)
from vit_scale.plan.write_recipe import recipe_text, recipe_tree
from vit_scale.recipe import build_config, load_recipe, to_tree

SMALL = DataFacts({"source": "data"}, 50_000, 10_000, {str(i): 5_000 for i in range(10)}, 3, (32, 32), 1e-4)
PHOTOS = DataFacts({"source": "photos"}, 300, 60, {str(i): 50 for i in range(6)}, 3, (480, 640), 5e-3)
GRAY = DataFacts({"source": "digits"}, 1_617, 180, {str(i): 161 for i in range(10)}, 1, (28, 28), 1e-4)
KINDS = [SMALL, PHOTOS, GRAY]


def options(facts: DataFacts, candidate: Candidate, epochs: float) -> dict:
    batch = batch_size(candidate, facts, epochs)
    return recipe_tree(suggest(candidate, facts, epochs=epochs, batch=batch, images_per_second=100, minutes=10))


@pytest.mark.parametrize("facts", KINDS, ids=lambda facts: facts.options["source"])
@pytest.mark.parametrize("kind", [from_scratch, fine_tuned], ids=["scratch", "fine-tune"])
def test_every_suggestion_is_a_valid_recipe_of_about_20_lines(facts: DataFacts, kind, tmp_path) -> None:  # type: ignore[no-untyped-def]
    for candidate in kind(facts) if kind is from_scratch else kind():
        for epochs in (0.07, 1.0, 12.3, 100.0):
            choices = suggest(candidate, facts, epochs=epochs, batch=32, images_per_second=100, minutes=10)
            path = tmp_path / "recipe.yaml"
            path.write_text(recipe_text(choices, ["header"]))
            assert to_tree(load_recipe(path)) == to_tree(build_config(recipe_tree(choices)))
            assert len(path.read_text().splitlines()) <= 40
            assert all(len(line) <= 140 for line in path.read_text().splitlines())


def test_more_compute_gives_a_larger_model() -> None:
    models = list(from_scratch(SMALL))
    macs = [choose(models, SMALL, 600, flops).macs for flops in (1e9, 1e11, 1e13, 1e15)]
    assert macs == sorted(macs)
    assert len(set(macs)) >= 3


def test_a_few_photographs_never_get_a_large_model_from_scratch() -> None:
    assert choose(list(from_scratch(PHOTOS)), PHOTOS, 600, 1e15).model["depth"] <= 6


def test_fine_tuning_uses_larger_images_if_there_is_time() -> None:
    models = list(fine_tuned())
    sizes = [choose(models, PHOTOS, seconds, 1e11).img_size for seconds in (20, 3600)]
    assert sizes[0] < sizes[1] == 224


def test_epochs_fit_the_time_and_are_capped() -> None:
    model = next(from_scratch(SMALL))
    assert epochs_for(model, SMALL, 600, 500) * 50_000 / 500 <= 0.85 * 600
    assert epochs_for(model, PHOTOS, 600, 1e6) == 200
    assert epochs_for(next(fine_tuned()), PHOTOS, 600, 1e6) == 30


def test_batch_is_small_enough_for_many_steps_and_never_larger_than_the_data() -> None:
    model = next(from_scratch(SMALL))
    assert batch_size(model, SMALL, 12) == 256
    assert batch_size(model, GRAY, 1) == 16
    assert batch_size(model, dataclasses.replace(PHOTOS, train_images=50), 200) <= 50


def test_augmentation_grows_with_the_number_of_times_an_image_is_seen() -> None:
    model = next(from_scratch(PHOTOS))
    few, some, many = (options(PHOTOS, model, epochs)["augment"] for epochs in (5, 40, 150))
    assert "rand_augment" not in few
    assert "rand_augment" in some
    assert "mixup" not in some
    assert "mixup" in many


def test_grayscale_images_are_not_flipped() -> None:
    assert options(GRAY, next(from_scratch(GRAY)), 5)["augment"]["hflip"] == 0
    assert "hflip" not in options(SMALL, next(from_scratch(SMALL)), 5)["augment"]


def test_published_weights_get_a_low_learning_rate() -> None:
    tuned = options(PHOTOS, next(fine_tuned()), 5)
    assert tuned["model"]["weights"].startswith("timm/")
    assert tuned["optim"]["lr"] < 1e-3 < options(PHOTOS, next(from_scratch(PHOTOS)), 5)["optim"]["lr"]


def test_reasons_are_written_next_to_the_options() -> None:
    choices = suggest(next(from_scratch(GRAY)), GRAY, epochs=5, batch=16, images_per_second=100, minutes=10)
    text = recipe_text(choices, [])
    assert all(choice.reason[1:] in text for choice in choices)


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"class_sizes": {"cat": 300, "dog": 3}}, "class dog has only 3 training images"),
        ({"class_sizes": {"cat": 330, "dog": 30}}, "class cat is 11 times as large as class dog"),
        ({"val_images": 5}, "5 validation images for 6 classes"),
        ({"unreadable": ("bad.jpg",), "sampled": 40}, "1 of 40 sampled images cannot be read (bad.jpg)"),
    ],
)
def test_difficult_data_is_warned_about(changes: dict, warning: str) -> None:
    assert PHOTOS.warnings() == []
    assert warning in "\n".join(dataclasses.replace(PHOTOS, **changes).warnings())


def test_recipe_skips_unreadable_images_if_there_are_any() -> None:
    broken = dataclasses.replace(PHOTOS, unreadable=("bad.jpg",), sampled=40)
    assert options(broken, next(from_scratch(broken)), 5)["data"]["on_error"] == "skip"
