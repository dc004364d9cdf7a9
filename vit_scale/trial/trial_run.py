"""Take a few steps of a recipe on this system: train, evaluate, save, resume; in a temporary directory."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import itertools
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vit_scale.config import Config
from vit_scale.errors import UserError, first_line
from vit_scale.format import duration, memory_size
from vit_scale.kernels.malloc import retain_freed_memory
from vit_scale.launcher import is_main_process, silence_libraries, world_size

if TYPE_CHECKING:
    from torch import Tensor

    from vit_scale.data.batch import Batch
    from vit_scale.record.terminal import Terminal
    from vit_scale.train.run import Run
    from vit_scale.trial.measurements import Measurements

STEPS_SECONDS = 60.0
"""Unless the number of steps was given, fewer are taken if they would take longer than this."""
EVAL_SECONDS = 10.0
"""Fewer validation batches are evaluated if they would take longer than this."""
RESUMED_STEPS = 3
"""Steps after the checkpoint, taken both without interruption and after resuming; one if steps are slow."""
MIN_STEPS = 3
EXIT_STATUS_SIGTERM = 143
PREFIX = "vit_scale-try-"


def try_recipe(config: Config, recipe: str, steps: int | None = None) -> int:
    """Try `config` on this system and print a summary; every rank must call it.

    `steps`: steps to take; None: 20, or fewer if they are slow. Returns 0 if every check passed, 1 otherwise.
    """
    silence_libraries()
    retain_freed_memory()
    from vit_scale.record.terminal import Terminal
    from vit_scale.trial.summary import print_summary

    terminal = Terminal(enabled=is_main_process())
    terminal.title(f"Trying {recipe}")
    with _temporary_directory(config) as directory, tempfile.TemporaryDirectory(prefix=PREFIX) as own:
        with terminal.phase("Looking for the data"):
            measured = _prepare(config, steps, directory, Path(own))
        _try(measured, recipe, terminal, limited=steps is None)
    print_summary(measured, terminal)
    return 1 if measured.failed else 0


def _prepare(config: Config, steps: int | None, directory: Path, own: Path) -> Measurements:
    """Return what is known before the first step, with the shortened options. `own`: a directory of this rank."""
    import torch

    from vit_scale.trial.measurements import Measurements, real_plan
    from vit_scale.trial.shortened import (
        DEFAULT_STEPS,
        check_host_memory,
        images_per_process,
        replace_missing_data,
        replace_missing_teacher,
        replace_missing_weights,
        shorten,
    )

    world = world_size()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    short, size, data_note = replace_missing_data(config)
    short, weights_note = replace_missing_weights(short)
    short, teacher_note = replace_missing_teacher(short, own)
    plan = real_plan(config, size, world, device)
    if device == "cpu":
        check_host_memory(config, world)
    images = images_per_process(config, plan, device=device)
    short = shorten(short, plan, steps=steps or DEFAULT_STEPS, images=images, run_dir=str(directory / "run"))
    notes = {"data": data_note, "weights": weights_note, "teacher": teacher_note}
    return Measurements(config, short, plan, size, {name: note for name, note in notes.items() if note})


def _try(measured: Measurements, recipe: str, terminal: Terminal, *, limited: bool) -> None:
    """Add to `measured` what each part of the trial shows; a part that fails ends the trial."""
    from vit_scale.strategies.rank_failure import is_rank_failure

    try:
        digest, checkpoint = _uninterrupted(measured, recipe, terminal, limited=limited)
        gc.collect()  # The resumed run needs the memory.
        with terminal.phase("Resuming"):
            _resumed(measured, recipe, digest, checkpoint)
    except (UserError, RuntimeError, MemoryError, OSError) as error:
        if not measured.steps and isinstance(error, UserError):
            raise  # The recipe is invalid.
        if isinstance(error, RuntimeError) and is_rank_failure(error):
            raise
        measured.fail(first_line(error))


def _uninterrupted(measured: Measurements, recipe: str, terminal: Terminal, *, limited: bool) -> tuple[str, Path]:
    """Train, evaluate, save and continue; return a digest of the final state, and the checkpoint."""
    with _built(measured.short, recipe, terminal) as run:
        batches = run.steps()
        measured.part = "train"
        _train(run, batches, measured, limited=limited)
        with terminal.phase("Evaluating") as phase:
            measured.part = "evaluate"
            _evaluate(run, measured)
            phase.next("Saving a checkpoint")
            measured.part = "save"
            checkpoint = _save(run, measured)
            measured.read_memory(run.device)  # On a CPU, the copy for the checkpoint is part of the peak.
            phase.next("Continuing")
            measured.part = "resume"
            _take_steps(run, batches, measured)
            return state_digest(run), checkpoint


def _resumed(measured: Measurements, recipe: str, expected: str, checkpoint: Path) -> None:
    """Take the steps after the checkpoint again, and compare the state with that of the uninterrupted run."""
    from vit_scale.record.terminal import Terminal

    options = dataclasses.replace(
        measured.short.run, dir=str(checkpoint.parent.parent.with_name("resumed")), resume=str(checkpoint)
    )
    with _built(dataclasses.replace(measured.short, run=options), recipe, Terminal(enabled=False)) as run:
        resumed_at = run.state.step
        _take_steps(run, run.steps(), measured)
        equal = _on_all_ranks(state_digest(run) == expected, run)
    if equal:
        measured.passed(f"from step {resumed_at}, bit-identical")
    elif run_is_deterministic(measured.short):
        measured.fail(f"from step {resumed_at}, but the weights differ from those of the uninterrupted run")
    else:
        measured.passed(f"from step {resumed_at}, up to rounding (bit-identical needs parallel.deterministic=true)")


def run_is_deterministic(config: Config) -> bool:
    """Return whether the same steps give the same bits: always on a CPU, on a GPU by option."""
    import torch

    return config.parallel.deterministic or not torch.cuda.is_available()


@contextlib.contextmanager
def _built(config: Config, recipe: str, terminal: Terminal) -> Iterator[Run]:
    """Build a run, and close it at the end."""
    from vit_scale.checkpoints import run_lock
    from vit_scale.strategies.processes import restored_process, wait_for_all
    from vit_scale.train.build import build_run

    with restored_process(keep_group=True):
        run = build_run(config, recipe, terminal=terminal)
        if run.device.type == "cpu":
            retain_freed_memory(include_large=True)
        try:
            yield run
            wait_for_all()  # No rank removes files that another one still reads.
        finally:
            run.close()
            run_lock.release_all()


def _train(run: Run, batches: Iterator[list[Batch]], measured: Measurements, *, limited: bool) -> None:
    """Take all steps but the last RESUMED_STEPS. The first one is not timed if there are others: it is slower."""
    from vit_scale import gpu
    from vit_scale.train.loop import take_step

    gpu.reset_peak_memory(run.device)  # Trials of micro-batches needed more than training will.
    stop = run.plan.steps - min(RESUMED_STEPS, run.plan.steps // 2)
    times: list[tuple[float, float]] = []
    losses: list[Tensor] = []
    terminal = run.record.terminal
    terminal.start(0, run.plan.steps, run.task.metrics)
    started = time.perf_counter()
    while run.state.step < stop:
        start = time.perf_counter()
        batch = next(batches)
        loaded = time.perf_counter()
        parts, _ = take_step(run, batch)
        terminal.advance(run.state.step)
        losses.append(parts["loss"])
        gpu.synchronize(run.device)
        times.append((time.perf_counter() - start, loaded - start))
        if limited and run.state.step < stop and _is_time_up(time.perf_counter() - started, times, run):
            measured.is_slow = True
            break
    terminal.stop()
    timed = times[1:] or times
    measured.steps = run.state.step
    measured.read_steps(run, *(sum(values) / len(timed) for values in zip(*timed, strict=True)))
    first, last, skipped = losses[0].item(), losses[-1].item(), int(run.state.skipped_steps.item())
    if skipped:
        raise RuntimeError(f"the loss or its gradient was not finite in {skipped} of {len(times)} steps")
    measured.passed(f"{measured.steps} steps, loss {first:.4f} to {last:.4f}")


def _is_time_up(elapsed: float, times: list[tuple[float, float]], run: Run) -> bool:
    """Return whether the steps have taken STEPS_SECONDS, the same on all ranks; never before MIN_STEPS."""
    from vit_scale.train.micro_batch import min_over_ranks

    return len(times) >= MIN_STEPS and min_over_ranks(STEPS_SECONDS - elapsed, run.device) < 0


def _evaluate(run: Run, measured: Measurements) -> None:
    """Evaluate one batch, then as many as fit in EVAL_SECONDS."""
    from vit_scale.tasks.evaluate import evaluate
    from vit_scale.train.micro_batch import min_over_ranks

    loader, total = iter(run.loaders.val), len(run.loaders.val)
    count = 1
    while True:
        start = time.perf_counter()
        metrics = evaluate(run.task, run.state.model, itertools.islice(loader, count)).metrics()
        seconds = (time.perf_counter() - start) / count
        affordable = int(min_over_ranks(EVAL_SECONDS / seconds, run.device))
        if count > 1 or min(total - 1, affordable) < 2:
            break
        count = min(total - 1, affordable)
    measured.eval_batch_seconds = seconds
    first = run.task.metrics[0]
    measured.passed(f"{first.label} {first.text(metrics[first.name])} of {count} of {total} batches")


def _save(run: Run, measured: Measurements) -> Path:
    """Write a checkpoint, and read it back to check it."""
    from vit_scale.checkpoints.find import checkpoint_error, checkpoint_name
    from vit_scale.strategies.processes import call_on_main
    from vit_scale.train.loop import save

    start = time.perf_counter()
    save(run)
    measured.copy_seconds = time.perf_counter() - start
    run.checkpoints.wait()
    seconds = time.perf_counter() - start
    checkpoint = run.checkpoints.path / checkpoint_name(run.state.step)
    problem = run.checkpoints.problem() or call_on_main(lambda: checkpoint_error(checkpoint))
    if problem:
        raise OSError(problem)
    size = call_on_main(lambda: sum(path.stat().st_size for path in checkpoint.iterdir()))
    measured.passed(f"{memory_size(size)} in {duration(max(1, seconds))}")
    return checkpoint


def _take_steps(run: Run, batches: Iterator[list[Batch]], measured: Measurements) -> None:
    """Take the steps after the checkpoint."""
    from vit_scale.train.loop import take_step

    for batch in itertools.islice(batches, 1 if measured.is_slow else RESUMED_STEPS):
        take_step(run, batch)


def state_digest(run: Run) -> str:
    """Return a digest of weights, optimizer state and EMA of this rank; all ranks must call it."""
    import torch

    digest = hashlib.blake2b()

    def add(name: str, tensor: torch.Tensor) -> None:
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)

    for name, tensor in run.state.whole():
        if tensor is not None:
            add(name, tensor.reshape(-1))
    for name, piece in run.state.owned_pieces().items():
        add(name, piece.tensor.reshape(-1))
    return digest.hexdigest()


def _on_all_ranks(value: bool, run: Run) -> bool:
    from vit_scale.train.micro_batch import min_over_ranks

    return bool(min_over_ranks(float(value), run.device))


@contextlib.contextmanager
def _temporary_directory(config: Config) -> Iterator[Path]:
    """Yield the path of a directory that all ranks share, and remove it at the end."""
    directory = _directory_of_all_ranks(config) if world_size() > 1 else Path(tempfile.mkdtemp(prefix=PREFIX))
    if is_main_process():
        shutil.rmtree(directory, ignore_errors=True)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_STATUS_SIGTERM))
    try:
        yield directory
    finally:
        signal.signal(signal.SIGTERM, before)
        if is_main_process():
            shutil.rmtree(directory, ignore_errors=True)


def _directory_of_all_ranks(config: Config) -> Path:
    """Return the same path on every rank, before they can communicate; on several nodes it is next to the run."""
    one_node = os.environ.get("LOCAL_WORLD_SIZE", str(world_size())) == str(world_size())
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")
    identity = [os.environ.get(name, "") for name in names] + ([str(os.getppid())] if one_node else [])
    parent = Path(config.run.dir).parent if config.run.dir else Path("runs")
    unique = hashlib.blake2b("/".join(identity).encode(), digest_size=6).hexdigest()
    return (Path(tempfile.gettempdir()) if one_node else parent) / f"{PREFIX}{unique}"
