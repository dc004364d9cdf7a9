"""The record of a run: metrics.jsonl, summary.json and pictures in its folder always, trackers by option.

Only the main process has a `Record`. Nothing here stops training: what cannot be written is said once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from vit_scale.checkpoints.run_dir import read_summary
from vit_scale.config import Config
from vit_scale.errors import first_line
from vit_scale.files import replacing, write_text
from vit_scale.record.trackers import AccelerateTracker, Metrics, Say, Teller, Tracker
from vit_scale.record.versions import git_commit, versions
from vit_scale.record.wandb_tracker import WandbTracker, choose_run_id, is_disabled
from vit_scale.tasks.classify.confusion import ConfusionTable


class Record:
    """Writes metrics as they come, and the summary from the last and best of them."""

    def __init__(self, folder: Path, config: Config, *, step: int, facts: dict[str, Any], say: Say) -> None:
        """`step` is where this start goes on from; `facts` are what is known of the run before it begins."""
        self.folder = folder
        self._say = say
        self._said: set[str] = set()
        self._is_new = step == 0
        before = read_summary(folder)
        self.summary: dict[str, Any] = dict(before) if step else {}
        self.summary |= {"finished": False, "versions": versions(), "git_commit": git_commit()} | facts
        told = max(self._last_step_in_file(), before.get("told_step", 0))
        if told > step:
            self.summary["told_step"] = told
        self._drop_lines_after(step)
        # A run that was killed before its first checkpoint starts anew, but is still the same run to W&B.
        self._wandb = self._wandb_tracker(config, told, before.get("wandb_id"))
        trackers: list[Tracker] = [AccelerateTracker(name, config, folder, step) for name in config.track.trackers]
        if self._wandb is not None:
            self.summary["wandb_id"] = self._wandb.id
            trackers.append(self._wandb)
        self._tellers: list[Teller] = []
        self.write_summary()  # with the id of the W&B run, before that begins
        self._tellers = [Teller(tracker, say) for tracker in trackers]
        self._tell("summarize", facts)

    def start_trackers(self, timm_check: dict[str, Any]) -> None:
        """Let trackers begin: after the first update, which their start would hold up."""
        self.write_summary(timm_check=timm_check)
        first = [("check", (timm_check,))] if self._is_new else []
        for teller in self._tellers:
            teller.start(first)

    def wait_for_trackers(self) -> None:
        """Let trackers finish starting; to be called before processes are forked."""
        for teller in self._tellers:
            teller.wait_for_start()

    def log(self, step: int, metrics: Metrics) -> None:
        """A line of metrics.jsonl, the same to all trackers, and the last values into the summary."""
        # JSON has no NaN
        values = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        self.summary |= {"step": step} | values
        self._try("metrics.jsonl", lambda: self._append({"step": step} | values))
        self._tell("log", step, values)

    def picture(self, step: int, name: str, draw: Callable[[], Image.Image]) -> None:
        """`pictures/<name>.png`, the last one of that name; drawing may fail like anything else here."""

        def write() -> None:
            path = self.folder / "pictures" / f"{name}.png"
            path.parent.mkdir(exist_ok=True)
            picture = draw()
            with replacing(path) as partial:
                picture.save(partial, format="PNG")
            self._tell("picture", step, name, picture)

        self._try(f"pictures/{name}.png", write)

    def confusion(self, table: ConfusionTable) -> None:
        """confusion.json: which classes are taken for which."""
        text = json.dumps(table.to_dict(), ensure_ascii=False) + "\n"
        self._try("confusion.json", lambda: write_text(self.folder / "confusion.json", text))
        self._tell("confusion", table.step, table)

    def weights(self, files: list[Path]) -> None:
        """The final weights are in `files`."""
        self._tell("weights", files)

    def write_summary(self, **values: Any) -> None:
        """summary.json with these values as well."""
        self.summary |= values
        self._tell("summarize", values)
        text = json.dumps(self.summary, indent=1, default=str) + "\n"
        self._try("summary.json", lambda: write_text(self.folder / "summary.json", text))

    def close(self, **values: Any) -> str | None:
        """Write the summary, part from all trackers; returns the command that uploads what W&B does not have yet."""
        self.write_summary(**values)
        for teller in self._tellers:
            teller.close()
        return None if self._wandb is None else self._wandb.sync_command()

    def __enter__(self) -> Record:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Where training fails, trackers still get what they were told; that it failed they see for themselves."""
        if kind is not None:
            for teller in self._tellers:
                teller.abandon()

    # ------------------------------------------------------------------------------------------------------- details

    def _wandb_tracker(self, config: Config, told: int, run_id: str | None) -> WandbTracker | None:
        if is_disabled(config.track.wandb):
            return None
        return WandbTracker(
            config,
            self.folder,
            run_id=choose_run_id(run_id),
            resumed=run_id is not None,
            told_step=told,
            facts=self.summary,
            say=self._say,
        )

    def _tell(self, method: str, *values: Any) -> None:
        for teller in self._tellers:
            teller.tell(method, *values)

    def _append(self, line: dict[str, Any]) -> None:
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _last_step_in_file(self) -> int:
        steps = [step for line in self._lines() if math.isfinite(step := _step_of(line))]
        return int(max(steps, default=0))

    def _drop_lines_after(self, step: int) -> None:
        """A killed run may have logged steps that its last checkpoint does not hold; they will be logged again."""
        kept = [line for line in self._lines() if _step_of(line) <= step] if step else []
        if kept or self._lines():
            text = "".join(f"{line}\n" for line in kept)
            self._try("metrics.jsonl", lambda: write_text(self.folder / "metrics.jsonl", text))

    def _lines(self) -> list[str]:
        path = self.folder / "metrics.jsonl"
        return path.read_text().splitlines() if path.is_file() else []

    def _try(self, what: str, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # noqa: BLE001 -- whatever it is, training goes on
            if what not in self._said:
                self._say(f"{what} cannot be written: {first_line(error)}; training goes on")
            self._said.add(what)


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):  # the half line of a killed process
        return float("inf")
