"""The end of a run: final weights, summary, and what to type next."""

from __future__ import annotations

import shlex
import time

import torch
from safetensors.torch import save_file

from vit_scale.train.run import Run
from vit_scale.train.screen import duration, percent


def finish(run: Run) -> None:
    """Write the final weights and the summary, and show it."""
    run.screen.stop()
    run.checkpoints.close()
    if run.record is None:
        return
    files = save_weights(run)
    seconds = time.perf_counter() - run.started
    summary = run.record.summary
    sync = run.record.close(finished=True, seconds=round(seconds, 1))
    rows = {"top-1": _accuracies(summary), "best": _best(run), "time": _time(seconds, summary)}
    rows["weights"] = ", ".join(files)
    rows["record"] = f"{run.folder}/metrics.jsonl, summary.json"
    commands = [f"less {shlex.quote(str(run.folder))}/summary.json"]
    run.screen.summary(rows, commands + ([sync] if sync else []))


def save_weights(run: Run) -> list[str]:
    """model.safetensors and, with EMA, model_ema.safetensors; returns their paths."""
    state = {name: t.detach().cpu().contiguous() for name, t in run.state.model.state_dict().items()}
    paths = [run.folder / "model.safetensors"]
    _write(state, paths[0])
    if run.state.ema is not None:
        paths.append(run.folder / "model_ema.safetensors")
        averaged = {name: t.detach().cpu().contiguous() for name, t in run.state.ema.shadow.items()}
        _write(state | averaged, paths[1])
    return [str(path) for path in paths]


def _write(tensors: dict[str, torch.Tensor], path) -> None:  # type: ignore[no-untyped-def]
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    partial.replace(path)


def _accuracies(summary: dict[str, float]) -> str:
    raw = f"{percent(summary['val/top1'])} raw"
    return f"{raw}, {percent(summary['val_ema/top1'])} EMA" if "val_ema/top1" in summary else raw


def _best(run: Run) -> str:
    return f"{percent(run.state.best_top1)} after {run.state.best_step:,} steps"


def _time(seconds: float, summary: dict[str, float]) -> str:
    return f"{duration(seconds)}, last {summary['speed/images_per_second']:,.0f} images/s"
