"""Building a run: from options to everything the loop needs, in the order in which mistakes are cheapest."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from vit_scale.checkpoints.find import read_meta
from vit_scale.checkpoints.reader import Checkpoint
from vit_scale.checkpoints.writer import CheckpointFolder
from vit_scale.config import Config
from vit_scale.cost.activations import Precision
from vit_scale.cost.background_check import CheckAside
from vit_scale.cost.hardware import Peak, peak
from vit_scale.data.augment.rand_augment import parse_spec
from vit_scale.data.loading.loaders import Batch, EvalLoader, TrainLoader, choose_workers
from vit_scale.data.mixing import Mixing
from vit_scale.data.normalize import Normalize, Values, resolve_normalization
from vit_scale.data.progressive import Progressive, make_progressive
from vit_scale.data.sample_images import glance
from vit_scale.data.sources.cache import with_cache
from vit_scale.data.sources.streams import StreamSource
from vit_scale.data.sources.table_source import Data, open_data
from vit_scale.errors import UserError
from vit_scale.kernels.cpu import limit_threads
from vit_scale.launcher import world_size
from vit_scale.models import create_from_config
from vit_scale.models.attention import check_attention_backend
from vit_scale.models.interface import ImageModel
from vit_scale.models.weights.load import load_weights
from vit_scale.models.weights.whitening import whiten_patches
from vit_scale.record.header import Description, describe
from vit_scale.record.record import Record
from vit_scale.record.terminal import Screen
from vit_scale.record.trackers import check_trackers
from vit_scale.schedule import LearningRate, Plan, learning_rate, make_plan
from vit_scale.strategies.precision import resolve_precision
from vit_scale.strategies.processes import call_on_main
from vit_scale.strategies.strategy import Engine, make_strategy, override_warning, resolve_strategy
from vit_scale.train.build_state import build_state
from vit_scale.train.micro_batch import (
    choose_micro_batch,
    smallest_of_all,
    surely_fits_in_host_memory,
    trial_on_device,
)
from vit_scale.train.open_run import open_run, write_config
from vit_scale.train.optim.optimizer import check_optimizer
from vit_scale.train.state import TrainState

WHITENED_IMAGES = 1000
"""Images that the whitening of patches is made from."""


@dataclass
class Run:
    """Everything the loop needs. Only `state` changes from step to step."""

    config: Config
    plan: Plan
    folder: Path
    data: Data
    state: TrainState
    lr: LearningRate
    normalize: Normalize
    normalization: tuple[Values, Values]
    """Mean and standard deviation."""
    mixing: Mixing
    progressive: Progressive
    train_loader: TrainLoader
    eval_loader: EvalLoader
    checkpoints: CheckpointFolder
    screen: Screen
    record: Record | None
    """None on all but the main process."""
    check: CheckAside | None
    """Of the main process, under way from the start."""
    description: Description
    peak: Peak
    started: float

    @property
    def device(self) -> torch.device:
        return self.state.engine.device

    def inputs(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 images as the model wants them: on the device, normalised, in its precision."""
        return self.normalize(images.to(self.device, non_blocking=True)).to(self.state.engine.input_dtype)

    def flops_of(self, step: int) -> float:
        """FLOPs that the update of a step spends in all processes."""
        size = self.progressive.size_at(step)
        flops = self.description.train_flops_per_image
        return self.plan.global_batch * (flops if size is None else self.description.flops_by_size[size])

    def updates(self) -> Iterator[list[Batch]]:
        """The micro batches of this process, a list for each update still to be done."""
        batches = iter(self.train_loader)
        for _ in range(self.state.step, self.plan.steps):
            yield [next(batches) for _ in range(self.plan.accumulation)]

    def close(self) -> None:
        """End all that runs beside the loop: loading processes and the writer of checkpoints."""
        self.screen.stop()
        self.train_loader.close()
        self.eval_loader.close()
        self.checkpoints.close()


