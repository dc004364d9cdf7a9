"""Build a run: from options to everything the loop needs, in the order in which errors are cheapest."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vit_scale.checkpoints.find import read_meta
from vit_scale.checkpoints.reader import Checkpoint
from vit_scale.checkpoints.writer import CheckpointFolder
from vit_scale.config import Config
from vit_scale.cost.activations import Precision
from vit_scale.cost.background_check import BackgroundCheck
from vit_scale.cost.count import count_trained
from vit_scale.cost.hardware import peak
from vit_scale.cost.training import StepCost, training_cost
from vit_scale.data.augment.rand_augment import parse_spec
from vit_scale.data.data import Data, open_data
from vit_scale.data.progressive import make_progressive
from vit_scale.data.sample_images import load_sample_images
from vit_scale.data.sources.streams import StreamSource
from vit_scale.errors import UserError
from vit_scale.kernels.cpu import limit_threads
from vit_scale.launcher import world_size
from vit_scale.models.attention import check_attention_kernel
from vit_scale.models.interface import backbone_of
from vit_scale.models.weights.whitening import whiten_patches
from vit_scale.record.header import header_rows, run_facts
from vit_scale.record.record import Record, SilentRecord
from vit_scale.record.terminal import Terminal
from vit_scale.record.trackers import check_trackers
from vit_scale.schedule import Plan, make_plan
from vit_scale.strategies.precision import resolve_precision
from vit_scale.strategies.processes import call_on_main
from vit_scale.strategies.strategy import Strategy, make_strategy, override_warning, resolve_strategy
from vit_scale.tasks import task_class
from vit_scale.tasks.task import Task
from vit_scale.train.build_state import build_model, build_state
from vit_scale.train.loaders import make_loaders
from vit_scale.train.micro_batch import resolve_micro_batch
from vit_scale.train.open_run import open_run, write_config
from vit_scale.train.optim.optimizer import check_optimizer
from vit_scale.train.run import Run

WHITENED_IMAGES = 1000
"""Training images that a whitened patch projection is computed from."""


@dataclass(frozen=True)
class Decided:
    """What was decided from the options, the launcher and the device alone."""

    strategy: str
    precision: Precision
    device: str
    notes: list[str]


def build_run(
    config: Config, recipe: str, check: BackgroundCheck | None = None, *, task_type: type[Task] | None = None
) -> Run:
    """Check everything a user can get wrong, then build; raises `UserError` before anything is written to the run.

    `check`: the check against timm that the main process has started. `task_type`: another task than `task.name`.
    """
    decided = _decide(config)
    chosen_task = task_type or task_class(config)
    data = open_data(config.data, chosen_task.make_target(config), seed=config.run.seed)
    task, plan = _make_task(config, chosen_task, data, decided.device)
    override = override_warning(config, plan, decided.strategy, decided.precision)
    strategy = make_strategy(config, plan, decided.strategy, decided.precision)
    model, weights_note = _build_model(config, task, data, strategy)
    opened = call_on_main(lambda: open_run(config, recipe, plan, task.describe()))
    recorded = read_meta(opened.checkpoint)["plan"] if opened.checkpoint else {}
    is_recorded = config.batch.micro == "auto" and recorded.get("processes") == plan.processes
    if is_recorded:
        plan = plan.with_micro_batch(recorded["micro_batch"])
    state = build_state(model, strategy, config, plan)
    task.to(strategy.device, state.engine.input_dtype)
    batch_note = None
    if not is_recorded:
        plan, batch_note = resolve_micro_batch(config, plan, task, state.engine, decided.precision)
    task.plan = plan
    session = call_on_main(lambda: secrets.token_hex(4))
    if opened.checkpoint:
        state.restore(Checkpoint(opened.checkpoint))
    cost = _step_cost(config, plan, task, model, strategy.device)
    backbone = backbone_of(model)
    loaders = make_loaders(config, plan, task, data, backbone, step=state.step, rank=strategy.rank)
    terminal = Terminal(enabled=strategy.rank == 0, steps=plan.steps, metrics=task.metrics)
    for note in filter(None, [*decided.notes, override, weights_note, batch_note, *opened.messages]):
        terminal.info(note)
    checkpoints = CheckpointFolder(
        opened.run_dir,
        keep=config.run.keep,
        rank=strategy.rank,
        world=strategy.world,
        session=session,
        step=state.step,
        timeout_seconds=config.parallel.timeout_seconds,
    )
    record = SilentRecord(terminal)
    run = Run(config, plan, opened.run_dir, task, state, loaders, checkpoints, record, cost, check)
    if terminal.enabled:
        run.record = _open_record(run, recipe, decided, data)
    # Now: after the peak was measured, before trackers have threads; the first batches load while trackers start.
    loaders.train.start()
    return run


def _decide(config: Config) -> Decided:
    """Check what can be known to be wrong before anything is read."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    strategy, note = resolve_strategy(config.parallel.strategy)
    check_optimizer(config.optim.name, strategy)
    check_trackers(config.track.trackers)
    parse_spec(config.augment)
    precision = resolve_precision(config.parallel.precision, device)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    check_attention_kernel(config.model.kernel, device, dtype=dtype, bias=config.model.pos_embed == "relative")
    torch.set_float32_matmul_precision("high" if config.parallel.tf32 else "highest")
    if torch.are_deterministic_algorithms_enabled() != config.parallel.deterministic:
        torch.use_deterministic_algorithms(config.parallel.deterministic)  # Imports the compiler: 1.5 s.
    return Decided(strategy, precision, device.type, [note] if note else [])


