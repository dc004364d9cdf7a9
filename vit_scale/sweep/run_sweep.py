"""A sweep from start to end: its folder, its trainings, then the table, the plot and the best recipe."""

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

# Of a sweep that is gone on with, these may not have changed.
FIXED = ("method", "metric", "parameters", "early_terminate", "command", "program")


def run_sweep(sweep: Sweep, folder: Path, *, count: int | None, options: Sequence[str] = (), seed: int = 0) -> int:
    """Run `sweep` in `folder` until it has `count` trainings; returns the exit status.

    `options` (`a.b=value`) go to every training. Interrupted, the same call goes on where it was.
    """
    wanted = how_many(sweep, count)
    build_command(sweep, {})  # a macro that is not supported is found before anything is written
    open_folder(folder, sweep, options)
    search = Search(sweep, folder, seed)
    done = search.done
    display = Display(sweep.metric.name, wanted, done)
    session = Session(sweep, folder, search, display, options)
    try:
        with display, ending_like_ctrl_c(signal.SIGTERM, signal.SIGHUP):
            session.run(wanted - done)
    except KeyboardInterrupt:
        conclude(session)
        display.say(f"Interrupted in trial {session.trial}. The same command goes on with it.")
        return 130
    except UserError:
        if search.best is not None:
            conclude(session)
        raise
    conclude(session)
    if search.best is None and session.failures:
        raise UserError(f"no training has finished; the last failed with: {[*session.failures.values()][-1]}")
    return 0


def how_many(sweep: Sweep, count: int | None) -> int:
    """Trainings that are wanted in all: as asked, else the file's `run_cap`, at most the whole grid."""
    size = len(grid(sweep)) if sweep.method == "grid" else None
    wanted = count or sweep.run_cap or size
    if wanted is None:
        raise UserError(f"how many trainings? Give --count N, or run_cap in {sweep.path}; {sweep.method} has no end")
    return min(wanted, size) if size is not None else wanted


def open_folder(folder: Path, sweep: Sweep, options: Sequence[str]) -> None:
    """Make the sweep's folder, or make sure that the one that is there is of the same sweep."""
    fixed = {key: sweep.source.get(key) for key in FIXED} | {"options": list(options)}
    here = json.loads(json.dumps(fixed, default=str))
    record = folder / "sweep.json"
    if not record.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_text(record, json.dumps(here, indent=1) + "\n")
        return
    there = json.loads(record.read_text())
    changed = [key for key in here if there.get(key) != here[key]]
    if changed:
        raise UserError(
            f"{folder} holds a sweep that differs in {', '.join(changed)}.\n"
            "Choose another folder with --dir, or remove that one to start anew."
        )


def conclude(session: Session) -> None:
    """The ranked table, and of a sweep with a finished training the plot and the best recipe."""
    from vit_scale.sweep.plot import write_plot

    sweep, folder, display = session.sweep, session.folder, session.display
    results = ranked(session.search.study, sweep.metric.goal)
    if results:
        display.console.print(table(results, sweep))
    if session.failures:
        trials = ", ".join(f"trial {number}" for number in session.failures)
        display.say(f"{len(session.failures)} failed: {trials}. The same command tries again in their place.")
    if session.search.best is None:
        return
    plot = folder / "plot.html"
    write_plot(plot, results, sweep)
    best = write_best(folder, results[0], sweep, session.options, trainings=session.search.done)
    display.say(f"Plot  {plot}\nBest  {best}  ({sweep.metric.name} {results[0].value:.4f})")


@contextmanager
def ending_like_ctrl_c(*signals: signal.Signals) -> Iterator[None]:
    """While in context, these signals, of schedulers and of a closed terminal, are what Ctrl-C is."""
    previous = {number: signal.signal(number, _interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
