"""The record of a run: metrics.jsonl, summary.json, tables and images in its directory, and trackers by option.

Only the main rank has a `Record`; the others have a `SilentRecord`. Nothing here stops training: a failure to write is
logged once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from torch import nn

from vit_scale.checkpoints.run_dir import read_summary, unused_path
from vit_scale.config import Config
from vit_scale.errors import first_line
from vit_scale.files import replacing, write_text
from vit_scale.record.background import TrackerThread
from vit_scale.record.terminal import Terminal
from vit_scale.record.trackers import AccelerateTracker, Metrics, Tracker
from vit_scale.record.versions import git_commit, versions
from vit_scale.record.wandb_tracker import WandbTracker, choose_run_id, is_disabled
from vit_scale.tasks.task import Table

TABLES = "tables"
IMAGES = "pictures"
"""Directories of a run for `Record.table` and `Record.image`."""


@dataclass(frozen=True)
class Start:
    """Where a launch starts or resumes."""

    step: int = 0
    evaluated: bool = True
    """Whether the evaluation after `step`, if one is due, is done; otherwise it comes next."""
    is_rollback: bool = False

    def includes(self, line: str) -> bool:
        """Return whether a line of metrics.jsonl belongs to what was done before."""
        step = _step_of(line)
        is_repeated = step == self.step and not self.evaluated and _is_evaluation(line)
        return 0 < step <= self.step and not is_repeated


class SilentRecord:
    """Records nothing: for all ranks but the main one."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.summary: dict[str, Any] = {}

    def start_trackers(self, timm_check: dict[str, Any] | None = None) -> None:
        """Let trackers start, after the first step, which their start would delay; `timm_check` is logged first."""

    def wait_for_trackers(self) -> None:
        """Let trackers finish starting; to be called before processes are forked."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Write a line of metrics.jsonl, pass it to all trackers, and keep the last values for the summary."""

    def image(self, step: int, name: str, draw: Callable[[], Image.Image], *, title: str, caption: str) -> None:
        """Write `pictures/<name>.png`, which replaces an earlier one."""

    def table(self, step: int, table: Table, weights: str) -> None:
        """Write `tables/<name>.json`, which replaces an earlier one; `weights` is `raw` or `ema`."""

    def weights(self, files: list[Path]) -> None:
        """Pass the final weights to trackers."""

    def write_summary(self, **values: Any) -> None:
        """Write summary.json with these values added."""

    def close(self, **values: Any) -> str | None:
        """Write the summary and close all trackers; returns the command that uploads what W&B does not have yet."""
        return None

    def __enter__(self) -> SilentRecord:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """If training fails, still pass on to trackers what was logged before."""


