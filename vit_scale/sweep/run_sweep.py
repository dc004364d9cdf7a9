"""Run a sweep: create its directory, run its trials, then write the table, the plot and the best recipe."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from vit_scale.errors import UserError
from vit_scale.files import write_text
from vit_scale.sweep.command import build_command
from vit_scale.sweep.display import Display
from vit_scale.sweep.results import ranked, table, write_best
from vit_scale.sweep.search import Search, grid
from vit_scale.sweep.session import Session
from vit_scale.sweep.spec import Sweep

# Keys that must not change when a sweep is resumed.
FIXED = ("method", "metric", "parameters", "early_terminate", "command", "program")


def run_sweep(sweep: Sweep, directory: Path, *, count: int | None, options: Sequence[str] = (), seed: int = 0) -> int:
    """Run `sweep` in `directory` until it has `count` trials; returns the exit code.

    `options` (`a.b=value`) are passed to every trial. After an interruption, the same call resumes the sweep.
    """
    total = total_trials(sweep, count)
    build_command(sweep, {})  # fail on an unsupported macro before anything is written
    open_sweep_dir(directory, sweep, options)
    search = Search(sweep, directory, seed)
    done = search.done
    display = Display(sweep.metric.name, total, done)
    session = Session(sweep, directory, search, display, options)
    try:
        with display, signals_as_interrupt(signal.SIGTERM, signal.SIGHUP):
            session.run(total - done)
    except KeyboardInterrupt:
        conclude(session)
        display.info(f"Interrupted during trial {session.trial}. Rerun the same command to resume.")
        return 130
    except UserError:
        if search.best is not None:
            conclude(session)
        raise
    conclude(session)
    if search.best is None and session.failures:
        raise UserError(f"no trial has finished; the last one failed with: {[*session.failures.values()][-1]}")
    return 0


def total_trials(sweep: Sweep, count: int | None) -> int:
    """Return the total number of trials: `count`, otherwise the file's `run_cap`, at most the full grid."""
    size = len(grid(sweep)) if sweep.method == "grid" else None
    total = count or sweep.run_cap or size
    if total is None:
        raise UserError(f"a {sweep.method} sweep needs a number of trials: set --count N, or run_cap in {sweep.path}")
    return min(total, size) if size is not None else total


def open_sweep_dir(directory: Path, sweep: Sweep, options: Sequence[str]) -> None:
    """Create the sweep directory, or check that the existing one belongs to the same sweep."""
    fixed = {key: sweep.source.get(key) for key in FIXED} | {"options": list(options)}
    requested = json.loads(json.dumps(fixed, default=str))
    record = directory / "sweep.json"
    if not record.exists():
        directory.mkdir(parents=True, exist_ok=True)
        write_text(record, json.dumps(requested, indent=1) + "\n")
        return
    existing = json.loads(record.read_text())
    changed = [key for key in requested if existing.get(key) != requested[key]]
    if changed:
        raise UserError(
            f"{directory} contains a sweep with a different {', '.join(changed)}.\n"
            "Choose another directory with --dir, or delete it to start from scratch."
        )


def conclude(session: Session) -> None:
    """Print the ranked table; if a trial has finished, write the plot and the best recipe."""
    from vit_scale.sweep.plot import write_plot

    sweep, directory, display = session.sweep, session.directory, session.display
    results = ranked(session.search.study, sweep.metric.goal)
    if results:
        display.console.print(table(results, sweep))
    if session.failures:
        trials = ", ".join(f"trial {number}" for number in session.failures)
        display.info(f"{len(session.failures)} failed: {trials}. Rerun the same command to try them again.")
    if session.search.best is None:
        return
    plot = directory / "plot.html"
    write_plot(plot, results, sweep)
    best = write_best(directory, results[0], sweep, session.options, trials=session.search.done)
    display.info(f"Plot  {plot}\nBest  {best}  ({sweep.metric.name} {results[0].value:.4f})")


@contextmanager
def signals_as_interrupt(*signals: signal.Signals) -> Iterator[None]:
    """Treat these signals, sent by schedulers and closed terminals, like Ctrl-C within this context."""
    previous = {number: signal.signal(number, _interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
