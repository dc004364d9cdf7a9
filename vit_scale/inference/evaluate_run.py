"""A loaded model over labelled images, on all the processes that there are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from vit_scale.cost.activations import Precision
from vit_scale.data.loading.loaders import EvalLoader, choose_workers
from vit_scale.errors import UserError
from vit_scale.inference.eval_data import EvalData
from vit_scale.inference.loaded_run import LoadedRun
from vit_scale.schedule import DEFAULT_MICRO_BATCH
from vit_scale.strategies.precision import resolve_precision
from vit_scale.strategies.processes import Processes
from vit_scale.tasks.classify.evaluator import Evaluation, score


def evaluate(loaded: LoadedRun, data: EvalData, relabel: torch.Tensor | None, processes: Processes) -> Evaluation:
    """Read each image once over all processes and count; with a progress bar on the main process's terminal."""
    config, device = loaded.config, processes.device
    precision = _precision(config.parallel.precision, device)
    half = torch.bfloat16 if precision == "bf16" else torch.float16
    model = loaded.model.to(device)
    loader = _open_loader(loaded, data, processes)
    try:
        with (
            _progress(loader, enabled=processes.is_main) as advance,
            torch.autocast(device.type, half, enabled=precision != "fp32"),
        ):
            evaluation = score(
                model,
                loader,
                lambda images: loaded.transform.normalize(images.to(device, non_blocking=True)),
                class_names=tuple(map(loaded.name_of, range(model.num_classes))),
                device=device,
                relabel=None if relabel is None else relabel.to(device),
                advance=advance,
            )
        if loader.problems:
            print(loader.problems.summary(), file=sys.stderr)
        return evaluation
    finally:
        loader.close()


def _precision(asked: Precision | Literal["auto"], device: torch.device) -> Precision:
    """That of the run, or of this device where the run was trained on a better one."""
    try:
        return resolve_precision(asked, device)
    except UserError:
        found = resolve_precision("auto", device)
        print(f"parallel.precision = {asked!r} cannot be had here: evaluating in {found}", file=sys.stderr)
        return found


def _open_loader(loaded: LoadedRun, data: EvalData, processes: Processes) -> EvalLoader:
    config, device = loaded.config, processes.device
    batch = DEFAULT_MICRO_BATCH[device.type] if config.batch.eval == "auto" else config.batch.eval
    return EvalLoader(
        data.source,
        augment=config.augment,
        img_size=loaded.model.img_size,
        in_chans=loaded.model.in_chans,
        batch=batch,
        rank=processes.rank,
        world=processes.world,
        workers=choose_workers(config.data, processes.here, data.source),
        on_error=config.data.on_error,
    )


@contextmanager
def _progress(loader: EvalLoader, *, enabled: bool) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, which goes when it is done; what is called after each batch."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    if not (enabled and console.is_terminal):
        yield lambda: None
        return
    try:
        total = len(loader)
    except TypeError:  # a stream does not know
        total = None
    columns = ("evaluating, batch", MofNCompleteColumn(), BarColumn(24), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