class Record(SilentRecord):
    """Writes metrics as they come, and the summary from the last and best of them."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        *,
        start: Start,
        facts: dict[str, Any],
        terminal: Terminal,
    ) -> None:
        """`start` is where this launch starts or resumes; `facts` are known before training."""
        super().__init__(terminal)
        self.folder = folder
        self._failed: set[str] = set()
        self._is_new = start.step == 0
        before = read_summary(folder)
        self.summary = {k: v for k, v in before.items() if not k.startswith("best/")} if start.step else {}
        logged = max(self._last_step_in_file(), before.get("last_logged_step", 0))
        if logged > start.step:
            self.summary["last_logged_step"] = logged
        self._drop_lines_after(start)
        self.summary |= {"finished": False, "stopped_early": False} | facts
        self.summary |= {"versions": versions(), "git_commit": git_commit()}
        self.summary["resume"] = config.run.resume
        # A run that was killed before its first checkpoint restarts, but is still the same run to W&B.
        self._wandb = self._wandb_tracker(config, start, logged, before.get("wandb_id"))
        names = config.track.trackers
        trackers: list[Tracker] = [AccelerateTracker(name, config, folder, start.step) for name in names]
        if self._wandb is not None:
            self.summary["wandb_id"] = self._wandb.id
            trackers.append(self._wandb)
        self._threads: list[TrackerThread] = []
        self.write_summary()  # with the W&B run id, before that run starts
        self._threads = [TrackerThread(tracker, terminal.info) for tracker in trackers]
        self._send("summarize", facts)

    def start_trackers(self, timm_check: dict[str, Any] | None = None) -> None:
        if timm_check is not None:
            self.write_summary(timm_check=timm_check)
        first = [("check", (timm_check,))] if timm_check is not None and self._is_new else []
        for thread in self._threads:
            thread.start(first)

    def wait_for_trackers(self) -> None:
        for thread in self._threads:
            thread.wait_for_start()

    def log(self, step: int, metrics: Metrics) -> None:
        # JSON has no NaN
        values = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        self.summary |= {"step": step} | values
        self._try("metrics.jsonl", lambda: self._append({"step": step} | values))
        self._send("log", step, values)

    def image(self, step: int, name: str, draw: Callable[[], Image.Image], *, title: str, caption: str) -> None:
        def write() -> None:
            path = self.folder / IMAGES / f"{name}.png"
            path.parent.mkdir(exist_ok=True)
            image = draw()
            with replacing(path) as partial:
                image.save(partial, format="PNG")
            self.summary.setdefault(IMAGES, {})[name] = {"title": title, "caption": caption, "step": step}
            self._send("image", step, name, image)

        self._try(f"{IMAGES}/{name}.png", write)

    def table(self, step: int, table: Table, weights: str) -> None:
        def write() -> None:
            path = self.folder / TABLES / f"{table.name}.json"
            path.parent.mkdir(exist_ok=True)
            content = {"step": step, "weights": weights} | asdict(table)
            write_text(path, json.dumps(content, ensure_ascii=False) + "\n")

        self._try(f"{TABLES}/{table.name}.json", write)
        self._send("table", step, table, weights)

    def weights(self, files: list[Path]) -> None:
        self._send("weights", files)

    def write_summary(self, **values: Any) -> None:
        self.summary |= values
        self._send("summarize", values)
        text = json.dumps(self.summary, indent=1, default=str) + "\n"
        self._try("summary.json", lambda: write_text(self.folder / "summary.json", text))

    def close(self, **values: Any) -> str | None:
        self.write_summary(**values)
        for thread in self._threads:
            thread.close()
        return None if self._wandb is None else self._wandb.sync_command()

    def __enter__(self) -> Record:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            for thread in self._threads:
                thread.abandon()

    # ------------------------------------------------------------------------------------------------------- details

    def _wandb_tracker(self, config: Config, start: Start, logged: int, run_id: str | None) -> WandbTracker | None:
        if is_disabled(config.track.wandb):
            return None
        return WandbTracker(
            config,
            self.folder,
            run_id=choose_run_id(run_id),
            resumed=run_id is not None,
            last_logged_step=logged,
            pending_step=None if start.evaluated else start.step,
            facts=self.summary,
            info=self.terminal.info,
        )

    def _send(self, method: str, *values: Any) -> None:
        for thread in self._threads:
            thread.send(method, *values)

    def _append(self, line: dict[str, Any]) -> None:
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _last_step_in_file(self) -> int:
        steps = [step for line in self._lines() if math.isfinite(step := _step_of(line))]
        return int(max(steps, default=0))

    def _drop_lines_after(self, start: Start) -> None:
        """Drop steps that a killed run logged after its last checkpoint; they will be logged again.

        Of a run that is rolled back, they are moved to another file. The summary forgets them too.
        """
        path, lines = self.folder / "metrics.jsonl", self._lines()
        kept = [line for line in lines if start.includes(line)]
        dropped = [line for line in lines if not start.includes(line)]
        if not dropped:
            return
        if start.is_rollback:
            self._try("metrics.jsonl", lambda: write_text(unused_path(path), _joined(dropped)))
        self._try("metrics.jsonl", lambda: write_text(path, _joined(kept)))
        for key in {key for line in dropped for key in _values(line)}:
            self.summary.pop(key, None)
        for line in kept:
            self.summary |= _values(line)

    def _lines(self) -> list[str]:
        path = self.folder / "metrics.jsonl"
        return path.read_text().splitlines() if path.is_file() else []

    def _try(self, name: str, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # noqa: BLE001 -- whatever it is, training continues
            if name not in self._failed:
                self.terminal.info(f"{name} cannot be written: {first_line(error)}. Training continues.")
            self._failed.add(name)


class RecordShow:
    """`tasks.task.Show` of a run: what an evaluation of these weights shows goes to the record."""

    def __init__(self, record: SilentRecord, model: nn.Module, step: int, weights: str = "raw") -> None:
        self.model = model
        self._record, self._step, self._weights = record, step, weights

    def table(self, table: Table) -> None:
        self._record.table(self._step, table, self._weights)

    def image(self, name: str, draw: Callable[[], Image.Image], *, title: str, caption: str) -> None:
        self._record.image(self._step, name, draw, title=title, caption=caption)

    def info(self, text: str) -> None:
        self._record.terminal.info(text)


def _step_of(line: str) -> float:
    return _values(line).get("step", math.inf)


def _values(line: str) -> dict[str, Any]:
    """Return the metrics of a line; none if it is the partial last line of a killed process."""
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError):
        return {}


def _is_evaluation(line: str) -> bool:
    return any(key.startswith("val") for key in _values(line))


def _joined(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
