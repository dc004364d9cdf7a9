"""Find the checkpoint to resume from, and check that it is valid.

A checkpoint is trusted only if all files match its manifest.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from vit_scale.checkpoints.checked_files import corruption_error
from vit_scale.checkpoints.run_dir import UNUSED
from vit_scale.errors import UserError

META_KEYS = {"step", "best", "best_step", "skipped_steps", "plan"}
"""Keys of meta.json required to resume."""
_OLD_KEYS = {"best_top1": "best", "bad_steps": "skipped_steps", "bad_in_a_row": "consecutive_skipped_steps"}
"""Keys that earlier versions wrote."""
EVALUATION = "evaluation.json"
"""Added to a checkpoint when the evaluation after its step is done: metrics, `best` and `best_step`."""


def checkpoint_name(step: int) -> str:
    """Return the name of a checkpoint directory."""
    return f"step-{step:08d}"


def is_checkpoint_name(text: str) -> bool:
    """Return whether `text` names a checkpoint of a run, such as `step-00001000`, rather than a path."""
    return re.fullmatch(rf"({UNUSED})?step-\d+(-\d+)?", text) is not None


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint directory."""
    return int(checkpoint.name.removeprefix("step-"))


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the checkpoints in a `checkpoints` directory, oldest first, valid or not."""
    found = [path for path in checkpoints.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(found, key=step_of)


def find_checkpoint(resume: str, run_dir: Path) -> tuple[Path | None, list[str]]:
    """Return the checkpoint that `run.resume` selects, if any, and messages about invalid ones."""
    if resume == "never":
        return None, []
    if resume == "auto":
        return latest_valid_checkpoint(run_dir)
    if is_checkpoint_name(resume):
        return _named_checkpoint(resume, run_dir), []
    path = Path(resume)
    if path.is_file():
        raise UserError(
            f"run.resume = {resume!r}: expected a checkpoint directory; use model.weights for a weights file"
        )
    if not path.is_dir():
        raise UserError(
            f"run.resume = {resume!r}: checkpoint or run not found; use auto, never, a path or one of this run "
            f"({_names_in(run_dir / 'checkpoints')})"
        )
    if (path / "checkpoints").is_dir():
        return latest_valid_checkpoint(path)
    return _checked(path, resume), []


def _named_checkpoint(name: str, run_dir: Path) -> Path:
    directory = run_dir / "checkpoints"
    path = directory / (checkpoint_name(int(name[5:])) if name[5:].isdecimal() else name)  # `step-1000` will do
    if not path.is_dir():
        raise UserError(f"run.resume = {name!r}: not found in {directory}; available: {_names_in(directory)}")
    return _checked(path, name)


def _names_in(checkpoints: Path) -> str:
    return ", ".join(checkpoint.name for checkpoint in list_checkpoints(checkpoints)) or "none"


def _checked(path: Path, resume: str) -> Path:
    if error := checkpoint_error(path):
        raise UserError(f"run.resume = {resume!r}: invalid checkpoint: {error}")
    return path


def latest_valid_checkpoint(run_dir: Path) -> tuple[Path | None, list[str]]:
    """Return the latest valid checkpoint and messages about invalid newer ones."""
    messages: list[str] = []
    last_step = 0
    for checkpoint in reversed(list_checkpoints(run_dir / "checkpoints")):
        error = checkpoint_error(checkpoint)
        if error is None:
            return checkpoint, [*messages, *_rerun_message(step_of(checkpoint), last_step)]
        last_step = max(last_step, step_of(checkpoint))
        messages.append(f"Skipping invalid checkpoint {checkpoint.name}: {error}.")
    return None, [*messages, *_rerun_message(0, last_step)]


def _rerun_message(valid_step: int, last_step: int) -> list[str]:
    return [f"Steps {valid_step + 1:,}-{last_step:,} will be rerun."] if last_step else []


def checkpoint_error(checkpoint: Path) -> str | None:
    """Return why a checkpoint is invalid, or None."""
    try:
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
        entries = {checkpoint / name: {key: entry[key] for key in ("bytes", "crc32")} for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "no readable manifest"
    if not {"model.safetensors", "meta.json"} <= files.keys():
        return "no weights in its manifest"
    for path, entry in entries.items():
        if error := corruption_error(path, entry):
            return error
    return None if _has_meta(checkpoint) else "its meta.json does not describe a checkpoint"


def _has_meta(checkpoint: Path) -> bool:
    try:
        return read_meta(checkpoint).keys() >= META_KEYS
    except (OSError, ValueError, AttributeError):
        return False


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """Read meta.json, with keys of earlier versions under their present names, and the evaluation, if it is done."""
    meta = json.loads((checkpoint / "meta.json").read_text())
    renamed = {_OLD_KEYS.get(key, key): value for key, value in meta.items()}
    if (meta.get("best_top1") or 0.0) < 0:  # not evaluated yet
        renamed["best"] = None
    return {"evaluated": True} | renamed | _read_evaluation(checkpoint)


def _read_evaluation(checkpoint: Path) -> dict[str, Any]:
    try:
        return json.loads((checkpoint / EVALUATION).read_text()) | {"evaluated": True}
    except (OSError, ValueError, TypeError):
        return {}
