"""Pictures in, class names and probabilities out."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vit_scale.data.images.decode import UnreadableImage
from vit_scale.data.sources.splits import IMAGE_SUFFIXES
from vit_scale.errors import UserError
from vit_scale.inference.loaded_run import LoadedRun


@dataclass(frozen=True)
class Guess:
    """A class and how probable the model thinks it is."""

    name: str
    index: int
    probability: float


@dataclass(frozen=True)
class Prediction:
    """What the model makes of one file."""

    path: Path
    guesses: tuple[Guess, ...] = ()
    """The most probable classes, best first; none for a file that cannot be read."""
    problem: str | None = None
    """Why it cannot be read."""
    pixels: np.ndarray | None = None
    """uint8 [H, W, C], as the model saw it."""


def find_images(patterns: Sequence[str]) -> list[Path]:
    """The files that arguments name: a file as it is, a folder's images with all below, or a pattern.

    Raises `UserError` for an argument that leads to none.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            files = sorted(each for each in path.rglob("*") if each.suffix.lower() in IMAGE_SUFFIXES)
        elif path.exists():
            files = [path]
        else:
            files = [Path(each) for each in sorted(glob.glob(pattern, recursive=True)) if Path(each).is_file()]
        if not files:
            raise UserError(f"{pattern}: {'no images in this folder' if path.is_dir() else 'there is no such file'}")
        found |= dict.fromkeys(files)
    return list(found)


def predict(
    run: LoadedRun, paths: Sequence[Path], *, top: int = 5, batch: int = 32, device: str | torch.device = "cpu"
) -> Iterator[Prediction]:
    """A prediction for each file, in order; files that cannot be read come with the reason instead."""
    model = run.model.to(device)
    for start in range(0, len(paths), batch):
        opened = [_open(run, path) for path in paths[start : start + batch]]
        readable = [each.pixels for each in opened if each.pixels is not None]
        probabilities = iter(_probabilities(run, model, readable, device))
        for each in opened:
            yield each if each.pixels is None else _with_guesses(run, each, next(probabilities), top)


def _open(run: LoadedRun, path: Path) -> Prediction:
    try:
        planes = run.transform.pixels(path)
    except UnreadableImage as error:
        return Prediction(path, problem=str(error))
    return Prediction(path, pixels=planes.transpose(1, 2, 0))


def batch_of(run: LoadedRun, pixels: Sequence[np.ndarray], device: str | torch.device) -> torch.Tensor:
    """Images [H, W, C] as the model's input [B, C, H, W]."""
    planes = np.stack([image.transpose(2, 0, 1) for image in pixels])
    return run.transform.normalize(torch.from_numpy(planes).to(device))


@torch.inference_mode()
def _probabilities(
    run: LoadedRun, model: torch.nn.Module, pixels: list[np.ndarray], device: str | torch.device
) -> torch.Tensor:
    if not pixels:
        return torch.empty(0, run.model.num_classes)
    return model(batch_of(run, pixels, device)).float().softmax(1).cpu()


def _with_guesses(run: LoadedRun, opened: Prediction, probabilities_C: torch.Tensor, top: int) -> Prediction:
    best = probabilities_C.topk(min(top, len(probabilities_C)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    guesses = tuple(Guess(run.name_of(index), index, probability) for index, probability in pairs)
    return Prediction(opened.path, guesses, pixels=opened.pixels)
