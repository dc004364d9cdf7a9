"""A run in words and numbers, from what was decided: for the header, the record and the tracker."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from vit_scale.config import Config
from vit_scale.cost.count import ModelCount, count_model
from vit_scale.cost.strategy_names import format_strategy
from vit_scale.data.sources.table_source import Data
from vit_scale.format import significant
from vit_scale.models.interface import ImageModel
from vit_scale.schedule import Plan


@dataclass(frozen=True)
class Description:
    """`rows` for people, `numbers` for machines."""

    rows: dict[str, str]
    numbers: dict[str, Any]
    train_flops_per_image: float
    """FLOPs actually spent on an image in training, forward and backward."""
    flops_by_size: dict[int, float] = field(default_factory=dict)
    """The same for the smaller images of augment.progressive."""


def format_model(name: str, count: ModelCount) -> str:
    """Format as `vit_base_patch16_224 (86,567,656 parameters, 17.56 GMACs per image)`."""
    macs = f"{significant(count.macs / 1e9)} GMACs" if count.macs >= 1e8 else f"{significant(count.macs / 1e6)} MMACs"
    return f"{name} ({count.params:,} parameters, {macs} per image)"


def format_schedule(plan: Plan) -> str:
    """Format as `1,000 steps (10 epochs), 100 warmup steps`."""
    epochs = f" ({plan.epoch(plan.steps):.4g} epochs)" if plan.train_images else ""
    warmup = f", {plan.warmup_steps:,} warmup steps" if plan.warmup_steps else ""
    return f"{plan.steps:,} steps{epochs}{warmup}"


def describe(
    config: Config, plan: Plan, data: Data, model: ImageModel, strategy: str, precision: str, folder: Path
) -> Description:
    """Count the model, and put the plan into words."""
    count = count_model(model, model.img_size, model.in_chans)
    rows = {
        "model": format_model(config.model.name, count),
        "data": data.description,
        "batch size": plan.format_batch_size(),
        "schedule": format_schedule(plan),
        "precision": precision,
        "strategy": format_strategy(strategy, config.parallel.offload),
        "output dir": str(folder),
    }
    numbers = {
        "model": config.model.name,
        "params": count.params,
        "macs": count.macs,
        "strategy": strategy,
        "precision": precision,
        "processes": plan.processes,
        "class_names": list(data.class_names),
    }
    spent = partial(actual_train_flops_per_image, config=config, batch=_rounding_batch(model, config, plan))
    smaller = {side: spent(count.at_size(side)) for _, side in config.augment.progressive}
    return Description(rows, numbers, spent(count), smaller)


def _rounding_batch(model: ImageModel, config: Config, plan: Plan) -> int | None:
    """The batch whose samples stochastic depth rounds up to whole ones; None where it does not, on a CPU."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    return None if on_cpu and not config.parallel.compile else plan.micro_batch


def actual_train_flops_per_image(count: ModelCount, config: Config, batch: int | None) -> float:
    """Return the FLOPs actually executed to train on one image.

    Stochastic depth and patch dropout reduce them, recomputation adds to them.
    """
    return count.train_flops_per_image(
        config.model.drop_path,
        config.model.patch_dropout,
        config.parallel.activation_checkpointing,
        drop_path_schedule=config.model.drop_path_schedule,
        drop_path_mode=config.model.drop_path_mode,
        batch=batch,
    )
