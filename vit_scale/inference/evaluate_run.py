"""Evaluate a loaded model on all processes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Literal

import torch

from vit_scale.cost.activations import Precision
from vit_scale.data.augment.transforms import EvalTransform
from vit_scale.data.batch import Batch, ImageSource
from vit_scale.data.loading.loaders import EvalLoader, Loading
from vit_scale.data.loading.workers import choose_workers
from vit_scale.data.sampling import EvalIndices
from vit_scale.data.sources.streams import count_images
from vit_scale.data.targets import Target
from vit_scale.errors import UserError
from vit_scale.inference.eval_data import EvalData
from vit_scale.inference.eval_report import Evaluation, ReportShow
from vit_scale.inference.loaded_run import LoadedRun
from vit_scale.record.terminal import Terminal
from vit_scale.schedule import DEFAULT_MICRO_BATCH
from vit_scale.strategies.precision import resolve_precision
from vit_scale.strategies.processes import Processes, own_cores
from vit_scale.tasks.evaluate import evaluate
from vit_scale.tasks.task import sum_over_ranks


def evaluate_run(
    loaded: LoadedRun, data: EvalData, relabel: torch.Tensor | None, processes: Processes, terminal: Terminal
) -> Evaluation:
    """Evaluate each image once over all processes; `terminal` shows the progress.

    `relabel` maps labels of the data to classes of the model.
    """
    config, device = loaded.config, processes.device
    precision = available_precision(config.parallel.precision, device)
    half = torch.bfloat16 if precision == "bf16" else torch.float16
    model, task = loaded.model.to(device), loaded.task
    task.to(device, torch.float32)
    loader = open_eval_loader(loaded, data.source, task.make_target(config), processes)
    started = perf_counter()
    try:
        with (
            terminal.phase("Evaluating, batch", loader.count()) as phase,
            torch.autocast(device.type, half, enabled=precision != "fp32"),
        ):
            batches = _Batches(loader, relabel, torch.zeros(1, dtype=torch.int64, device=device))
            evaluator = evaluate(task, model, batches, inspect=True, advance=phase.advance)
            metrics, images = evaluator.metrics(), int(sum_over_ranks(batches.images))
            seconds = perf_counter() - started
            show = ReportShow(model, enabled=processes.is_main)
            numbers = evaluator.report(show)
        if loader.problems:
            print(loader.problems.summary(), file=sys.stderr)
        return Evaluation(task.metrics, metrics, numbers, evaluator.notes(), images, seconds, show)
    finally:
        loader.close()


@dataclass
class _Batches:
    """Batches with the labels of the model; counts their images."""

    loader: Iterable[Batch]
    relabel: torch.Tensor | None
    images: torch.Tensor

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.loader:
            self.images += batch.real.sum().to(self.images.device)
            if self.relabel is not None:
                batch = replace(batch, target=batch.target | {"label": self.relabel[batch.target["label"]]})
            yield batch


def available_precision(requested: Precision | Literal["auto"], device: torch.device) -> Precision:
    """Return the precision of the run, or the best one of this device if it does not support that."""
    try:
        return resolve_precision(requested, device)
    except UserError:
        found = resolve_precision("auto", device)
        print(f"parallel.precision = {requested!r} is not available here: evaluating in {found}", file=sys.stderr)
        return found


def open_eval_loader(loaded: LoadedRun, source: ImageSource, target: Target, processes: Processes) -> EvalLoader:
    """Return the share of this process of evaluation batches of `source`."""
    config, device = loaded.config, processes.device
    batch = DEFAULT_MICRO_BATCH[device.type] if config.batch.eval == "auto" else config.batch.eval
    workers = choose_workers(config.data, own_cores(), source)
    return EvalLoader(
        source,
        EvalTransform(config.augment, loaded.backbone.img_size),
        EvalIndices(images=count_images(source), batch=batch, rank=processes.rank, world=processes.world),
        target,
        Loading(loaded.task.in_chans, config.data.on_error, workers),
    )
