"""Classify image files."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vit_scale.data.images.decode import UnreadableImage
from vit_scale.data.images.file_types import UNSUPPORTED_SUFFIXES
from vit_scale.data.sources.scan import scan_directory
from vit_scale.errors import UserError
from vit_scale.inference.loaded_run import LoadedRun
from vit_scale.tasks.classify.classification import Classification


@dataclass(frozen=True)
class ClassProbability:
    """A class and its predicted probability."""

    name: str
    index: int
    probability: float


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of a file, or why it cannot be read."""

    path: Path
    classes: tuple[ClassProbability, ...] = ()
    """Most probable first; empty for a file that cannot be read."""
    problem: str | None = None
    """Why it cannot be read."""
    pixels: np.ndarray | None = None
    """uint8 [H, W, C], as the model receives it, before normalization."""


def find_images(patterns: Sequence[str]) -> list[Path]:
    """Return the files that arguments name: a file, all images below a directory, or a glob pattern.

    Raises `UserError` for an argument without files.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            scan = scan_directory(str(path))
            # Formats that cannot be read are included, so that each is reported.
            unsupported = [each for each, reason in scan.unreadable if reason in UNSUPPORTED_SUFFIXES]
            files = sorted(path / each for each in (*scan.paths(), *unsupported))
        elif path.exists():
            files = [path]
        else:
            files = [Path(each) for each in sorted(glob.glob(pattern, recursive=True)) if Path(each).is_file()]
        if not files:
            raise UserError(f"{pattern}: {'no images in this directory' if path.is_dir() else 'file not found'}")
        found |= dict.fromkeys(files)
    return list(found)


def predict(
    run: LoadedRun, paths: Sequence[Path], *, top: int = 5, batch: int = 32, device: str | torch.device = "cpu"
) -> Iterator[Prediction]:
    """Yield a prediction per file, in order; a file that cannot be read has a `problem` instead of classes.

    Raises `UserError` if the run is not a classifier.
    """
    if not isinstance(run.task, Classification):
        where = run.folder or run.config.model.name
        hint = f"; fine-tune it with model.weights={where}" if "finetune" in run.task.commands else ""
        raise UserError(f"{where}: task {run.task.name} does not predict classes{hint}")
    model = run.model.to(device)
    for start in range(0, len(paths), batch):
        opened = [_open(run, path) for path in paths[start : start + batch]]
        readable = [each.pixels for each in opened if each.pixels is not None]
        probabilities = iter(_probabilities(run, model, readable, device))
        for each in opened:
            yield each if each.pixels is None else _with_classes(run, each, next(probabilities), top)


def _open(run: LoadedRun, path: Path) -> Prediction:
    try:
        planes = run.transform.pixels(path)
    except UnreadableImage as error:
        return Prediction(path, problem=str(error))
    return Prediction(path, pixels=planes.transpose(1, 2, 0))


def to_batch(run: LoadedRun, pixels: Sequence[np.ndarray], device: str | torch.device) -> torch.Tensor:
    """Stack images [H, W, C] to the model's input [B, C, H, W]."""
    planes = np.stack([image.transpose(2, 0, 1) for image in pixels])
    return run.transform.normalize(torch.from_numpy(planes).to(device))


@torch.inference_mode()
def _probabilities(
    run: LoadedRun, model: torch.nn.Module, pixels: list[np.ndarray], device: str | torch.device
) -> torch.Tensor:
    if not pixels:
        return torch.empty(0, 0)
    return model(to_batch(run, pixels, device)).float().softmax(1).cpu()


def _with_classes(run: LoadedRun, opened: Prediction, probabilities_C: torch.Tensor, top: int) -> Prediction:
    best = probabilities_C.topk(min(top, len(probabilities_C)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    classes = tuple(
        ClassProbability(run.task.info.class_name(index), index, probability) for index, probability in pairs
    )
    return Prediction(opened.path, classes, pixels=opened.pixels)
