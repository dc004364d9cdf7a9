"""Judge the features of a loaded model: k-NN and linear probes of its blocks, on all processes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vit_scale.data.batch import Batch, ImageSource
from vit_scale.data.data import open_data
from vit_scale.data.targets import ClassTarget, NoTarget
from vit_scale.errors import UserError
from vit_scale.inference.eval_data import other_source
from vit_scale.inference.evaluate_run import available_precision, open_eval_loader
from vit_scale.inference.loaded_run import LoadedRun
from vit_scale.probe.features import FeatureModel, FeatureSet, compute_features
from vit_scale.probe.knn import knn_predict, query_blocks, usable_neighbors
from vit_scale.probe.labeled import LabeledImages, label_images, own_rows
from vit_scale.probe.linear import GRID, LinearProbe, linear_probe, training_steps
from vit_scale.record.terminal import Terminal
from vit_scale.strategies.processes import Processes
from vit_scale.tasks.classify.classification import Classification


@dataclass(frozen=True)
class ProbeData:
    """Labeled images to judge features with."""

    train: ImageSource
    queries: ImageSource
    """The images that are classified."""
    class_names: tuple[str, ...]
    split: str
    description: str
    """One line for the terminal."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class BlockResult:
    """Results of the features of one block."""

    name: str
    knn: dict[int, float]
    """Top-1 accuracy by k."""
    linear: LinearProbe | None
    linear_top1: float | None


@dataclass(frozen=True)
class Judgement:
    """What the features of a model are worth."""

    features: str
    train_images: int
    images: int
    chance: float
    """Accuracy of always predicting the most frequent class of the training images."""
    skipped_k: list[int]
    leave_one_out: bool
    """Whether an image that is also a training image was left out of its own neighbors."""
    blocks: list[BlockResult]
    queries: FeatureSet = field(repr=False)
    """Features of the classified images."""


def open_probe_data(loaded: LoadedRun, data: str | None, split: str | None, images: int | None) -> ProbeData:
    """Open the training images and those of `split` of the run's data, or of other `data`, with class labels.

    The run's data is split as in its training. `images`: at most so many of each. Raises `UserError` without labels.
    """
    options = loaded.config.data
    trained = (loaded.record.get("task") or {}).get("name", Classification.name)
    target = ClassTarget() if data is not None or trained == Classification.name else NoTarget()
    if data is not None:
        options, _ = other_source(options, data, target)
    if split not in (None, "train", "val"):
        options = replace(options, val_split=split)
    if options.streaming:
        raise UserError("data.streaming = true: streams are not supported here; add data.streaming=false")
    opened = open_data(options, target, seed=loaded.config.run.seed)
    found = label_images(opened, options)
    if split == "train":
        found = LabeledImages(found.train, found.train, found.class_names)
    found = found.limited(images, images)
    classes = f"{len(found.class_names):,} classes"
    description = f"{options.source}, {len(found.train):,} training images, {len(found.val):,} of {split or 'val'}"
    return ProbeData(
        found.train, found.val, found.class_names, split or "val", f"{description}, {classes}", opened.file_notes
    )


def probe_run(
    loaded: LoadedRun,
    data: ProbeData,
    extract: FeatureModel,
    ks: Sequence[int] | None,
    processes: Processes,
    terminal: Terminal,
) -> Judgement | None:
    """Compute features on all processes and judge them on the main one; None on others. `terminal` shows progress."""
    train, queries = _features(loaded, data, extract, processes, terminal)
    if not processes.is_main:
        return None
    for name, found in (("training images", train), (f"images of {data.split}", queries)):
        if not len(found):
            raise UserError(f"none of the {name} can be read")
    own = own_rows(data.queries, data.train, queries.indices, train.indices)
    usable, skipped = usable_neighbors(ks, len(train) - (own is not None))
    classes, device = len(data.class_names), processes.device
    results = []
    for name in extract.names:
        features, asked = train.features[name], queries.features[name]
        with terminal.phase(f"k-NN, {name}", len(query_blocks(len(queries), classes))) as phase:
            predicted = knn_predict(
                features, train.labels, asked, usable, classes, own_Q=own, device=device, advance=phase.advance
            )
        knn = {k: _accuracy(each, queries.labels) for k, each in predicted.items()}
        linear = None
        if own is None:
            with terminal.phase(f"Linear probe, {name}, step", 2 * training_steps(len(train))) as phase:
                seed = loaded.config.run.seed
                linear = linear_probe(
                    features, train.labels, asked, classes, seed=seed, device=device, advance=phase.advance
                )
        top1 = None if linear is None else _accuracy(linear.predictions, queries.labels)
        results.append(BlockResult(name, knn, linear, top1))
    chance = _accuracy(train.labels.mode().values.expand(len(queries)), queries.labels)
    return Judgement(
        extract.description, len(train), len(queries), chance, skipped, own is not None, results, queries=queries
    )


def _accuracy(predictions: Tensor, labels: Tensor) -> float:
    return (predictions == labels).double().mean().item()


def _features(
    loaded: LoadedRun, data: ProbeData, extract: FeatureModel, processes: Processes, terminal: Terminal
) -> tuple[FeatureSet, FeatureSet]:
    """Return the features of the training images and of those to classify, on the main process."""
    task, device = loaded.task, processes.device
    precision = available_precision(loaded.config.parallel.precision, device)
    half = torch.bfloat16 if precision == "bf16" else torch.float16
    loaded.model.to(device)
    task.to(device, torch.float32)

    def prepare(batch: Batch) -> Tensor:
        return task.normalized(batch)

    found = []
    sources = {"training images": data.train}
    if data.queries is not data.train:
        sources[f"images of {data.split}"] = data.queries
    for name, source in sources.items():
        loader = open_eval_loader(loaded, source, ClassTarget(), processes)
        try:
            with (
                terminal.phase(f"Features of {name}, batch", len(loader)) as phase,
                torch.autocast(device.type, half, enabled=precision != "fp32"),
            ):
                found.append(compute_features(extract, loader, prepare, device, advance=phase.advance))
            if loader.problems:
                print(loader.problems.summary(), file=sys.stderr)
        finally:
            loader.close()
    return found[0], found[-1]


def describe_grid() -> str:
    """Return what the linear probe tries."""
    rates, decays = ({getattr(each, name) for each in GRID} for name in ("lr", "weight_decay"))
    return f"{len(GRID)} settings ({len(rates)} learning rates x {len(decays)} weight decays)"
