"""Where figures and tables about a model are written."""

from __future__ import annotations

import os
import re
from pathlib import Path

from vit_scale.errors import UserError
from vit_scale.inference.loaded_run import LoadedRun


def output_dir(kind: str, loaded: LoadedRun, *, out: str | None, source: str | None, split: str) -> Path | None:
    """Return `out`, or RUN/KIND-SPLIT; None if the model is not of a run.

    `source`: data other than the run's. Each dataset and split has a separate directory, so that no result is
    overwritten. Raises `UserError` if the run directory is not writable.
    """
    if out:
        return Path(out)
    if loaded.folder is None:
        return None
    words = [kind, *([source.strip("/.")] if source else []), split]
    folder = loaded.folder / "-".join(re.sub(r"[^A-Za-z0-9.-]+", "-", word) for word in words)
    if not os.access(loaded.folder, os.W_OK):
        raise UserError(f"{folder}: the run directory is not writable; choose another directory with --out DIR")
    return folder
