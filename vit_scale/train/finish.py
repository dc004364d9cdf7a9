"""The end of a run: final weights, summary, and the commands to try next."""

from __future__ import annotations

import shlex
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from vit_scale.errors import UserError
from vit_scale.files import describe_write_error, replacing
from vit_scale.format import duration
from vit_scale.strategies.shards import gather
from vit_scale.train.run import Run


def finish(run: Run, seconds: float) -> None:
    """Write the final weights and the summary of a run that took `seconds`, and print it; every rank must call it."""
    files = save_weights(run)
    run.close()
    for problem in (run.checkpoints.problem(), *run.loaders.problems()):
        if problem:
            run.record.terminal.info(problem)
    summary = run.record.summary
    run.record.weights([Path(name) for name in files])
    sync = run.record.close(finished=True, seconds=round(seconds, 1))
    rows = _results(run, summary) | {"best": _best(run), "time": _time(seconds, summary)}
    rows["weights"] = ", ".join(files)
    rows["logs"] = f"{run.folder}/metrics.jsonl, summary.json"
    run.record.terminal.summary(rows, _next_commands(run.folder, sync))


def _next_commands(folder: Path, sync: str | None) -> dict[str, str]:
    """Return commands to try next, with their purpose."""
    quoted = shlex.quote(str(folder))
    commands = {
        f"python launch/show_run.py {quoted}": "an HTML page with curves and images",
        f"python launch/eval.py {quoted}": "metrics in detail",
        f"python launch/predict.py {quoted} IMAGE": "predict your own images",
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


def _results(run: Run, summary: dict[str, float]) -> dict[str, str]:
    """Return the last value of the first metric, from the summary: a resumed run may not have evaluated since."""
    metric = run.task.metrics[0]
    kinds = {"raw": f"val/{metric.name}", "EMA": f"val_ema/{metric.name}"}
    values = [f"{metric.text(summary[key])} ({kind})" for kind, key in kinds.items() if key in summary]
    return {metric.label: ", ".join(values)} if values else {}


def _best(run: Run) -> str:
    best = run.state.best
    return "none" if best is None else f"{run.task.metrics[0].text(best)} at step {run.state.best_step:,}"


def _time(seconds: float, summary: dict[str, float]) -> str:
    return f"{duration(seconds)}, last {summary.get('speed/images_per_second', 0):,.0f} images/s"
