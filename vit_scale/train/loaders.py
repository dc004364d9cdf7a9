"""The training and validation batches of this rank."""

from __future__ import annotations

from dataclasses import dataclass

from vit_scale.attention_report.periodic import AttentionWatch
from vit_scale.config import Config
from vit_scale.cost.activations import Precision
from vit_scale.data.augment.transforms import EvalTransform, TrainTransform
from vit_scale.data.class_balance import class_balance
from vit_scale.data.data import Data
from vit_scale.data.loading.loaders import EvalLoader, Loading, TrainLoader
from vit_scale.data.loading.workers import choose_workers
from vit_scale.data.sampling import EvalIndices, TrainIndices
from vit_scale.data.sources.cache import with_cache
from vit_scale.data.sources.streams import count_images
from vit_scale.models.interface import ImageModel
from vit_scale.probe.periodic import KnnProbe, knn_images
from vit_scale.schedule import Plan
from vit_scale.strategies.processes import own_cores
from vit_scale.tasks.task import Task


@dataclass(frozen=True)
class Loaders:
    """Batches of this rank for training and evaluation."""

    train: TrainLoader
    val: EvalLoader
    probe: KnnProbe | None = None
    """The labeled images of `run.probe_every`."""
    attention: AttentionWatch | None = None
    """A few validation images, whose attention is measured."""

    def problems(self) -> list[str]:
        """Return what could not be read, for the user."""
        return [text for loader in (self.train, self.val) if (text := loader.problems.summary())]

    def close(self) -> None:
        """Stop the data-loading workers."""
        self.train.close()
        self.val.close()
        if self.probe is not None:
            self.probe.close()


def make_loaders(
    config: Config,
    plan: Plan,
    task: Task,
    data: Data,
    backbone: ImageModel,
    *,
    step: int,
    rank: int,
    precision: Precision = "fp32",
) -> Loaders:
    """Return the loaders of a run that starts or resumes at `step`."""
    size, channels = backbone.img_size, backbone.in_chans
    cores = own_cores()
    workers = choose_workers(config.data, cores, data.train)
    target = task.make_target(config)
    train = TrainLoader(
        with_cache(data.train, config.data, img_size=size, in_chans=channels, target=target),
        TrainTransform(config.augment, size, *task.normalization),
        train_indices(config, plan, data, rank=rank, start_step=step, end_step=plan.steps),
        target,
        Loading(channels, config.data.on_error, workers, reserved_batches=plan.accumulation),
    )
    val = EvalLoader(
        data.val,
        EvalTransform(config.augment, size),
        EvalIndices(images=count_images(data.val), batch=plan.eval_batch, rank=rank, world=plan.processes),
        target,
        Loading(channels, config.data.on_error, workers),
    )
    labeled = knn_images(config, data)
    probe = None if labeled is None else KnnProbe(config, plan, task, labeled, backbone, rank, cores, precision)
    return Loaders(train, val, probe, AttentionWatch(config, task, data.val, backbone, precision))


def train_indices(config: Config, plan: Plan, data: Data, *, rank: int, start_step: int, end_step: int) -> TrainIndices:
    """Return which images each micro-batch of a rank has: a function of the seed and the step."""
    return TrainIndices(
        global_batch=plan.global_batch,
        micro_batch=plan.micro_batch,
        rank=rank,
        world=plan.processes,
        start_step=start_step,
        end_step=end_step,
        seed=config.run.seed,
        images=data.info.images,
        repeats=config.augment.repeats,
        balance=class_balance(config.data, data.train),
    )
