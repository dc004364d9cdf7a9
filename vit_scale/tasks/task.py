"""The interface between the training loop and what is learned.

A task says what is read next to an image, what goes into the model, what the loss is, what is measured and what is
shown. The loop, the record, the page and the sweeps know nothing else. To add a task, write the four abstract methods
of `Task` and add a line to `vit_scale.tasks.TASKS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vit_scale.config import Config
from vit_scale.cost.training import CostPart
from vit_scale.data.batch import Batch, DataInfo
from vit_scale.data.normalize import Normalize, Values, buffer_for, resolve_normalization
from vit_scale.data.progressive import Progressive
from vit_scale.data.targets import ClassTarget, Target
from vit_scale.models.interface import backbone_of
from vit_scale.models.weights.init import Editing, init_weights
from vit_scale.schedule import Plan
from vit_scale.tasks.results import Metric, Table

if TYPE_CHECKING:
    from PIL import Image

    from vit_scale.data.data import Data


class Inputs(NamedTuple):
    """A micro-batch on the device."""

    args: tuple[Tensor, ...]
    """Arguments of the one call of the model."""
    rest: dict[str, Any]
    """Further inputs of the loss, such as targets."""


class Show(Protocol):
    """Where an evaluation shows tables and images: the record of a run, or a directory in launch/eval.py.

    Bound to the evaluated weights. On ranks other than the main one nothing is drawn.
    """

    model: nn.Module
    """The evaluated model."""

    def table(self, table: Table) -> None:
        """Show a table."""

    def image(self, name: str, draw: Callable[[], Image.Image], *, title: str, caption: str) -> None:
        """Show the image that `draw` returns; called on the main rank only."""

    def info(self, text: str) -> None:
        """Print a line."""


class Evaluator(ABC):
    """Collects the outputs of one pass over the validation images. Sums stay on the device until they are read."""

    @abstractmethod
    def add(self, outputs: Any, batch: Batch) -> None:
        """Add a batch; `batch.real` is False for padding."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Return the values of `Task.metrics` by name, over all ranks; every rank must call it."""

    def show(self, out: Show) -> None:
        """Show tables and images during training; every rank must call it."""

    def report(self, out: Show) -> dict[str, Any]:
        """Show everything, for launch/eval.py, and return further numbers; every rank must call it."""
        self.show(out)
        return {}

    def notes(self) -> dict[str, str]:
        """Return further lines for the terminal of launch/eval.py; called after `report`."""
        return {}


class Means(Evaluator):
    """Means over all real images and ranks of what `values(outputs, batch)` returns: one tensor [B] per name."""

    def __init__(self, values: Callable[[Any, Batch], dict[str, Tensor]], device: torch.device) -> None:
        self._values, self._device = values, device
        self._names: list[str] = []
        self._sums: Tensor | None = None

    def add(self, outputs: Any, batch: Batch) -> None:
        values = self._values(outputs, batch)
        real = batch.positions.to(self._device, non_blocking=True) >= 0
        rows = torch.stack([torch.ones(len(real), device=self._device), *values.values()]).double()
        sums = torch.where(real, rows, 0.0).sum(1)  # not a product: padding may be NaN
        self._names, self._sums = list(values), sums if self._sums is None else self._sums + sums

    def metrics(self) -> dict[str, float]:
        assert self._sums is not None, "every rank evaluates at least one batch"
        count, *totals = sum_over_ranks(self._sums).tolist()
        return {name: total / max(1.0, count) for name, total in zip(self._names, totals, strict=True)}


