"""The end of a run: final weights, summary, and the commands to try next."""

from __future__ import annotations

from pathlib import Path

from vit_scale.checkpoints.final_weights import write_final_weights
from vit_scale.checkpoints.find import checkpoint_name
from vit_scale.cli import command_line
from vit_scale.format import duration
from vit_scale.tasks import TASKS
from vit_scale.tasks.task import Task
from vit_scale.train.run import Run


def finish(run: Run, seconds: float) -> None:
    """Write the final weights and the summary of a run that took `seconds`, and print it; every rank must call it."""
    terminal = run.record.terminal
    terminal.stop()
    with terminal.phase("Writing the final weights"):
        files = write_final_weights(run.state, run.folder, is_main=run.state.engine.rank == 0)
    run.close()
    for problem in (run.checkpoints.problem(), *run.loaders.problems()):
        if problem:
            terminal.info(problem)
    if run.stops_early():
        terminal.info(_early_stop(run))
    summary = run.record.summary
    run.record.weights(files)
    with terminal.phase("Closing the trackers"):
        sync = run.record.close(finished=True, stopped_early=run.stops_early(), seconds=round(seconds, 1))
    rows = _results(run, summary) | {"best": _best(run), "time": _time(seconds, summary)}
    rows["weights"] = ", ".join(map(str, files))
    rows["logs"] = f"{run.folder}/metrics.jsonl, summary.json"
    terminal.summary(rows, _next_commands(run.folder, type(run.task), sync))


def _next_commands(folder: Path, task: type[Task], sync: str | None) -> dict[str, str]:
    """Return commands to try next that support the task, with their purpose."""
    # A command cannot import a custom task.
    supported = task.commands if task.name in TASKS else ()
    commands = {command_line("show", str(folder)): "an HTML page with curves and images"}
    if "eval" in supported:
        commands[command_line("eval", str(folder))] = "metrics in detail"
    if "predict" in supported:
        commands[command_line("predict", str(folder), "IMAGE")] = "predict your own images"
    if "probe" in supported:
        commands[command_line("probe", str(folder))] = "judge its features with labels: k-NN and linear probe"
    if "finetune" in supported:
        commands[command_line("train", "RECIPE", f"model.weights={folder}")] = "fine-tune the model on labeled images"
    return commands | ({sync: "upload to W&B"} if sync else {})


def _results(run: Run, summary: dict[str, float]) -> dict[str, str]:
    """Return the last value of the first metric, from the summary: a resumed run may not have evaluated since."""
    metric = run.task.metrics[0]
    kinds = {"raw": f"val/{metric.name}", "EMA": f"val_ema/{metric.name}"}
    values = [f"{metric.text(summary[key])} ({kind})" for kind, key in kinds.items() if key in summary]
    return {metric.label: ", ".join(values)} if values else {}


def _best(run: Run) -> str:
    best = run.state.best
    return "none" if best is None else f"{run.task.metrics[0].text(best)} at step {run.state.best_step:,}"


def _early_stop(run: Run) -> str:
    """Return why the run has ended, and where its best checkpoint is."""
    state, label = run.state, run.task.metrics[0].label
    best = run.folder / "checkpoints" / checkpoint_name(state.best_step)
    found = f"Best checkpoint: {best}" if best.is_dir() else f"Best: step {state.best_step:,}, without a checkpoint"
    return (
        f"Stopped early at step {state.step:,}/{run.plan.steps:,}: no better {label} than {_best(run)} in "
        f"{run.config.run.patience} evaluations (run.patience). {found}."
    )


def _time(seconds: float, summary: dict[str, float]) -> str:
    return f"{duration(seconds)}, last {summary.get('speed/images_per_second', 0):,.0f} images/s"
