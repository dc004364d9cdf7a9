"""A run in words and numbers, from what was decided: for the header, the summary and the trackers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vit_scale.config import Config
from vit_scale.cost.count import ModelCount
from vit_scale.cost.hardware import Peak
from vit_scale.cost.strategy_names import format_strategy
from vit_scale.format import counted, significant
from vit_scale.schedule import Plan
from vit_scale.tasks.task import Task


def header_rows(
    config: Config,
    plan: Plan,
    count: ModelCount,
    task: Task,
    *,
    data: Mapping[str, str],
    strategy: str,
    precision: str,
    folder: Path,
    peak: Peak,
) -> dict[str, str]:
    """Return the header of a run for the terminal; `data` has the lines about the data."""
    return {
        "model": format_model(config.model.name, count),
        **data,
        **option_rows(config),
        **task.header(),
        "batch size": plan.format_batch_size(),
        "schedule": format_schedule(plan),
        "precision": precision,
        "strategy": format_strategy(strategy, config.parallel.offload),
        "output dir": str(folder),
        "peak": peak.describe(),
    }


def option_rows(config: Config) -> dict[str, str]:
    """Return what the options change about sampling, evaluation and the end of a run, for the header and the plan."""
    run = config.run
    rows = {
        "sampling": "classes equally often (data.balance)" if config.data.balance else "",
        "evaluation": f"at most {run.eval_images:,} validation images (run.eval_images)" if run.eval_images else "",
        "early stop": f"after {run.patience:,} evaluations without improvement (run.patience)" if run.patience else "",
    }
    return {name: text for name, text in rows.items() if text}


def run_facts(
    config: Config,
    plan: Plan,
    count: ModelCount,
    task: Task,
    *,
    images: Mapping[str, int],
    strategy: str,
    precision: str,
    peak: Peak,
) -> dict[str, Any]:
    """Return what summary.json says of a run before it starts; `images` is their number per split."""
    return {
        "model": config.model.name,
        "params": count.params,
        "params_trained": count.trained_params,
        "macs": count.macs,
        "strategy": strategy,
        "precision": precision,
        "processes": plan.processes,
        "in_chans": task.in_chans,
        "class_names": list(task.info.class_names),
        "task": task.describe(),
        **{f"{split}_images": count for split, count in images.items()},
    } | peak.numbers()


def format_model(name: str, count: ModelCount) -> str:
    """`vit_base_patch16_224 (86,567,656 parameters, 17.56 GMACs per image)`."""
    macs = f"{significant(count.macs / 1e9)} GMACs" if count.macs >= 1e8 else f"{significant(count.macs / 1e6)} MMACs"
    trained = f"{count.trained_params:,} of " if count.frozen_params else ""
    parameters = f"{trained}{count.params:,} parameters{' trained' if trained else ''}"
    return f"{name} ({parameters}, {macs} per image)"


def format_schedule(plan: Plan) -> str:
    """`1,000 steps (10 epochs), 100 warmup steps`."""
    epochs = f" ({plan.epoch(plan.steps):.4g} epochs)" if plan.train_images else ""
    warmup = f", {counted(plan.warmup_steps, 'warmup step')}" if plan.warmup_steps else ""
    return f"{counted(plan.steps, 'step')}{epochs}{warmup}"
