"""Build a run: from options to everything the loop needs, in the order in which errors are cheapest."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vit_scale.checkpoints import reader, run_dir, run_lock
from vit_scale.checkpoints.writer import CheckpointFolder
from vit_scale.config import Config
from vit_scale.cost.activations import Precision
from vit_scale.cost.background_check import BackgroundCheck
from vit_scale.cost.count import count_model
from vit_scale.cost.hardware import limit_threads, peak, resolve_precision
from vit_scale.cost.training import StepCost, training_cost
from vit_scale.data.augment.rand_augment import parse_spec
from vit_scale.data.data import Data, open_data
from vit_scale.data.progressive import make_progressive
from vit_scale.data.sample_images import load_sample_images
from vit_scale.data.sources.streams import StreamSource
from vit_scale.errors import UserError
from vit_scale.kernels import accept_hooks
from vit_scale.launcher import world_size
from vit_scale.models.attention import check_attention_kernel
from vit_scale.models.interface import backbone_of
from vit_scale.models.weights.load import load_weights
from vit_scale.models.weights.whitening import whiten_patches
from vit_scale.record.header import header_rows, run_facts
from vit_scale.record.record import Record, SilentRecord
from vit_scale.record.terminal import Terminal
from vit_scale.record.trackers import check_trackers
from vit_scale.schedule import Plan, make_plan
from vit_scale.strategies.ema import Ema
from vit_scale.strategies.loss_scale import find_loss_scale
from vit_scale.strategies.shards import make_shards
from vit_scale.strategies.strategy import (
    launcher_note,
    make_accelerator,
    on_main,
    resolve_strategy,
    set_micro_batch,
)
from vit_scale.strategies.zero_settings import check_engine
from vit_scale.tasks import task_class
from vit_scale.tasks.task import Task
from vit_scale.train.loaders import make_loaders
from vit_scale.train.micro_batch import (
    choose_micro_batch,
    smallest_of_all,
    surely_fits_in_host_memory,
    trial_on_device,
)
from vit_scale.train.optim.optimizer import build_optimizer, check_optimizer
from vit_scale.train.run import Run
from vit_scale.train.state import TrainState

if TYPE_CHECKING:
    from accelerate import Accelerator

WHITENED_IMAGES = 1000
"""Training images that a whitened patch projection is computed from."""


@dataclass(frozen=True)
class Decided:
    """What was decided from the options, the launcher and the device alone."""

    strategy: str
    precision: Precision
    device: str
    notes: list[str]


@dataclass(frozen=True)
class Opened:
    """The run directory, and the checkpoint to resume from."""

    folder: Path
    checkpoint: Path | None
    notes: list[str]


def build_run(
    config: Config, recipe: str, check: BackgroundCheck | None = None, *, task_type: type[Task] | None = None
) -> Run:
    """Check everything a user can get wrong, then build; raises `UserError` with nothing written.

    `check`: the check against timm that the main process has started. `task_type`: another task than `task.name`.
    """
    decided = _decide(config)
    chosen_task = task_type or task_class(config)
    data = open_data(config.data, chosen_task.make_target(config), seed=config.run.seed)
    plan = make_plan(config, train_images=_train_images(config, data), processes=world_size(), device=decided.device)
    task = chosen_task(config, data.info, plan)
    model, weights_note = _build_model(config, task, data)
    override = launcher_note(config, plan, decided.strategy, decided.precision)
    params = sum(p.numel() for p in model.parameters())
    accelerator = make_accelerator(config, plan, decided.strategy, decided.precision, params=params)
    opened = on_main(lambda: _open_folder(config, recipe, plan))
    plan, batch_note = _settle_micro_batch(config, plan, model, accelerator, decided.precision, opened.checkpoint)
    task.plan = plan
    session = on_main(lambda: secrets.token_hex(4))
    state = _build_state(config, plan, model, accelerator, decided.strategy)
    task.to(accelerator.device, state.input_dtype)
    if opened.checkpoint:
        reader.restore(state, opened.checkpoint)
    cost = _step_cost(config, plan, task, model, accelerator.device)
    terminal = Terminal(enabled=accelerator.is_main_process, steps=plan.steps, metrics=task.metrics)
    for note in filter(None, [*decided.notes, override, weights_note, batch_note, *opened.notes]):
        terminal.info(note)
    backbone, rank = backbone_of(model), accelerator.process_index
    loaders = make_loaders(config, plan, task, data, backbone, step=state.step, rank=rank)
    record = _build_record(config, recipe, plan, task, model, opened.folder, data, decided, cost, state.step, terminal)
    # Now: after the peak was measured, before trackers have threads; the first batches load while trackers start.
    loaders.train.start()
    checkpoints = CheckpointFolder(
        opened.folder,
        keep=config.run.keep,
        rank=accelerator.process_index,
        world=accelerator.num_processes,
        session=session,
        step=state.step,
        seconds_to_wait=config.parallel.timeout_seconds,
    )
    return Run(config, plan, opened.folder, task, accelerator, state, loaders, checkpoints, record, cost, check)


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


def _train_images(config: Config, data: Data) -> int:
    """Return the number of training images; 0 for a stream of unknown length, which needs `schedule.steps`."""
    if isinstance(data.train, StreamSource) and config.schedule.steps is not None:
        return data.train.length or 0
    return len(data.train)


def _build_model(config: Config, task: Task, data: Data) -> tuple[nn.Module, str | None]:
    """Return the model with its initial weights, and a line about weights that were loaded."""
    torch.manual_seed(config.run.seed)
    model = task.build()
    backbone = backbone_of(model)
    note = None if config.model.weights is None else load_weights(backbone, config.model.weights).summary()
    assert task.plan is not None
    task.progressive = make_progressive(config.augment.progressive, task.plan.steps, backbone)
    if config.model.init == "whitened" and config.model.weights is None:
        _whiten(backbone, config, data, task)
    return model, note


def _whiten(backbone: Any, config: Config, data: Data, task: Task) -> None:
    """Compute the patch projection from training images, at their size in the first step; the same on all ranks."""
    if isinstance(data.train, StreamSource):
        raise UserError("model.init = 'whitened': needs images from all of the data, which streaming cannot provide")
    size, channels = backbone.img_size, backbone.in_chans
    images = load_sample_images(data.train, WHITENED_IMAGES, augment=config.augment, img_size=size, in_chans=channels)
    whiten_patches(backbone, task.progressive(task.normalize(images), step=0))


def _open_folder(config: Config, recipe: str, plan: Plan) -> Opened:
    """Choose the run directory and the checkpoint to resume from. An existing run is never overwritten."""
    folder = run_dir.choose_folder(config, recipe)
    if run_dir.has_run(folder):
        run_lock.hold(folder)
    if not run_dir.has_run(folder):
        found, notes = reader.find_checkpoint(config.run.resume, folder)
    elif config.run.resume == "never":
        return Opened(folder, None, [f"The run that was in {folder} is now in {run_dir.set_aside(folder)}."])
    else:
        run_dir.refuse_other_options(folder, config)
        found, notes = reader.find_checkpoint(config.run.resume, folder)
    if found:
        step = reader.read_meta(found)["step"]
        if step >= plan.steps and (run_dir.is_finished(folder) or not run_dir.has_run(folder)):
            raise RunFinished(
                folder,
                f"The run in {folder} is finished: {step:,} of {plan.steps:,} steps are done.\n"
                "A larger schedule goes on from there; run.resume=never starts it anew.",
            )
        notes.append(f"Going on from {found}, after step {step:,} of {plan.steps:,}.")
    return Opened(folder, found, notes)


class RunFinished(Exception):
    """There is nothing left to do in the requested run directory; not an error."""

    def __init__(self, folder: Path, message: str) -> None:
        super().__init__(folder, message)
        self.folder, self.message = folder, message

    def __str__(self) -> str:
        return self.message


def _settle_micro_batch(
    config: Config, plan: Plan, model: Any, accelerator: Accelerator, precision: Precision, found: Path | None
) -> tuple[Plan, str | None]:
    """The plan with the micro batch that is used, recorded or tried, and a line where it is not what was asked for.

    On a CPU one size is about as fast as another, so `auto` keeps the plan's and nothing is tried while it surely fits.
    """
    device, note = accelerator.device, None
    recorded = reader.read_meta(found)["plan"] if found else {}
    if config.batch.micro == "auto" and recorded.get("processes") == plan.processes:
        plan = plan.with_micro_batch(recorded["micro_batch"])
    elif device.type == "cuda" or not surely_fits_in_host_memory(config, model, plan.micro_batch, precision):
        even = bool(config.augment.mixup or config.augment.cutmix)
        asked = plan.micro_batch if device.type == "cpu" else config.batch.micro
        trial = trial_on_device(model.to(device), device, precision)
        micro, note = choose_micro_batch(asked, plan.global_batch // plan.processes, trial, even=even)
        plan = plan.with_micro_batch(smallest_of_all(micro, device))
    set_micro_batch(accelerator, plan)
    return plan, note


def _build_state(config: Config, plan: Plan, model: Any, accelerator: Accelerator, strategy: str) -> TrainState:
    optimizer = build_optimizer(model.to(accelerator.device), config.optim)
    if config.parallel.compile:
        model.compile_blocks()
    model.set_activation_checkpointing(config.parallel.activation_checkpointing)
    with accept_hooks(model):
        wrapped, optimizer = wrap(model, optimizer, accelerator)
    shards = make_shards(model, wrapped, optimizer, strategy)
    ema = Ema(shards, config.ema.decay, config.ema.warmup) if config.ema.decay else None
    zeros = [torch.zeros((), device=accelerator.device) for _ in range(2)]
    dtype = next(model.parameters()).dtype
    scale = find_loss_scale(accelerator.scaler, getattr(wrapped, "optimizer", None))
    if strategy.startswith("zero"):
        check_engine(wrapped, config, plan)
    return TrainState(
        model, wrapped, optimizer, shards, ema, dtype, bad_steps=zeros[0], bad_in_a_row=zeros[1], loss_scale=scale
    )


def wrap(
    model: nn.Module, optimizer: torch.optim.Optimizer, accelerator: Accelerator
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """What to call in the forward pass, and the optimiser whose groups have the learning rate.

    Outside DeepSpeed the optimiser stays bare: accelerate's wrapper would hide the attributes of fused kernels. So does
    the model of a single process in fp32: there is nothing to wrap, but accelerate would import DTensor to see (0.7 s).
    """
    if accelerator.distributed_type.value == "DEEPSPEED":
        return accelerator.prepare(model, optimizer)
    if accelerator.distributed_type.value == "NO" and accelerator.mixed_precision == "no":
        return model, optimizer
    return accelerator.prepare(model), optimizer


def _step_cost(config: Config, plan: Plan, task: Task, model: nn.Module, device: torch.device) -> StepCost:
    # On a CPU stochastic depth computes exactly the samples it keeps; elsewhere it rounds up to whole ones.
    batch = None if device.type == "cpu" and not config.parallel.compile else plan.micro_batch
    parts = task.cost_parts(model)
    sizes: list[int | None] = [None, *(side for _, side in config.augment.progressive)]
    flops = {side: training_cost(parts, config, batch=batch, side=side).total for side in sizes}
    limit_threads(flops[None] * plan.micro_batch)  # before the peak of a CPU is measured
    return StepCost(flops, plan.global_batch, plan.processes, peak(device))


def _build_record(
    config: Config,
    recipe: str,
    plan: Plan,
    task: Task,
    model: nn.Module,
    folder: Path,
    data: Data,
    decided: Decided,
    cost: StepCost,
    step: int,
    terminal: Terminal,
) -> SilentRecord:
    """Print the header and open the record, on the main rank."""
    if not terminal.enabled:
        return SilentRecord(terminal)
    count = count_model(model)
    how: dict[str, Any] = {"strategy": decided.strategy, "precision": decided.precision, "peak": cost.peak}
    rows = header_rows(config, plan, count, data=data.description, folder=folder, **how)
    terminal.table(f"Training {recipe}", rows)
    run_dir.write_config(folder, config)
    facts = run_facts(config, plan, count, task, **how)
    return Record(folder, config, step=step, facts=facts, terminal=terminal)
