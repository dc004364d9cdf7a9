"""Shorten a recipe to a few steps that this system can take, and replace what is not on it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import psutil

from vit_scale.config import BatchConfig, Config, ScheduleConfig, TrackConfig
from vit_scale.cost.training import training_cost
from vit_scale.errors import UserError
from vit_scale.format import memory_size
from vit_scale.hub import has_weights, is_hub_reachable
from vit_scale.models.weights.read import is_hub_name
from vit_scale.plan.data_size import DataSize, counted_size, open_without_download, recorded_size
from vit_scale.report.model_report import report_on
from vit_scale.schedule import DEFAULT_MICRO_BATCH, Plan

DEFAULT_STEPS = 20
CPU_STEP_SECONDS = 2.0
"""A micro-batch on a CPU is reduced until a step is expected to take at most this long."""
GPU_BATCH = 512
"""Most images per GPU and step; fewer accumulation steps than the recipe measure the same."""
EVAL_RATIO = 4
SYNTHETIC_IMAGES = 4096
CPU_FLOPS = 1e11
"""Assumed training FLOP/s of a CPU."""


def replace_missing_data(config: Config) -> tuple[Config, DataSize, str | None]:
    """Return options whose data are on this system, the size of the real data, and a note if they are synthetic.

    Nothing is downloaded: a Hub dataset that is not in the local cache is replaced by synthetic images of the same
    number of channels and classes. Images are streamed only if the recipe streams them.
    """
    try:
        return config, counted_size(open_without_download(config)), None
    except UserError as error:
        size = recorded_size(config)
        reason = str(error).splitlines()[0].removeprefix(f"data.source={config.data.source}: ").rstrip(".")
    synthetic = dataclasses.replace(
        config.data,
        source="synthetic",
        synthetic_classes=size.classes,
        synthetic_chans=size.channels,
        synthetic_size=_synthetic_side(config),
        synthetic_images=max(SYNTHETIC_IMAGES, size.classes),
        streaming=False,
        cache="none",
        train_split="train",
        val_split=None,
    )
    note = f"synthetic images instead of {config.data.source} ({reason})"
    return dataclasses.replace(config, data=synthetic), size, note


def replace_missing_weights(config: Config) -> tuple[Config, str | None]:
    """Return options without `model.weights` that are not on this system and cannot be downloaded, and a note."""
    weights = config.model.weights
    if weights is None:
        return config, None
    found = (has_weights(weights) or is_hub_reachable()) if is_hub_name(weights) else Path(weights).exists()
    if found:
        return config, None
    return (
        dataclasses.replace(config, model=dataclasses.replace(config.model, weights=None)),
        f"random instead of {weights}, which is not on this system",
    )


def replace_missing_teacher(config: Config, directory: Path) -> tuple[Config, str | None]:
    """Return options without a published teacher that is not on this system and cannot be downloaded, and a note.

    A file in `directory`, which belongs to this rank, with random weights of the same model takes its place.
    """
    teacher = config.distill.teacher
    if teacher is None or not is_hub_name(teacher) or has_weights(teacher) or is_hub_reachable():
        return config, None
    import torch
    from safetensors.torch import save_file

    from vit_scale.models.create import construct_model
    from vit_scale.tasks.distill.source import find_teacher

    torch.manual_seed(0)
    model = construct_model(find_teacher(config, num_classes=0, in_chans=0).model)
    path = directory / "teacher.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path)
    distill = dataclasses.replace(config.distill, teacher=str(path), teacher_model=teacher)
    return dataclasses.replace(config, distill=distill), f"random instead of {teacher}, which is not on this system"


def shorten(config: Config, plan: Plan, *, steps: int, images: int, run_dir: str) -> Config:
    """Return options for `steps` steps of `images` images per process in `run_dir`, with the schedule in proportion.

    `plan`: of the whole run.
    """
    schedule = ScheduleConfig(
        steps=steps,
        warmup_steps=_warmup_steps(config, plan, steps),
        shape=config.schedule.shape,
        final_lr=config.schedule.final_lr,
    )
    micro, evaluated = config.batch.micro, config.batch.eval
    batch = BatchConfig(
        **{"global": images * plan.processes},
        micro=micro if micro == "auto" else min(micro, images),
        # A model for which a step has few images evaluates few at a time.
        eval=min(plan.eval_batch, EVAL_RATIO * images) if evaluated == "auto" else evaluated,
    )
    return dataclasses.replace(
        config,
        schedule=schedule,
        batch=batch,
        augment=dataclasses.replace(config.augment, no_mix_epochs=0.0),
        run=dataclasses.replace(config.run, dir=run_dir, resume="never", keep=1, probe_every=None),
        track=TrackConfig(wandb="disabled", images="never"),
    )


def _warmup_steps(config: Config, plan: Plan, steps: int) -> int:
    """Return as large a fraction of `steps` as in the whole run."""
    schedule = config.schedule
    # If the number of steps is unknown, the fraction is not.
    by_epochs = (schedule.warmup_epochs or 0) / (schedule.epochs or 1)
    fraction = plan.warmup_steps / plan.steps if plan.steps else by_epochs
    return min(steps, math.ceil(fraction * steps))


def images_per_process(config: Config, plan: Plan, *, device: str) -> int:
    """Return how many images a process takes per step: a divisor of its part of the global batch.

    On a GPU this is at most GPU_BATCH. On a CPU it is a micro-batch whose step takes seconds, by the model's FLOPs. No
    measurement enters: all ranks must choose the same number before they can communicate.
    """
    local = plan.global_batch // plan.processes
    most = GPU_BATCH
    report = report_on(config)
    if device == "cpu":
        flops = training_cost(list(report.cost_parts), config, batch=None).total
        most = DEFAULT_MICRO_BATCH["cpu"] if config.batch.micro == "auto" else config.batch.micro
        most = min(most, int(CPU_STEP_SECONDS * CPU_FLOPS / plan.processes / flops))
    divisors = [size for size in range(1, local + 1) if local % size == 0 and size % report.multiple == 0] or [local]
    return max((size for size in divisors if size <= most), default=divisors[0])


def check_host_memory(config: Config, world: int) -> None:
    """Raise `UserError` if weights, optimizer state and the copy for a checkpoint do not fit in the free memory.

    Without it a CPU would swap, or the system would end the process, and perhaps others.
    """
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, precision="fp32"))
    report = report_on(config, gpus=world)
    strategy = "ddp" if config.parallel.strategy == "auto" else config.parallel.strategy
    states = report.memory[strategy]
    checkpoint = sum(states[part] for part in ("weights", "optimizer", "ema"))
    needed, free = world * (sum(states.values()) + checkpoint), psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            f"--try: {config.model.name} needs about {memory_size(needed)} of host memory for weights, optimizer state "
            f"and a checkpoint, of which {memory_size(free)} is free.\n"
            "Try it on a system with more memory, or with a smaller model.name."
        )


def _synthetic_side(config: Config) -> int:
    """Return the side of images that are larger than the model's input, like photographs; the same if it is small."""
    side = max(report_on(config).image_size)
    return round(side * 256 / 224) if side >= 64 else side
