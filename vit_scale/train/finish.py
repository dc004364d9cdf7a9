"""The end of a run: final weights, summary, and what to type next."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

from vit_scale.checkpoints.final_weights import write_final_weights
from vit_scale.format import duration, percent
from vit_scale.train.build import Run


def finish(run: Run) -> None:
    """Write the final weights and the summary, and show it; all processes take part."""
    files = write_final_weights(run.state, run.folder, is_main=run.state.engine.rank == 0)
    run.close()
    for problem in (run.checkpoints.problem(), run.train_loader.problems.summary(), run.eval_loader.problems.summary()):
        if problem:
            run.screen.say(problem)
    if run.record is None:
        return
    seconds = time.perf_counter() - run.started
    summary = run.record.summary
    run.record.weights(files)
    sync = run.record.close(finished=True, seconds=round(seconds, 1))
    rows = {"top-1": _accuracies(summary), "best": _best(run), "time": _time(seconds, summary)}
    rows["weights"] = ", ".join(map(str, files))
    rows["record"] = f"{run.folder}/metrics.jsonl, summary.json"
    run.screen.summary(rows, _next_commands(run.folder, sync))


def _next_commands(folder: Path, sync: str | None) -> dict[str, str]:
    """Commands that a user may want now, with what they are for."""
    quoted = shlex.quote(str(folder))
    commands = {
        f"python launch/show_run.py {quoted}": "a page with curves and pictures",
        f"python launch/eval.py {quoted}": "accuracy of each class, calibration",
        f"python launch/predict.py {quoted} IMAGE": "try it",
    }
    return commands | ({sync: "upload to W&B"} if sync else {})


def _accuracies(summary: dict[str, float]) -> str:
    """From the record, which a run that was killed between its last step and this has from before."""
    kinds = {"raw": "val/top1", "EMA": "val_ema/top1"}
    return ", ".join(f"{percent(summary[key])} {kind}" for kind, key in kinds.items() if key in summary)


def _best(run: Run) -> str:
    return f"{percent(run.state.best or 0.0)} after {run.state.best_step:,} steps"


def _time(seconds: float, summary: dict[str, float]) -> str:
    return f"{duration(seconds)}, last {summary.get('speed/images_per_second', 0):,.0f} images/s"