def build_run(config: Config, recipe: str, check: CheckAside | None = None) -> Run:
    """Check everything a user can get wrong, then build; raises `UserError` with nothing written.

    `check`: the comparison with timm's model that the main process has begun.
    """
    started = time.perf_counter()
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    strategy, strategy_note = resolve_strategy(config.parallel.strategy)
    precision = _check_options(config, strategy, torch.device(device_type))
    data = open_data(config.data, seed=config.run.seed)
    plan = make_plan(config, train_images=_train_images(config, data), processes=world_size(), device=device_type)
    settings_note = override_warning(config, plan, strategy, precision)
    made = make_strategy(config, plan, strategy, precision)
    model, weights_note = _build_model(config, data)
    progressive = make_progressive(config.augment.progressive, plan.steps, model)
    if config.model.init == "whitened" and config.model.weights is None:
        _whiten(model, config, data, progressive)
    folder, found, notes = call_on_main(lambda: open_run(config, recipe, plan))
    recorded = read_meta(found)["plan"] if found else {}
    if config.batch.micro == "auto" and recorded.get("processes") == plan.processes:
        plan = plan.with_micro_batch(recorded["micro_batch"])
    session = call_on_main(lambda: secrets.token_hex(4))
    state = build_state(model, made, config, plan)
    batch_note = None
    if config.batch.micro != "auto" or recorded.get("processes") != plan.processes:
        plan, batch_note = _settle_micro_batch(config, plan, state.engine, precision)
    if found:
        state.restore(Checkpoint(found))
    screen = Screen(enabled=made.rank == 0, steps=plan.steps)
    description = describe(config, plan, data, model, strategy, precision, folder)
    limit_threads(description.train_flops_per_image * plan.micro_batch)
    for note in filter(None, [strategy_note, settings_note, weights_note, batch_note, *notes]):
        screen.say(note)
    device_peak = peak(made.device)
    screen.table(f"Training {recipe}", description.rows | {"MFU": device_peak.in_words()})
    mean, std = resolve_normalization(config.data, config.model.name, model.in_chans)
    train_loader, eval_loader = _build_loaders(config, plan, data, state, mean, std)
    # Now: after the peak was measured, before trackers have threads, and the first batches are made while those begin.
    train_loader.start()
    return Run(
        config=config,
        plan=plan,
        folder=folder,
        data=data,
        state=state,
        lr=learning_rate(config, plan),
        normalize=Normalize(mean, std, reuse=True).to(made.device),
        normalization=(mean, std),
        mixing=_build_mixing(config, plan, model),
        progressive=progressive,
        train_loader=train_loader,
        eval_loader=eval_loader,
        checkpoints=CheckpointFolder(
            folder,
            keep=config.run.keep,
            rank=made.rank,
            world=made.world,
            session=session,
            step=state.step,
            timeout_seconds=config.parallel.timeout_seconds,
        ),
        screen=screen,
        record=(
            _open_record(config, folder, state.step, description.numbers | device_peak.numbers(), screen)
            if made.rank == 0
            else None
        ),
        check=check,
        description=description,
        peak=device_peak,
        started=started,
    )


def _check_options(config: Config, strategy: str, device: torch.device) -> Precision:
    """What can be known to be wrong before anything is read; returns the precision."""
    check_optimizer(config.optim.name, strategy)
    check_trackers(config.track.trackers)
    parse_spec(config.augment)
    precision = resolve_precision(config.parallel.precision, device)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    check_attention_backend(config.model.attention, device, dtype=dtype, bias=config.model.pos_embed == "relative")
    torch.set_float32_matmul_precision("high" if config.parallel.tf32 else "highest")
    if torch.are_deterministic_algorithms_enabled() != config.parallel.deterministic:
        torch.use_deterministic_algorithms(config.parallel.deterministic)  # Imports the compiler: 1.5 s.
    return precision