def sum_over_ranks(sums: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks; every rank must call it."""
    total = sums.clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


@dataclass(frozen=True)
class Card:
    """Entries of a model card that depend on the task."""

    pipeline_tag: str
    summary: str
    """One sentence after `trained with vit_scale on DATA`, such as `(10 classes)`."""
    metric_type: str = "accuracy"
    """Hugging Face's name of the first metric."""


class Task(ABC):
    """A training task. Not an `nn.Module`; owns no trained weights, but may own a frozen teacher or a tokenizer."""

    name: ClassVar[str]
    metrics: tuple[Metric, ...]
    """The first one is "best": for checkpoints, the summary, patience and sweeps."""
    further_metrics: tuple[Metric, ...] = ()
    """Metrics that the run measures itself, not the evaluator (`run.probe_every`); shown like the others."""
    commands: ClassVar[tuple[str, ...]] = ("eval",)
    """Commands that support runs of this task, suggested at the end of a run. They load only tasks in `TASKS`."""
    target: ClassVar[Target] = ClassTarget()
    """The target of a sample: a class, a mask, boxes, captions or nothing (vit_scale.data.targets)."""
    multiple: int = 1
    """Micro-batches that `batch.micro: auto` chooses are a multiple of this, if one divides the images per process."""

    def __init__(self, config: Config, info: DataInfo, plan: Plan | None = None) -> None:
        """Check what can be checked without the data; raises `UserError`. `plan` is None outside of training."""
        self.config, self.info, self.plan = config, info, plan
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.in_chans = config.model.in_chans or info.in_chans
        self.normalize = Normalize(*self.normalization)
        self.progressive = Progressive(config.augment.progressive, plan.steps if plan else 0)
        self._buffer: Tensor | None = None

    # ------------------------------------------------------------------------------------------------- to be written

    @abstractmethod
    def build(self) -> nn.Module:
        """Construct the model: what is wrapped, sharded, averaged and saved. `init_weights` initializes it.

        To add layers to a backbone, subclass `vit_scale.models.composite.Composite`, which has all the other methods
        that training calls.
        """

    @abstractmethod
    def inputs(self, batch: Batch, step: int) -> Inputs:
        """Prepare a training micro-batch on the device. Every draw is a function of (seed, step, position)."""

    @abstractmethod
    def loss(self, outputs: Any, inputs: Inputs) -> dict[str, Tensor]:
        """Return `{"loss": ...}` in fp32, the mean over images; further entries are logged as `train/loss_<name>`.

        The names must be the same in every step and on every rank.
        """

    @abstractmethod
    def evaluator(self, *, inspect: bool) -> Evaluator:
        """Return what collects one evaluation; with `inspect` also what `Evaluator.show` shows."""

    # ------------------------------------------------------------------------------------------------ with defaults

    @classmethod
    def make_target(cls, config: Config) -> Target:
        """Return what is read next to each image; by default `target`, whatever the options."""
        return cls.target

    @property
    def normalization(self) -> tuple[Values, Values]:
        """Mean and standard deviation per channel."""
        return resolve_normalization(self.config.data, self.config.model.name, self.in_chans)

    def init_weights(self, model: nn.Module, editing: Editing) -> None:
        """Initialize a new model: by default its backbone, by `model.init`. Other layers keep torch's own weights.

        Write to a parameter inside `with editing(parameter) as tensor`: a strategy may have sharded it already, so an
        assignment in `build` would be lost.
        """
        init_weights(backbone_of(model), self.config.model.init, editing)

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move what the task owns to the device; `dtype` is the one that the model expects its inputs in."""
        self.device, self.dtype = device, dtype
        self.normalize.to(device)

    def normalized(self, batch: Batch) -> Tensor:
        """Return the images of a batch on the device, normalized, in fp32; on a CPU valid until the next call.

        Fresh memory for every batch would cost a CPU more than the arithmetic.
        """
        images = batch.images.to(self.device, non_blocking=True)
        self._buffer = buffer_for(images, self._buffer)
        return self.normalize(images, out=self._buffer)

    def predict(self, model: nn.Module, batch: Batch) -> Any:
        """Return the outputs for an evaluation batch; may call the model several times."""
        return model(self.normalized(batch).to(self.dtype))

    def example_batch(self, images: int, size: tuple[int, int]) -> Batch:
        """Return a batch of black images of this size with empty targets, to try what fits into memory."""
        target = self.make_target(self.config)
        memory = {name: np.zeros((images, *spec.shape), spec.dtype) for name, spec in target.slot(size).items()}
        arrays, texts = target.collate([None] * images, memory)
        pixels = torch.zeros(images, self.in_chans, *size, dtype=torch.uint8)
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return Batch(pixels, tensors, torch.arange(images), texts=texts)

    def prepare(self, data: Data) -> None:
        """Read what training needs besides the model, such as a teacher; every rank calls it, before `build`."""

    def build_to_evaluate(self) -> nn.Module:
        """Construct what eval, predict and export load from a run: by default all of the trained model.

        A task may leave out the layers around the backbone that only training needs.
        """
        return self.build()

    def precompute(self, data: Data, workers: int) -> None:
        """Compute what the first step needs, on the device; every rank calls it, with its data-loading workers."""

    def before_update(self, batches: Sequence[Batch], step: int, forward: Callable[..., Any]) -> None:
        """See all micro-batches of a step before the first one; the one hook, for losses over the whole batch."""

    def cost_parts(self, model: nn.Module) -> list[CostPart]:
        """Return the modules that run per training image: by default one forward and backward pass of the model.

        Of a composite this is the backbone alone, because what its other layers receive is unknown here. Override it
        to count them, with modules that `vit_scale.cost.count.count_model` can count.
        """
        return [CostPart("model", backbone_of(model))]

    def exported(self, model: nn.Module) -> Any:
        """Return what launch/export.py exports of a trained model: by default a composite's backbone, or all of it."""
        return backbone_of(model)

    def facts(self) -> dict[str, Any]:
        """Return what the result depends on besides the options; a run is not resumed with other facts."""
        return {}

    def show_batch(self, inputs: Inputs, out: Show) -> None:
        """Show the first micro-batch of a run as the model receives it; called on the main rank only."""

    def card(self) -> Card:
        """Return the entries of a model card that depend on the task."""
        return Card("image-feature-extraction", f"({self.name})")

    def header(self) -> dict[str, str]:
        """Return further rows of the header of a run."""
        return {}

    def describe(self) -> dict[str, Any]:
        """Return what summary.json says of the task: enough for the page and the model card to show the run."""
        metrics = [asdict(metric) for metric in (*self.metrics, *self.further_metrics)]
        return {"name": self.name, "metrics": metrics, "facts": self.facts()}