def _make_task(config: Config, task_type: type[Task], data: Data, device: str) -> tuple[Task, Plan]:
    """Return the task and its plan, whose default micro-batch only an instance of the task determines."""
    sizes: dict[str, Any] = {"train_images": _train_images(config, data), "processes": world_size(), "device": device}
    task = task_type(config, data.info, make_plan(config, **sizes))
    task.plan = plan = make_plan(config, **sizes, multiple=task.multiple)
    return task, plan


def _train_images(config: Config, data: Data) -> int:
    """Return the number of training images; 0 for a stream of unknown length, which needs `schedule.steps`."""
    if isinstance(data.train, StreamSource) and config.schedule.steps is not None:
        return data.train.length or 0
    return len(data.train)


def _build_model(config: Config, task: Task, data: Data, strategy: Strategy) -> tuple[nn.Module, str | None]:
    """Return the model with its initial weights, and a line about weights that were loaded."""
    model, note = build_model(task, strategy, config)
    backbone = backbone_of(model)
    assert task.plan is not None
    task.progressive = make_progressive(config.augment.progressive, task.plan.steps, backbone)
    if config.model.init == "whitened" and config.model.weights is None:
        _whiten(backbone, config, data, task, strategy)
    return model, note


def _whiten(backbone: Any, config: Config, data: Data, task: Task, strategy: Strategy) -> None:
    """Compute the patch projection from training images, at their size in the first step; the same on all ranks."""
    if isinstance(data.train, StreamSource):
        raise UserError("model.init = 'whitened': needs images from all of the data, which streaming cannot provide")
    size, channels = backbone.img_size, backbone.in_chans
    images = load_sample_images(data.train, WHITENED_IMAGES, augment=config.augment, img_size=size, in_chans=channels)
    whiten_patches(backbone, task.progressive(task.normalize(images), step=0), strategy.editing)


def _step_cost(config: Config, plan: Plan, task: Task, model: nn.Module, device: torch.device) -> StepCost:
    # On a CPU stochastic depth computes exactly the samples it keeps; elsewhere it rounds up to whole ones.
    batch = None if device.type == "cpu" and not config.parallel.compile else plan.micro_batch
    parts = task.cost_parts(model)
    sizes: list[int | None] = [None, *(side for _, side in config.augment.progressive)]
    flops = {side: training_cost(parts, config, batch=batch, side=side).total for side in sizes}
    limit_threads(flops[None] * plan.micro_batch)  # before the peak of a CPU is measured
    return StepCost(flops, plan.global_batch, plan.processes, peak(device))


def _open_record(run: Run, recipe: str, decided: Decided, data: Data) -> Record:
    """Print the header, write config.yaml and open the record."""
    count, terminal = count_trained(run.state.model), run.record.terminal
    how: dict[str, Any] = {"strategy": decided.strategy, "precision": decided.precision, "peak": run.cost.peak}
    rows = header_rows(run.config, run.plan, count, data=data.description, folder=run.folder, **how)
    terminal.table(f"Training {recipe}", rows)
    write_config(run.folder, run.config)
    facts = run_facts(run.config, run.plan, count, run.task, **how)
    return Record(run.folder, run.config, step=run.state.step, facts=facts, terminal=terminal)
