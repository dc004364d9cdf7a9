"""Build a run: from options to everything the loop needs, in the order in which errors are cheapest."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vit_scale.checkpoints.final_weights import rename_final_weights
from vit_scale.checkpoints.reader import Checkpoint
from vit_scale.checkpoints.writer import CheckpointFolder
from vit_scale.config import Config
from vit_scale.cost.activations import Precision
from vit_scale.cost.background_check import BackgroundCheck
from vit_scale.cost.count import count_trained
from vit_scale.cost.hardware import peak
from vit_scale.cost.training import StepCost, training_cost
from vit_scale.data.augment.rand_augment import parse_spec
from vit_scale.data.class_balance import class_balance
from vit_scale.data.data import Data, open_data
from vit_scale.data.eval_images import limit_images
from vit_scale.data.loading.workers import choose_workers
from vit_scale.data.progressive import make_progressive
from vit_scale.data.sample_images import load_sample_images
from vit_scale.data.sources.streams import StreamSource, count_images
from vit_scale.errors import UserError
from vit_scale.kernels.cpu import limit_threads
from vit_scale.kernels.forked_memory import release_in_workers
from vit_scale.launcher import is_main_process, world_size
from vit_scale.models.attention import check_attention_kernel
from vit_scale.models.interface import backbone_of
from vit_scale.models.weights.freeze import untrained_backbone_warning
from vit_scale.models.weights.whitening import whiten_patches
from vit_scale.probe.periodic import KNN_TOP1, knn_images
from vit_scale.record.header import header_rows, run_facts
from vit_scale.record.record import Record, SilentRecord, Start
from vit_scale.record.terminal import Terminal
from vit_scale.record.trackers import check_trackers
from vit_scale.schedule import Plan, make_plan, scaling_note, with_decisions
from vit_scale.strategies.precision import resolve_precision
from vit_scale.strategies.processes import call_on_main, own_cores, own_device
from vit_scale.strategies.strategy import Strategy, make_strategy, override_warning, resolve_strategy
from vit_scale.tasks import task_class
from vit_scale.tasks.task import Task
from vit_scale.train.build_state import build_model, build_state
from vit_scale.train.loaders import make_loaders
from vit_scale.train.micro_batch import memory_basis, recorded_micro_batch, resolve_micro_batch
from vit_scale.train.open_run import open_run, write_config
from vit_scale.train.optim.optimizer import check_optimizer
from vit_scale.train.run import Run
from vit_scale.train.state import TrainState

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
    config: Config,
    recipe: str,
    check: BackgroundCheck | None = None,
    *,
    task_type: type[Task] | None = None,
    terminal: Terminal | None = None,
) -> Run:
    """Check everything a user can get wrong, then build; raises `UserError` before anything is written to the run.

    `check`: the check against timm that the main process has started. `task_type`: another task than `task.name`.
    `terminal`: shows what is in progress.
    """
    terminal = terminal or Terminal(enabled=is_main_process())
    with terminal.phase("Checking the options") as phase:
        decided = _decide(config)
        chosen_task = task_type or task_class(config)
        phase.next("Opening the data")
        data = _open_data(config, chosen_task)
        task, plan = _make_task(config, chosen_task, data, decided.device)
        notes = [*decided.notes, *data.notes, scaling_note(config, plan)]
        config = with_decisions(config, plan)
        notes.append(override_warning(config, plan, decided.strategy, decided.precision))
        phase.next("Connecting the processes")
        strategy = make_strategy(config, plan, decided.strategy, decided.precision)
        phase.next("Loading the weights" if config.model.weights else "Building the model")
        model, weights_note = _build_model(config, task, data, strategy)
        phase.next("Checking for checkpoints")
        opened = call_on_main(lambda: open_run(config, recipe, plan, task.describe()))
        phase.next("Choosing the micro-batch")
        basis = call_on_main(lambda: memory_basis(config, plan, strategy, decided.precision))
        recorded = recorded_micro_batch(opened.checkpoint, basis) if config.batch.micro == "auto" else None
        state, plan, batch_note = _build_state(config, plan, task, model, strategy, recorded, decided)
        release_in_workers(state)
        if opened.checkpoint:
            phase.next("Reading the checkpoint")
            state.restore(Checkpoint(opened.checkpoint))
        task.precompute(data, workers=choose_workers(config.data, own_cores(), data.train))
        phase.next("Preparing the first batches")
        cost = _step_cost(config, plan, task, model, strategy.device, decided.precision)
        where: dict[str, Any] = {"step": state.step, "rank": strategy.rank, "precision": decided.precision}
        loaders = make_loaders(config, plan, task, data, backbone_of(model), **where)
        notes += [weights_note, untrained_backbone_warning(config.model.freeze, config.model.weights), batch_note]
        for note in filter(None, [*notes, *opened.messages]):
            terminal.info(note)
        checkpoints = _checkpoint_folder(config, opened.run_dir, strategy, step=state.step)
        record = SilentRecord(terminal)
        run = Run(config, plan, opened.run_dir, task, state, loaders, checkpoints, record, cost, check, basis)
        if terminal.enabled:
            run.record = _open_record(run, decided, data, is_rollback=opened.is_rollback)
        # Now: after the peak was measured, before trackers have threads; the first batches load while trackers start.
        loaders.train.start()
    return run


def _checkpoint_folder(config: Config, run_dir: Path, strategy: Strategy, *, step: int) -> CheckpointFolder:
    """Return what writes the checkpoints of a run that starts or resumes at `step`."""
    folder = CheckpointFolder(
        run_dir,
        keep=config.run.keep,
        rank=strategy.rank,
        world=strategy.world,
        session=call_on_main(lambda: secrets.token_hex(4)),
        step=step,
        timeout_seconds=config.parallel.timeout_seconds,
    )
    release_in_workers(folder)
    return folder


def _build_state(
    config: Config,
    plan: Plan,
    task: Task,
    model: nn.Module,
    strategy: Strategy,
    recorded: int | None,
    decided: Decided,
) -> tuple[TrainState, Plan, str | None]:
    """Return the training state, the plan with the micro-batch to use, and a message if it is not the requested one.

    `recorded`: the micro-batch of an earlier launch that applies to this one.
    """
    if recorded is not None:
        plan = plan.with_micro_batch(recorded)
    state = build_state(model, strategy, config, plan)
    task.to(strategy.device, state.engine.input_dtype)
    note = None
    if recorded is None:
        plan, note = resolve_micro_batch(config, plan, task, state.engine, decided.precision)
    task.plan = plan
    return state, plan, note


def _decide(config: Config) -> Decided:
    """Check what can be known to be wrong before anything is read."""
    device = own_device()
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


def _open_data(config: Config, task: type[Task]) -> Data:
    """Open the images that the run trains and evaluates on."""
    data = open_data(config.data, task.make_target(config), seed=config.run.seed)
    class_balance(config.data, data.train)  # raises `UserError` if there are no classes
    knn_images(config, data)  # raises `UserError` if there are no labels
    note = None if config.optim.class_weights else data.imbalance_note
    return replace(data, val=limit_images(data.val, config.run.eval_images), imbalance_note=note)


def _make_task(config: Config, task_type: type[Task], data: Data, device: str) -> tuple[Task, Plan]:
    """Return the prepared task and its plan, whose default micro-batch only an instance of the task determines."""
    sizes: dict[str, Any] = {"train_images": _train_images(config, data), "processes": world_size(), "device": device}
    task = task_type(config, data.info, make_plan(config, **sizes))
    task.plan = plan = make_plan(config, **sizes, multiple=task.multiple)
    task.further_metrics = () if config.run.probe_every is None else (KNN_TOP1,)
    task.prepare(data)
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


def _step_cost(
    config: Config, plan: Plan, task: Task, model: nn.Module, device: torch.device, precision: Precision
) -> StepCost:
    # On a CPU stochastic depth computes exactly the samples it keeps; elsewhere it rounds up to whole ones.
    batch = None if device.type == "cpu" and not config.parallel.compile else plan.micro_batch
    parts = task.cost_parts(model)
    sizes: list[int | None] = [None, *(side for _, side in config.augment.progressive)]
    costs = {side: training_cost(parts, config, batch=batch, side=side) for side in sizes}
    flops = {side: cost.total for side, cost in costs.items()}
    limit_threads(flops[None] * plan.micro_batch)  # before the peak of a CPU is measured
    reference = peak(device, precision, tf32=config.parallel.tf32)
    return StepCost(flops, plan.global_batch, plan.processes, reference, costs[None].of_frozen)


def _open_record(run: Run, decided: Decided, data: Data, *, is_rollback: bool) -> Record:
    """Print the header, write config.yaml and open the record."""
    count, terminal, state = count_trained(run.state.model), run.record.terminal, run.state
    how: dict[str, Any] = {"strategy": decided.strategy, "precision": decided.precision, "peak": run.cost.peak}
    about = {"data": data.description, **data.details}
    terminal.rows(header_rows(run.config, run.plan, count, run.task, data=about, folder=run.folder, **how))
    write_config(run.folder, run.config)
    if is_rollback:
        rename_final_weights(run.folder)
    images = {"train": count_images(data.train), "val": count_images(data.val)}
    facts = run_facts(run.config, run.plan, count, run.task, images=images, **how) | run.best_facts()
    start = Start(state.step, state.evaluated, is_rollback)
    return Record(run.folder, run.config, start=start, facts=facts, terminal=terminal)
