"""A run in words and numbers, from what was decided: for the header, the summary and the trackers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vit_scale.config import Config
from vit_scale.cost.count import ModelCount
from vit_scale.cost.hardware import Peak
from vit_scale.cost.strategy_names import format_strategy
from vit_scale.format import significant
from vit_scale.schedule import Plan
from vit_scale.tasks.task import Task


def header_rows(
    config: Config, plan: Plan, count: ModelCount, *, data: str, strategy: str, precision: str, folder: Path, peak: Peak
) -> dict[str, str]:
    """Return the header of a run for the terminal; `data` describes the data."""
    return {
        "model": format_model(config.model.name, count),
        "data": data,
        "batch size": format_batch_size(plan),
        "schedule": format_schedule(plan),
        "precision": precision,
        "strategy": format_strategy(strategy, config.parallel.offload),
        "output dir": str(folder),
        "peak": peak.describe(),
    }


def run_facts(
    config: Config, plan: Plan, count: ModelCount, task: Task, *, strategy: str, precision: str, peak: Peak
) -> dict[str, Any]:
    """Return what summary.json says of a run before it starts."""
    return {
        "model": config.model.name,
        "params": count.params,
        "macs": count.macs,
        "strategy": strategy,
        "precision": precision,
        "processes": plan.processes,
        "in_chans": task.in_chans,
        "class_names": list(task.info.class_names),
        "task": task.describe(),
    } | peak.numbers()


def format_model(name: str, count: ModelCount) -> str:
    """`vit_base_patch16_224 (86,567,656 parameters, 17.56 GMACs per image)`."""
    macs = f"{significant(count.macs / 1e9)} GMACs" if count.macs >= 1e8 else f"{significant(count.macs / 1e6)} MMACs"
    return f"{name} ({count.params:,} parameters, {macs} per image)"


def format_batch_size(plan: Plan) -> str:
    """`1,024 (8 processes x 2 accumulation steps x 64 images)`."""
    processes = f"{plan.processes} process{'es' if plan.processes > 1 else ''}"
    passes = f"{plan.accumulation} accumulation step{'s' if plan.accumulation > 1 else ''}"
    return f"{plan.global_batch:,} ({processes} x {passes} x {plan.micro_batch} images)"


def format_schedule(plan: Plan) -> str:
    """`1,000 steps (10 epochs), 100 warmup steps`."""
    epochs = f" ({plan.epoch(plan.steps):.4g} epochs)" if plan.train_images else ""
    warmup = f", {plan.warmup_steps:,} warmup steps" if plan.warmup_steps else ""
    return f"{plan.steps:,} steps{epochs}{warmup}"
