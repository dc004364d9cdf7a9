"""Steps of every export: write to a temporary directory, load, compare outputs, then move into place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from vit_scale.errors import UserError
from vit_scale.inference.loaded_run import LoadedRun

BATCHES = (1, 5)
"""Batch sizes to verify: 1, and one that differs from the batch size used for the export."""
TOLERANCE = 1e-3
"""Maximum logit difference relative to the largest logit (at least 1)."""


@dataclass(frozen=True)
class Exported:
    """An exported model and how it was verified."""

    path: Path
    checked: str
    """Description of the verification."""
    difference: float
    """Maximum logit difference."""
    usage: str
    """Code that loads the model."""


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Yield a temporary path for the file or directory `out`; moved into place at the end, deleted on an exception."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=out.parent, prefix=".partial-") as folder:
            yield Path(folder) / out.name
            for each in Path(folder).iterdir():
                _move(each, out.parent / each.name)
    except OSError as error:
        raise UserError(f"--out {out}: cannot write: {error}") from error


def _move(source: Path, target: Path) -> None:
    if not source.is_dir():
        source.replace(target)
        return
    target.mkdir(exist_ok=True)
    for each in source.iterdir():
        _move(each, target / each.name)


@torch.inference_mode()
def largest_difference(
    run: LoadedRun, exported: Callable[[torch.Tensor], torch.Tensor], batches: Sequence[int] = BATCHES
) -> float:
    """Return the maximum difference between the logits of the run's model and the exported model.

    The inputs are Gaussian noise, which has about the range of normalized pixels. Raises `UserError` if the
    difference exceeds rounding errors.
    """
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for batch in batches:
        images = torch.randn(batch, run.model.in_chans, *run.model.img_size, generator=generator)
        ours, theirs = run.model(images), exported(images)
        difference = (ours - theirs).abs().max().item()
        if not difference <= TOLERANCE * max(1.0, ours.abs().max().item()):
            raise UserError(
                f"the exported model differs from the original by {difference:.3g} at batch size {batch}; deleted it"
            )
        worst = max(worst, difference)
    return worst
