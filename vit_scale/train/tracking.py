"""The record of a run: metrics.jsonl and summary.json always, Weights & Biases by option.

Only the main process has a `Record`. Nothing here stops training: what cannot be written is said once.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vit_scale.config import Config, TrackConfig
from vit_scale.recipe import to_tree
from vit_scale.train.run_folder import read_summary, write_text

Metrics = dict[str, float]
PACKAGES = ("vit_scale", "torch", "torchvision", "timm", "accelerate", "deepspeed", "datasets", "wandb")


class Record:
    """Writes metrics as they come, and the summary from the last and best of them."""

    def __init__(self, folder: Path, config: Config, *, step: int, facts: dict[str, Any], say: Callable[[str], None]):
        self.folder = folder
        self._say = say
        self._said: set[str] = set()
        before = read_summary(folder) if step else {}
        self.summary: dict[str, Any] = {**before, "finished": False, "versions": versions(), "git_commit": git_commit()}
        self.summary |= facts
        self._drop_lines_after(step)
        self._wandb = start_wandb(config, folder, before.get("wandb_id"), facts, say)
        if self._wandb is not None:
            self.summary["wandb_id"] = self._wandb.id
        self.write_summary()

    def log(self, step: int, metrics: Metrics) -> None:
        """A line of metrics.jsonl, the same to W&B, and the last values into the summary."""
        # JSON has no NaN
        line = {"step": step} | {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        self.summary |= line
        try:
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            self._say_once("metrics.jsonl", f"cannot be written: {error}; training goes on")
        self._to_wandb(lambda run: run.log(line, step=step))

    def write_summary(self, **values: Any) -> None:
        self.summary |= values
        try:
            write_text(self.folder / "summary.json", json.dumps(self.summary, indent=1, default=str) + "\n")
        except OSError as error:
            self._say_once("summary.json", f"cannot be written: {error}; training goes on")

    def close(self, **values: Any) -> str | None:
        """Write the summary, end the W&B run; returns the command that uploads an offline run."""
        self.write_summary(**values)
        last = {k: v for k, v in self.summary.items() if isinstance(v, int | float | str)}
        self._to_wandb(lambda run: run.summary.update(last))
        self._to_wandb(lambda run: run.finish(exit_code=0))
        if self._wandb is None or not self._wandb.offline:
            return None
        return f"wandb sync {os.path.relpath(Path(self._wandb.dir).parent)}"

    def _to_wandb(self, tell: Callable[[Any], None]) -> None:
        """Whatever the client raises, it is told no more and training goes on."""
        if self._wandb is None:
            return
        try:
            tell(self._wandb)
        except Exception as error:  # noqa: BLE001
            self._say_once("W&B", f"cannot be reached: {error}; training goes on, metrics.jsonl has everything")
            self._wandb = None

    def _drop_lines_after(self, step: int) -> None:
        """A killed run may have logged steps that its last checkpoint does not hold; they will be logged again."""
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return
        kept = [line for line in path.read_text().splitlines() if _step_of(line) <= step] if step else []
        try:
            write_text(path, "".join(f"{line}\n" for line in kept))
        except OSError as error:
            self._say_once("metrics.jsonl", f"cannot be written: {error}; training goes on")

    def _say_once(self, what: str, problem: str) -> None:
        if what not in self._said:
            self._say(f"{what} {problem}")
        self._said.add(what)


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):  # the half line of a killed process
        return float("inf")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """The commit of the code that runs, with `-dirty` where files were changed; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def wandb_mode(asked: str) -> Any:
    """`auto` is online when there is a key for the server, else offline; never a prompt."""
    if asked != "auto":
        return asked
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"]
    import wandb

    return "online" if wandb.login(prompt=False, verify=False) else "offline"


def start_wandb(
    config: Config, folder: Path, run_id: str | None, facts: dict[str, Any], say: Callable[[str], None]
) -> Any | None:
    """The W&B run, or None where it is disabled or cannot be started."""
    track: TrackConfig = config.track
    if track.wandb == "disabled":
        return None
    try:
        import wandb

        run = wandb.init(
            project=track.project,
            entity=track.entity,
            name=track.name or folder.name,
            group=track.group,
            tags=list(track.tags) or None,
            dir=folder,
            id=run_id,
            resume="allow" if run_id else None,
            mode=wandb_mode(track.wandb),
            config=to_tree(config) | {"facts": facts},
            settings=wandb.Settings(silent=True, console="off"),
        )
        run.define_metric("*", step_metric="step")
        return run
    except Exception as error:  # noqa: BLE001 -- whatever the client raises, training goes on
        say(f"W&B cannot be used: {error}; training goes on, metrics.jsonl has everything")
        return None
