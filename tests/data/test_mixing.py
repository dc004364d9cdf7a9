"""MixUp and CutMix match timm, and are the same for any split of a global batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vit_scale.config import AugmentConfig
from vit_scale.data.mixing import (
    Mixing,
    MixPlan,
    cutmix_boxes,
    mix_images,
    mix_targets,
    partners,
    soft_targets,
)


def batch(size: int = 8, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(size, 3, 32, 32, generator=generator)
    return images, torch.randint(0, classes, (size,), generator=generator)


def mixing(global_batch: int = 8, **options: Any) -> Mixing:
    return Mixing(AugmentConfig(**options), num_classes=5, global_batch=global_batch, seed=1, patch_size=4)


class Recorder:
    """Records the boxes of timm's Mixup."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        import timm.data.mixup as timm_mixup

        self.boxes: list[tuple[int, ...]] = []
        original = timm_mixup.cutmix_bbox_and_lam

        def note(*args: Any, **options: Any) -> Any:
            box, lam = original(*args, **options)
            self.boxes.append(tuple(int(edge) for edge in box))
            return box, lam

        monkeypatch.setattr(timm_mixup, "cutmix_bbox_and_lam", note)


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0)])
def test_matches_timm_with_the_same_weight_box_and_permutation(
    mode: str, mixup: float, cutmix: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from timm.data import Mixup

    recorder = Recorder(monkeypatch)
    images, labels = batch()
    np.random.seed(4)
    theirs = Mixup(mixup_alpha=mixup, cutmix_alpha=cutmix, mode=mode, label_smoothing=0.1, num_classes=5)
    drawn = theirs._params_per_batch() if mode == "batch" else theirs._params_per_elem(4 if mode == "pair" else 8)
    np.random.seed(4)
    their_images, their_targets = theirs(images.clone(), labels)

    lam = np.broadcast_to(np.float32(drawn[0]), (8,)).copy() if mode == "batch" else drawn[0].copy()
    lam = np.concatenate([lam, lam[::-1]]) if mode == "pair" else lam
    box = np.zeros((8, 4), np.int64)
    if cutmix:
        found = np.array(recorder.boxes)
        box = np.repeat(found, 8, axis=0) if mode == "batch" else found
        box = np.concatenate([box, box[::-1]]) if mode == "pair" else box
        lam = (1 - (box[:, 1] - box[:, 0]) * (box[:, 3] - box[:, 2]) / 1024).astype(np.float32)
    plan = MixPlan(lam, box, np.ones(8, np.float32) if cutmix else lam)
    flipped = torch.arange(7, -1, -1)
    ours = mix_images(images, flipped, plan, (4, 4))
    our_targets = mix_targets(soft_targets(labels, 5, 0.1), flipped, torch.from_numpy(lam))
    torch.testing.assert_close(ours, their_images, atol=1e-6, rtol=0)
    torch.testing.assert_close(our_targets, their_targets, atol=1e-6, rtol=0)


def test_boxes_match_timm_for_the_same_weight_and_center(monkeypatch: pytest.MonkeyPatch) -> None:
    from timm.data.mixup import rand_bbox

    rng = np.random.default_rng(0)
    for lam in rng.random(50):
        center = rng.integers(0, 30), rng.integers(0, 40)
        answers = iter(center)
        monkeypatch.setattr(np.random, "randint", lambda *args, answers=answers, **options: next(answers))
        theirs = rand_bbox((30, 40), lam)
        ours = cutmix_boxes(np.array([lam]), np.array([center[0]]), np.array([center[1]]), (30, 40))
        assert tuple(ours[0]) == tuple(int(edge) for edge in theirs)


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("patches", [False, True])
def test_even_micro_batches_mix_identically(mode: str, patches: bool) -> None:
    images, labels = batch(24)
    mix = mixing(24, mixup=0.8, cutmix=1.0, mix_mode=mode, mix_patches=patches, label_smoothing=0.1)
    for step in range(4):
        full = mix(images, labels, step=step, offset=0)
        for size in (2, 4, 12):
            parts = [mix(images[i : i + size], labels[i : i + size], step=step, offset=i) for i in range(0, 24, size)]
            assert torch.equal(torch.cat([part[0] for part in parts]), full[0])
            assert torch.equal(torch.cat([part[1] for part in parts]), full[1])


def test_choices_depend_only_on_seed_and_step() -> None:
    first, second = mixing(mixup=0.8, cutmix=1.0), mixing(mixup=0.8, cutmix=1.0)
    weights = [first.plan(step, (32, 32)).lam[0] for step in (3, 1, 2)]
    assert weights == [second.plan(step, (32, 32)).lam[0] for step in (3, 1, 2)]
    assert len(set(weights)) == 3


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("size", [1, 3, 5, 7])
def test_odd_batch_never_mixes_image_with_itself(mode: str, size: int) -> None:
    partner = partners(size)
    assert sorted(partner) == list(range(size))
    assert size == 1 or np.all(partner != np.arange(size))
    images, labels = batch(size)
    mixed, targets = mixing(size, mixup=0.8, cutmix=1.0, mix_mode=mode)(images, labels, step=0, offset=0)
    assert mixed.shape == images.shape
    torch.testing.assert_close(targets.sum(dim=1), torch.ones(size))


def test_target_weights_are_the_fractions_of_the_images() -> None:
    images = torch.arange(8.0).view(8, 1, 1, 1).expand(8, 1, 32, 32).contiguous()
    labels = torch.arange(8) % 5
    for step in range(6):
        for patches in (False, True):
            mix = mixing(mixup=0.8, cutmix=1.0, mix_mode="elem", mix_patches=patches)
            mixed, targets = mix(images, labels, step=step, offset=0)
            partner = torch.from_numpy(partners(8)).float()
            own = (mixed.mean(dim=(1, 2, 3)) - partner) / (torch.arange(8.0) - partner)
            torch.testing.assert_close(targets[torch.arange(8), labels], own, atol=1e-5, rtol=0)


def test_patch_mixing_swaps_entire_patches() -> None:
    images = torch.arange(8.0).view(8, 1, 1, 1).expand(8, 1, 32, 32).contiguous()
    mixed, _ = mixing(mixup=0.8, mix_patches=True)(images, torch.zeros(8, dtype=torch.long), step=0, offset=0)
    patches = mixed.unfold(2, 4, 4).unfold(3, 4, 4).reshape(8, 64, 16)
    assert torch.equal(patches.min(dim=2).values, patches.max(dim=2).values)
    assert {0.0, 1.0} == set(mixed[0].unique().tolist())


def test_mixing_has_the_configured_probabilities() -> None:
    mix = mixing(4096, mixup=1.0, cutmix=1.0, mix_mode="elem", mix_prob=0.6, mix_switch_prob=0.25)
    plan = mix.plan(0, (32, 32))
    cut = plan.box[:, 1] > plan.box[:, 0]
    mixed = plan.lam < 1
    assert abs(mixed.mean() - 0.6) < 0.03
    assert abs(cut.sum() / mixed.sum() - 0.25) < 0.03
    assert mixing(mixup=1.0, mix_prob=0.0).plan(0, (32, 32)) is None


def test_without_mixing_images_are_unchanged_and_labels_smoothed() -> None:
    from timm.data.mixup import mixup_target

    images, labels = batch()
    mixed, targets = mixing(label_smoothing=0.1)(images, labels, step=0, offset=0)
    assert mixed is images
    torch.testing.assert_close(targets, mixup_target(labels, 5, 1.0, 0.1))


def test_mixing_stops_for_the_last_steps() -> None:
    augment = AugmentConfig(mixup=0.8)
    mix = Mixing(augment, num_classes=5, global_batch=8, seed=0, off_from_step=10)
    assert mix.plan(9, (32, 32)) is not None
    assert mix.plan(10, (32, 32)) is None
