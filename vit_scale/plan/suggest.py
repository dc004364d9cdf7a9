"""Suggest how to train on given data, on a given system, in a given time: options, each with its reason.

Pure functions: what is measured (facts about the data, images per second) comes in as arguments. The rules are those
that worked in docs/results.md and on held-out parts of small datasets: at a small budget a small model that sees more
images is better than a large one, and so are small batches, Muon and whitened patches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vit_scale.config import ModelConfig
from vit_scale.cost.closed_form import macs_by_part
from vit_scale.data.class_sizes import MAX_IMBALANCE
from vit_scale.format import duration
from vit_scale.models.variants import resolve_variant
from vit_scale.plan.look_at_data import DataFacts
from vit_scale.schedule import EVALUATIONS

MAX_EPOCHS = {"scratch": 200, "fine-tune": 30}
STEPS = 500
"""The batch size is chosen for at least this many steps, if possible."""
TIME_FOR_TRAINING = 0.85
"""The rest of the time is for startup, evaluation and checkpoints."""


@dataclass(frozen=True)
class MachineFacts:
    """What decides which model fits."""

    device: str
    """`cpu` or `cuda`."""
    name: str
    memory: int
    """Free bytes of a device, of the host on a CPU."""
    cores: int
    devices: int = 1
    flops: float = 1e11
    """Peak FLOP/s of all devices."""


@dataclass(frozen=True)
class Candidate:
    """A model that may be suggested."""

    model: dict[str, Any]
    """Options of the section `model`."""
    min_images_seen: float
    """Too large unless training sees this many images."""
    weights: str | None = None

    @property
    def img_size(self) -> int:
        return int(self.model["img_size"])

    @property
    def macs(self) -> int:
        """MACs of a forward pass."""
        options = {name: value for name, value in self.model.items() if name not in ("init", "weights")}
        return sum(macs_by_part(resolve_variant(ModelConfig(**options))).values())


@dataclass(frozen=True)
class Choice:
    """A group of options that have one reason."""

    section: str
    options: dict[str, Any]
    reason: str


def from_scratch(facts: DataFacts) -> Iterator[Candidate]:
    """Yield models to train from random weights, the largest first."""
    img_size, patch = image_and_patch(min(facts.size))
    family: dict[str, Any] = {"img_size": img_size, "patch_size": patch}
    family |= {"pool": "mean", "class_token": False, "init": "whitened"}
    large = _multiple(min(224, min(facts.size)), 16)
    if min(facts.size) > 72:
        yield Candidate({"name": "vit_small_patch16_224", "img_size": large}, 2e7)
        yield Candidate({"name": "vit_tiny_patch16_224", "img_size": large}, 4e6)
    small: dict[str, Any] = {"name": "vit_cifar_small", "dropout": 0.0}
    if min(facts.size) <= 72:
        yield Candidate({"name": "vit_cifar_base", "dropout": 0.0, **family, "img_size": _native(facts, patch)}, 2e7)
        yield Candidate({**small, **family, "img_size": _native(facts, patch)}, 3e6)
    yield Candidate({**small, "embed_dim": 128, "num_heads": 4, "depth": 6, **family}, 2e4)
    yield Candidate({**small, "embed_dim": 96, "num_heads": 3, "depth": 4, **family}, 0)


def fine_tuned() -> Iterator[Candidate]:
    """Yield published models to fine-tune, the largest first; images smaller than 224 pixels cost less."""
    for size, min_images in (("base", 2e4), ("small", 6e3), ("tiny", 0)):
        for img_size in (224, 160, 112):
            name = f"vit_{size}_patch16_224"
            weights = f"timm/{name}.augreg_in21k"
            yield Candidate({"name": name, "weights": weights, "img_size": img_size}, min_images, weights)


def image_and_patch(side: int) -> tuple[int, int]:
    """Return image and patch size for a small model: 36 to 64 patches."""
    if side <= 12:
        return max(4, _multiple(side, 2)), 2
    if side <= 40:
        return min(28, _multiple(side, 4)) if side < 32 else 24, 4
    if side <= 72:
        return min(64, _multiple(side, 8)), 8
    return 96 if side >= 96 else _multiple(side, 16), 16


def choose(candidates: list[Candidate], facts: DataFacts, seconds: float, flops: float) -> Candidate:
    """Return the first candidate that sees enough images, at least 1 epoch, in `seconds` at `flops` FLOP/s."""
    for candidate in candidates:
        compute = 6 * candidate.macs / flops
        seen = TIME_FOR_TRAINING * seconds / (compute + facts.decode_seconds)
        kind = "fine-tune" if candidate.weights else "scratch"
        seen = min(seen, MAX_EPOCHS[kind] * facts.train_images)
        if seen >= max(candidate.min_images_seen, facts.train_images):
            return candidate
    return candidates[-1]


def epochs_for(candidate: Candidate, facts: DataFacts, seconds: float, images_per_second: float) -> float:
    """Return the epochs that fit in `seconds`, with evaluation; at most as many as are useful."""
    evaluated = EVALUATIONS * facts.val_images / (2.5 * images_per_second)
    budget = max(0.5 * seconds, TIME_FOR_TRAINING * seconds - evaluated)
    epochs = budget * images_per_second / facts.train_images
    return min(MAX_EPOCHS["fine-tune" if candidate.weights else "scratch"], epochs)


def batch_size(candidate: Candidate, facts: DataFacts, epochs: float) -> int:
    """Return a power of two from 16 to 256 with which training has at least STEPS steps, if possible."""
    images = epochs * facts.train_images
    size = 16
    while size < 256 and images / (2 * size) >= STEPS and 2 * size <= facts.train_images:
        size *= 2
    return size


def suggest(
    candidate: Candidate, facts: DataFacts, *, epochs: float, batch: int, images_per_second: float, minutes: float
) -> list[Choice]:
    """Return all options of the recipe, with their reasons."""
    tuned = candidate.weights is not None
    steps = max(1, round(epochs * facts.train_images / batch))
    rounded = int(epochs) if epochs >= 10 else max(0.01, float(f"{epochs:.2g}"))
    seconds = rounded * facts.train_images / images_per_second
    choices = [
        Choice("model", candidate.model, _model_reason(candidate, facts, minutes)),
        _data(facts),
        _augmentation(candidate, facts, epochs),
        _optimizer(candidate, facts, batch),
        Choice(
            "schedule",
            {
                "epochs": rounded,
                "warmup_epochs": float(f"{rounded * 0.05:.2g}"),
                "shape": "cosine" if tuned else "linear",
            },
            f"about {duration(seconds)} at {images_per_second:,.0f} images/s, measured on this system",
        ),
        Choice("batch", {"global": batch}, f"small enough for {steps:,} steps"),
    ]
    if steps >= 500:
        choices.append(Choice("ema", {"decay": 0.99 if steps < 5000 else 0.999}, "averaged weights are often better"))
    return choices


def in_minutes(minutes: float) -> str:
    """Return `1 minute` or `2.5 minutes`."""
    return f"{minutes:g} minute" if minutes == 1 else f"{minutes:g} minutes"


def _model_reason(candidate: Candidate, facts: DataFacts, minutes: float) -> str:
    if candidate.weights:
        return f"published weights; image size {candidate.img_size} for a run of {in_minutes(minutes)}"
    height, width = facts.size
    return f"random weights: a model that learns in {in_minutes(minutes)}; images have about {height} x {width} pixels"


def _data(facts: DataFacts) -> Choice:
    options: dict[str, Any] = dict(facts.options)
    reason = f"{facts.train_images:,} training images, {facts.val_images:,} validation images, {facts.classes} classes"
    if facts.unreadable:
        options.setdefault("on_error", "skip")
    return Choice("data", options, reason)


def _augmentation(candidate: Candidate, facts: DataFacts, epochs: float) -> Choice:
    """Return stronger augmentation the more often each image is seen."""
    options: dict[str, Any] = {}
    img_size = candidate.img_size
    if min(facts.size) > 72:
        options["crop_scale"] = [0.3, 1.0]  # Small crops need longer runs.
    else:
        options |= {"crop": "random", "crop_padding": max(1, img_size // 12)}
    if facts.channels == 1:
        options["hflip"] = 0.0
    if epochs >= 30 and facts.channels == 3 and min(facts.size) > 12:
        options["rand_augment"] = "rand-m5-mstd0.5-inc1"
    if epochs >= 60 and not candidate.weights:
        options["mixup"] = 0.2
    options |= {"label_smoothing": 0.1, "eval_crop": 1.0 if min(facts.size) <= 72 else 0.9}
    amount = "light" if "rand_augment" not in options and "mixup" not in options else "stronger"
    flips = "; no flips: grayscale images are often characters or scans" if facts.channels == 1 else ""
    return Choice("augment", options, f"{amount}: each image is seen {max(1, round(epochs))} times{flips}")


def _optimizer(candidate: Candidate, facts: DataFacts, batch: int) -> Choice:
    options: dict[str, Any] = {"name": "muon", "lr": 5e-3, "adamw_lr": 3e-3, "momentum": 0.95, "betas": [0.9, 0.95]}
    reason = "Muon learns most from few steps"
    if candidate.weights:
        options = {"lr": float(f"{5e-5 * (batch / 32) ** 0.5:.1g}"), "layer_decay": 0.75}
        reason = "low learning rate, lower in early layers: fine-tuning"
    if facts.imbalance > MAX_IMBALANCE and not facts.options.get("balance"):
        options["class_weights"] = "balanced"
        reason += f"; the largest class is {facts.imbalance:.0f} times as large as the smallest"
    return Choice("optim", options, reason)


def with_smaller_model(candidates: list[Candidate], candidate: Candidate) -> Candidate:
    """Return the next smaller candidate, or the same if there is none."""
    position = candidates.index(candidate)
    return candidates[min(position + 1, len(candidates) - 1)]


def _native(facts: DataFacts, patch: int) -> int:
    return max(patch * 2, _multiple(min(64, *facts.size), patch))


def _multiple(value: int, of: int) -> int:
    return max(of, value // of * of)