def _train_images(config: Config, data: Data) -> int:
    """Training images; 0 for a stream that does not tell, whose length must then be given in steps."""
    if isinstance(data.train, StreamSource) and config.schedule.steps is not None:
        return data.train.length or 0
    return len(data.train)


def _build_model(config: Config, data: Data) -> tuple[ImageModel, str | None]:
    torch.manual_seed(config.run.seed)
    classes = config.model.num_classes or data.num_classes
    if classes < data.num_classes:
        raise UserError(f"model.num_classes = {classes}: the data has {data.num_classes} classes")
    created = create_from_config(config.model, num_classes=classes, in_chans=config.model.in_chans or data.in_chans)
    model = cast(ImageModel, created)
    if config.model.weights is None:
        return model, None
    return model, load_weights(model, config.model.weights).summary()


def _whiten(model: ImageModel, config: Config, data: Data, progressive: Progressive) -> None:
    """Start the patch projection from the training images, at the size they have at first; alike on all processes."""
    if isinstance(data.train, StreamSource):
        raise UserError("model.init = 'whitened': looks at images from all over the data, which streaming cannot")
    channels = model.in_chans
    images = glance(data.train, WHITENED_IMAGES, augment=config.augment, img_size=model.img_size, in_chans=channels)
    normalize = Normalize(*resolve_normalization(config.data, config.model.name, channels))
    whiten_patches(model, progressive(normalize(images), step=0))


def _settle_micro_batch(config: Config, plan: Plan, engine: Engine, precision: Precision) -> tuple[Plan, str | None]:
    """The plan with the micro batch that is used, and a line where it is not what was asked for.

    On a CPU one size is about as fast as another, so `auto` keeps the plan's and nothing is tried while it surely fits.
    """
    device, note = engine.device, None
    model = cast(ImageModel, engine.model)
    if device.type == "cuda" or not surely_fits_in_host_memory(config, model, plan.micro_batch, precision):
        even = bool(config.augment.mixup or config.augment.cutmix)
        asked = plan.micro_batch if device.type == "cpu" else config.batch.micro
        trial = trial_on_device(model, device, precision)
        micro, note = choose_micro_batch(asked, plan.global_batch // plan.processes, trial, even=even)
        plan = plan.with_micro_batch(smallest_of_all(micro, device))
        engine.set_micro_batch(plan)
    return plan, note


def _build_mixing(config: Config, plan: Plan, model: ImageModel) -> Mixing:
    unmixed = round(config.augment.mix_off_epochs * plan.train_images / plan.global_batch)
    return Mixing(
        config.augment,
        num_classes=model.num_classes,
        global_batch=plan.global_batch,
        seed=config.run.seed,
        patch_size=model.patch_size,
        off_from_step=plan.steps - unmixed if unmixed else None,
    )


def _build_loaders(
    config: Config, plan: Plan, data: Data, state: TrainState, mean: Values, std: Values
) -> tuple[TrainLoader, EvalLoader]:
    model, engine = state.model, state.engine
    options = {
        "augment": config.augment,
        "img_size": model.img_size,
        "in_chans": model.in_chans,
        "rank": engine.rank,
        "world": engine.world,
        "workers": choose_workers(config.data, _processes_here(plan), data.train),
        "on_error": config.data.on_error,
    }
    train = TrainLoader(
        with_cache(data.train, config.data, img_size=model.img_size, in_chans=model.in_chans),
        global_batch=plan.global_batch,
        micro_batch=plan.micro_batch,
        seed=config.run.seed,
        start_step=state.step,
        end_step=plan.steps,
        mean=mean,
        std=std,
        held=plan.accumulation,
        **options,
    )
    return train, EvalLoader(data.val, batch=plan.eval_batch, **options)


def _processes_here(plan: Plan) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", plan.processes))


def _open_record(config: Config, folder: Path, step: int, facts: dict[str, Any], screen: Screen) -> Record:
    write_config(folder, config)
    return Record(folder, config, step=step, facts=facts, say=screen.say)
