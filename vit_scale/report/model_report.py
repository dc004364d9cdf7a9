"""All numbers for one model under the options of a run, as plain data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn

from vit_scale.config import Config
from vit_scale.cost.activations import Activations, Precision
from vit_scale.cost.count import ModelCount, count_trained
from vit_scale.cost.memory import States, Strategy, optimizer_moments, states_by_strategy
from vit_scale.cost.meta import build_on_meta
from vit_scale.cost.trace import stage_names
from vit_scale.cost.training import (
    AttentionSaving,
    CostPart,
    attention_saving,
    frozen_bytes,
    training_activations,
    training_cost,
)
from vit_scale.data.batch import DataInfo
from vit_scale.models.interface import backbone_of
from vit_scale.models.variants import TIMM_PREFIX, resolve_variant
from vit_scale.tasks import task_class
from vit_scale.tasks.distill.source import find_teacher
from vit_scale.tasks.task import Task


@dataclass(frozen=True)
class Assumed:
    """Assumptions behind the numbers for training."""

    gpus: int
    batch: int | None
    """Batch size per GPU; None: memory excludes activations."""
    precision: Precision
    optimizer: str
    ema: bool
    drop_path: float
    drop_path_mode: str
    patch_dropout: float
    activation_checkpointing: str
    freeze: str | int

    def describe(self) -> str:
        """Describe the assumptions on one line."""
        words = [f"{self.gpus} GPUs" if self.gpus > 1 else "1 GPU", self.precision, self.optimizer]
        words.append("with EMA" if self.ema else "without EMA")
        words.append(f"with activations of {self.batch} images" if self.batch else "without activations")
        if self.drop_path:
            words.append(f"drop path {self.drop_path:g} ({self.drop_path_mode})")
        if self.patch_dropout:
            words.append(f"patch dropout {self.patch_dropout:g}")
        if self.activation_checkpointing != "none":
            words.append(f"{self.activation_checkpointing} activation checkpointing")
        if self.freeze != "none":
            words.append("everything but the head frozen" if self.freeze == "all" else f"{self.freeze} blocks frozen")
        return ", ".join(words)


@dataclass(frozen=True)
class ModelReport:
    """Counts are exact; memory is estimated (see cost/memory.py and cost/activations.py)."""

    model: str
    recipe: str | None
    image_size: tuple[int, int]
    patch_size: tuple[int, int] | None
    classes: int
    count: ModelCount
    cost_parts: tuple[CostPart, ...]
    """What training runs, by the task: the model, and perhaps a decoder or a teacher."""
    train_flops_by_part: dict[str, float]
    """FLOPs executed per training image, by part of the task."""
    activations: Activations
    attention: AttentionSaving | None
    """What the kind of attention saves; None with full attention."""
    memory: dict[Strategy, dict[str, int]]
    """Bytes per GPU: strategy -> part -> bytes; includes activations if the batch size is known."""
    assumed: Assumed
    multiple: int
    """Micro-batches are a multiple of this, if possible."""

    @property
    def train_flops(self) -> float:
        """FLOPs executed per training image."""
        return sum(self.train_flops_by_part.values())

    def memory_total(self, strategy: Strategy) -> int:
        """Return the total bytes per GPU."""
        return sum(self.memory[strategy].values())

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain numbers, strings, lists and mappings, with units in the names."""
        count = self.count
        memory = {strategy: {**parts, "total": self.memory_total(strategy)} for strategy, parts in self.memory.items()}
        return {
            "model": self.model,
            "recipe": self.recipe,
            "image_size": list(self.image_size),
            "patch_size": None if self.patch_size is None else list(self.patch_size),
            "classes": self.classes,
            "counted": count.method,
            "params": count.params,
            "params_trained": count.trained_params,
            "params_by_part": count.params_by_part,
            "macs_torchvision": count.macs,
            "macs_timm_csv": count.macs_timm_csv,
            "flops_torch": count.flops,
            "macs_by_part": count.macs_by_part,
            "attention_fraction": count.attention_fraction,
            "quadratic_fraction": count.quadratic_fraction,
            "attention": None if self.attention is None else dataclasses.asdict(self.attention),
            "train_flops_per_image_nominal": count.nominal_train_flops_per_image,
            "train_flops_per_image_actual": self.train_flops,
            "train_flops_per_image_by_part": self.train_flops_by_part,
            "activation_bytes_per_image": self.activations.total,
            "activation_bytes_by_part": self.activations.by_part,
            "activation_bytes_recomputed": self.activations.recomputed,
            "memory_bytes_per_gpu": memory,
            "assumed": dataclasses.asdict(self.assumed),
        }


