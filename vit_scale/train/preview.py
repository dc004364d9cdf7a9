"""Draw a training batch as the model receives it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from PIL import Image
from torch import nn

from vit_scale.config import Config
from vit_scale.cost.meta import build_on_meta
from vit_scale.data.augment.transforms import TrainTransform
from vit_scale.data.data import open_data
from vit_scale.data.loading.loaders import Loading, TrainLoader
from vit_scale.errors import UserError
from vit_scale.models.interface import backbone_of
from vit_scale.schedule import Plan, make_plan
from vit_scale.tasks import task_class
from vit_scale.tasks.task import Table
from vit_scale.train.loaders import train_indices


def preview(config: Config, step: int = 0, count: int = 16) -> Image.Image:
    """Draw the first images of a step's global batch as the task of `config` shows them."""
    chosen = task_class(config)
    data = open_data(config.data, chosen.make_target(config), seed=config.run.seed)
    plan = _plan(config, data.info.images, count)
    task = chosen(config, data.info, plan)
    model = backbone_of(build_on_meta(task.build))  # only its sizes are used
    loader = TrainLoader(
        data.train,
        TrainTransform(config.augment, model.img_size, *task.normalization),
        train_indices(config, plan, data, rank=0, start_step=step, end_step=step + 1),
        task.make_target(config),
        Loading(model.in_chans, config.data.on_error),
    )
    task.to(torch.device("cpu"), torch.float32)
    show = _KeptImage(model)
    task.show_batch(task.inputs(next(iter(loader)), step), show)
    if show.kept is None:
        raise UserError(f"task.name = {task.name}: does not draw training batches")
    return show.kept


def _plan(config: Config, images: int, count: int) -> Plan:
    """Return the plan of the run on one process, whose first micro-batch has at most `count` images."""
    plan = make_plan(config, train_images=images, processes=1, device="cpu")
    total = plan.global_batch
    return plan.with_micro_batch(next(size for size in range(min(count, total), 0, -1) if total % size == 0))


class _KeptImage:
    """`tasks.task.Show` that keeps the image."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.kept: Image.Image | None = None

    def table(self, table: Table) -> None:
        """Not kept."""

    def image(self, name: str, draw: Callable[[], Image.Image], *, title: str, caption: str) -> None:
        self.kept = draw()

    def info(self, text: str) -> None:
        """Not printed."""
