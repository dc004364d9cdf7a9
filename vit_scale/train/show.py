"""What a run shows besides numbers, at its start and at evaluations, to its record."""

from __future__ import annotations

import torch

from vit_scale.errors import first_line
from vit_scale.models.attention_weights import attention_maps
from vit_scale.tasks.classify.analysis import Inspection
from vit_scale.tasks.classify.image_grids import MOST_IN_BATCH, attention_picture, batch_picture, mistakes_picture
from vit_scale.train.build import Run


def show_batch(run: Run, images: torch.Tensor, targets: torch.Tensor) -> None:
    """The first images as they reach the model, with the classes and weights of their targets."""
    if run.record is None or run.config.track.images == "never":
        return
    few, names = slice(MOST_IN_BATCH), list(run.data.class_names)
    step, statistics = run.state.step, run.normalization
    run.record.picture(step, "batch", lambda: batch_picture(images[few], targets[few], statistics, names))


def show_inspection(run: Run, inspection: Inspection, weights: str) -> None:
    """Confusions, the worst mistakes, and where the model looks; all processes must call it."""
    step, names = run.state.step, list(run.data.class_names)
    table = inspection.confusion.table(step, weights, names)
    mistakes = inspection.mistakes()
    images, labels = inspection.fixed_images()
    maps = _maps(run, images)
    record = run.record
    if record is None:
        return
    record.confusion(table)
    if mistakes:
        record.picture(step, "mistakes", lambda: mistakes_picture(mistakes, names))
    if maps is not None and labels:
        record.picture(step, "attention", lambda: attention_picture(images, maps, labels, names))


def _maps(run: Run, images: torch.Tensor) -> torch.Tensor | None:
    """A model of another kind than those we know may fail here in any way; training does not end by it."""
    try:
        return attention_maps(run.state.model, run.inputs(images))
    except Exception as error:  # noqa: BLE001
        run.screen.say(f"There are no attention maps: {first_line(error)}; training goes on")
        return None
