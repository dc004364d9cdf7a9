"""What every export does: write aside, load again, compare outputs, and only then put the files in place."""

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
"""Batch sizes that are tried: one, and another than the one an export was made with."""
TOLERANCE = 1e-3
"""Largest difference of a logit, over the largest logit (at least 1)."""


@dataclass(frozen=True)
class Exported:
    """What was written, and how it was checked."""

    path: Path
    checked: str
    """What was loaded and compared, in words."""
    difference: float
    """The largest difference of a logit that was found."""
    usage: str
    """Code that loads it."""


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A path to write `out` to, file or folder; moved into place at the end, and gone if anything is raised."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=out.parent, prefix=".partial-") as folder:
            yield Path(folder) / out.name
            for each in Path(folder).iterdir():
                _move(each, out.parent / each.name)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error}") from error


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
    """Of the logits of the run's model and of what was exported; a `UserError` where it is more than rounding.

    On noise: normalised pixels have about this spread.
    """
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for batch in batches:
        images = torch.randn(batch, run.model.in_chans, *run.model.img_size, generator=generator)
        ours, theirs = run.model(images), exported(images)
        difference = (ours - theirs).abs().max().item()
        if not difference <= TOLERANCE * max(1.0, ours.abs().max().item()):
            raise UserError(
                f"what was exported differs from the model by {difference:.3g} at a batch of {batch}; nothing is kept"
            )
        worst = max(worst, difference)
    return worst
