"""The end of a run: final weights, summary, and what to type next."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from vit_scale.errors import UserError
from vit_scale.files import describe_write_error, replacing
from vit_scale.format import duration, percent
from vit_scale.strategies.shards import gather
from vit_scale.train.build import Run


def finish(run: Run) -> None:
    """Write the final weights and the summary, and show it; all processes take part."""
    files = save_weights(run)
    run.close()
    for problem in (run.checkpoints.problem(), run.train_loader.problems.summary(), run.eval_loader.problems.summary()):
        if problem:
            run.screen.say(problem)
    if run.record is None:
        return
    seconds = time.perf_counter() - run.started
    summary = run.record.summary
    run.record.weights([Path(name) for name in files])
    sync = run.record.close(finished=True, seconds=round(seconds, 1))
    rows = {"top-1": _accuracies(summary), "best": _best(run), "time": _time(seconds, summary)}
    rows["weights"] = ", ".join(files)
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


def save_weights(run: Run) -> list[str]:
    """model.safetensors and, with EMA, model_ema.safetensors; returns their paths."""
    state = run.state
    weights = state.shards.state_dict()
    sets = {"model.safetensors": weights}
    if state.ema is not None:
        pieces = state.ema.pieces()
        shapes = {name: weights[name].shape for name in state.shards.params}
        sets["model_ema.safetensors"] = weights | gather(pieces, shapes, run.device)
    for name, tensors in sets.items():
        if run.accelerator.is_main_process:
            _write({k: t.detach().cpu().contiguous() for k, t in tensors.items()}, run.folder / name)
    return [str(run.folder / name) for name in sets]


def _write(tensors: dict[str, torch.Tensor], path: Path) -> None:
    with replacing(path) as partial:
        try:
            save_file(tensors, partial)
            partial.chmod(0o644)  # safetensors makes its files readable by their owner only
        except (OSError, SafetensorError) as error:
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            reason = describe_write_error(error, path.parent, {partial.name: size})
            raise UserError(
                f"{path} could not be written: {reason}.\n"
                "Training is complete. Free some disk space and rerun the same command to write the weights."
            ) from error


def _accuracies(summary: dict[str, float]) -> str:
    """From the record, which a run that was killed between its last step and this has from before."""
    kinds = {"raw": "val/top1", "EMA": "val_ema/top1"}
    return ", ".join(f"{percent(summary[key])} {kind}" for kind, key in kinds.items() if key in summary)


def _best(run: Run) -> str:
    return f"{percent(run.state.best_top1)} after {run.state.best_step:,} steps"


def _time(seconds: float, summary: dict[str, float]) -> str:
    return f"{duration(seconds)}, last {summary.get('speed/images_per_second', 0):,.0f} images/s"