def report_on(
    config: Config,
    *,
    gpus: int = 8,
    batch: int | None = None,
    recipe: str | None = None,
    task_type: type[Task] | None = None,
    on_cpu: bool = False,
) -> ModelReport:
    """Count the model of `config` on the meta device, and what training it on its task takes.

    `task_type`: another task than `task.name`. `on_cpu`: whether a CPU trains.
    """
    task = _task_without_data(config, task_type or task_class(config))
    trained = build_on_meta(task.build)
    parts = task.cost_parts(trained)
    model = backbone_of(trained)
    assumed = _assumed(config, gpus, batch)
    activations = training_activations(parts, config, assumed.precision, on_cpu=on_cpu)
    return ModelReport(
        model=config.model.name,
        recipe=recipe,
        image_size=model.img_size,  # type: ignore[arg-type]
        patch_size=model.patch_size,  # type: ignore[arg-type]
        classes=model.num_classes,  # type: ignore[arg-type]
        count=count_trained(trained),
        cost_parts=tuple(parts),
        train_flops_by_part=training_cost(parts, config, batch=assumed.batch).flops,
        activations=activations,
        attention=attention_saving(parts, config, assumed.precision, on_cpu=on_cpu),
        memory=_memory(config, trained, parts, assumed, activations),
        assumed=assumed,
        multiple=task.multiple,
    )


def _assumed(config: Config, gpus: int, batch: int | None) -> Assumed:
    precision = config.parallel.precision
    return Assumed(
        gpus=gpus,
        batch=batch if batch is not None else None if config.batch.micro == "auto" else config.batch.micro,
        precision="bf16" if precision == "auto" else precision,
        optimizer=config.optim.name,
        ema=config.ema.decay > 0,
        drop_path=config.model.drop_path,
        drop_path_mode=config.model.drop_path_mode,
        patch_dropout=config.model.patch_dropout,
        activation_checkpointing=config.parallel.activation_checkpointing,
        freeze=config.model.freeze,
    )


def _task_without_data(config: Config, task_type: type[Task]) -> Task:
    """Return the task of a recipe whose data is not opened.

    Missing numbers are those of the model's own table; a student has the classes and channels of its teacher.
    """
    model = dataclasses.replace(config.model, weights=None, kernel="auto")
    classes, channels = 1000, 3
    if not model.name.startswith(TIMM_PREFIX):
        variant = resolve_variant(model)
        classes, channels = variant.num_classes, variant.in_chans
    if config.distill.teacher is not None:
        teacher = find_teacher(config, num_classes=model.num_classes or classes, in_chans=model.in_chans or channels)
        classes, channels = teacher.num_classes, teacher.in_chans
    names = tuple(map(str, range(classes if model.num_classes is None else model.num_classes)))
    return task_type(dataclasses.replace(config, model=model), DataInfo(0, model.in_chans or channels, names))


def _memory(
    config: Config, model: nn.Module, parts: list[CostPart], assumed: Assumed, activations: Activations
) -> dict[Strategy, dict[str, int]]:
    states = States(
        params=sum(p.numel() for p in model.parameters()),
        frozen=sum(p.numel() for p in model.parameters() if not p.requires_grad),
        gpus=assumed.gpus,
        precision=assumed.precision,
        moments=optimizer_moments(config.optim.name, config.optim.momentum),
        ema=assumed.ema,
        largest_block=max(sum(p.numel() for p in stage.parameters()) for stage in _stages(model)),
    )
    memory = states_by_strategy(states)
    frozen = frozen_bytes(parts, assumed.precision)
    for sizes in memory.values():
        if frozen:
            sizes["frozen"] = frozen
        if assumed.batch is not None:
            sizes["activations"] = assumed.batch * activations.total
    return memory


def _stages(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model, with the blocks of each part of a composite one by one."""
    parts = [model] if backbone_of(model) is model else list(model.children())
    return [stage for part in parts for stage in map(part.get_submodule, stage_names(part) or [""])]
