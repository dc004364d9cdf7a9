"""Those who are told of a run besides its own folder: W&B, TensorBoard, ...

Each lives in a thread of its own, so that a slow or silent server never holds up training, and whatever it raises
is said once. What trackers by accelerate's names need is here; W&B has more to show and is in `wandb_run.py`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vit_scale.config import Config
from vit_scale.errors import UserError, first_line
from vit_scale.recipe import flatten
from vit_scale.tasks.classify.confusion import ConfusionTable

if TYPE_CHECKING:
    from PIL import Image

Metrics = dict[str, float]
Say = Callable[[str], None]
Message = tuple[str, tuple[Any, ...]]
"""A method of a tracker and its arguments."""

SECONDS_TO_START = 3.0
"""How long an evaluation waits for a tracker that starts; a slower one goes on starting in the background."""
SECONDS_TO_END = 40.0
SECONDS_AFTER_A_CRASH = 5.0
MOST_WAITING = 10_000
"""A tracker that has fallen this many messages behind is given up."""
EXTRAS = ("check", "picture", "confusion", "weights")
"""Where one of these fails, the tracker still gets the numbers."""


class Tracker:
    """What a tracker may be told. All methods are called in one thread, in order, and may raise anything."""

    name: str

    def load(self) -> None:
        """Import what takes long to; called first."""

    def start(self) -> None:
        """Connect; called next."""

    def log(self, step: int, metrics: dict[str, float | None]) -> None:
        """Metrics of a step; those that are not finite are None."""

    def check(self, check: dict[str, Any]) -> None:
        """The comparison of the model with timm's, at the start of a new run."""

    def picture(self, step: int, name: str, picture: Image.Image) -> None:
        """A picture with its name in the run's folder."""

    def confusion(self, step: int, table: ConfusionTable) -> None:
        """Which classes are taken for which."""

    def weights(self, files: list[Path]) -> None:
        """The files of the final weights."""

    def summarize(self, summary: dict[str, Any]) -> None:
        """What is true of the run as a whole by now."""

    def finish(self) -> None:
        """Everything has been told."""

    def seconds_to_end(self) -> float:
        """How long the end of training may wait for all of this; asked in another thread."""
        return SECONDS_TO_END


class Teller:
    """Tells one tracker, in the background."""

    def __init__(self, tracker: Tracker, say: Say) -> None:
        self.tracker = tracker
        self._say = say
        self._broken = False
        self._said = False
        self._loaded, self._started = threading.Event(), threading.Event()
        self._messages: queue.Queue[Message | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name=f"tracker {tracker.name}", daemon=True)
        self._wait_until = 0.0
        self._first: Sequence[Message] = ()

    def start(self, first: Sequence[Message] = ()) -> None:
        """Let the tracker begin: it hears `first`, then what it was told until now."""
        if self._thread.ident is None:
            self._first = first
            self._thread.start()

    def wait_for_start(self) -> None:
        """Wait until the tracker is loaded and has started, but no longer than `SECONDS_TO_START` for the latter.

        Called before processes are forked: one that is forked while another thread imports finds the locks of those
        modules held for ever; while it starts a process, each could inherit the other's pipes.
        """
        self.start()
        self._loaded.wait()
        self._started.wait(max(0.0, self._wait_until - time.monotonic()))

    def tell(self, method: str, *values: Any) -> None:
        """Call `method` of the tracker, soon."""
        if self._broken:
            return
        try:
            self._messages.put_nowait((method, values))
        except queue.Full:
            self._give_up("does not answer")

    def close(self) -> None:
        """Tell all that is left, but wait no longer than the tracker may take."""
        self.tell("finish")
        self._end(self.tracker.seconds_to_end())
        if self._thread.is_alive():
            self._give_up("does not answer")

    def abandon(self) -> None:
        """Training has failed: pass on what was told so far, and say no more."""
        self._end(SECONDS_AFTER_A_CRASH)
        self._said = True

    def _end(self, seconds: float) -> None:
        self.start()
        with contextlib.suppress(queue.Full):
            self._messages.put_nowait(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self.tracker.load()
            self._wait_until = time.monotonic() + SECONDS_TO_START
            self._loaded.set()
            self.tracker.start()
            self._started.set()
            for first in self._first:
                self._pass_on(*first)
            while (message := self._messages.get()) is not None:
                self._pass_on(*message)
        except Exception as error:  # noqa: BLE001 -- whatever it is, training goes on
            self._give_up(f"cannot be used: {first_line(error)}")
        finally:
            self._loaded.set()
            self._started.set()

    def _pass_on(self, method: str, values: tuple[Any, ...]) -> None:
        try:
            getattr(self.tracker, method)(*values)
        except Exception as error:
            if method not in EXTRAS:
                raise
            self._say_once(f"does not take the {method}: {first_line(error)}")

    def _give_up(self, problem: str) -> None:
        self._broken = True
        self._say_once(problem)

    def _say_once(self, problem: str) -> None:
        if not self._said:
            self._say(f"{self.tracker.name} {problem}. Training goes on; metrics.jsonl has everything.")
        self._said = True


# ------------------------------------------------------------------------------------------------ accelerate's trackers


class AccelerateTracker(Tracker):
    """A tracker of accelerate by its name; it is told numbers only."""

    def __init__(self, name: str, config: Config, folder: Path, step: int) -> None:
        self.name = name
        self._config, self._folder, self._step = config, folder, step
        self._tracker: Any = None

    def start(self) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        kind = LOGGER_TYPE_TO_CLASS[self.name]
        # TensorBoard then forgets steps that a killed run had logged beyond its last checkpoint.
        forget = {"purge_step": self._step + 1} if self.name == "tensorboard" and self._step else {}
        if kind.requires_logging_directory:
            self._tracker = kind(self.name, self._folder, **forget)
        else:
            self._tracker = kind(self._config.track.project)
        self._tracker.start()
        if not self._step:
            options = flatten(self._config)
            plain = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in options.items()}
            self._tracker.store_init_configuration(plain)

    def log(self, step: int, metrics: dict[str, float | None]) -> None:
        self._tracker.log({key: value for key, value in metrics.items() if value is not None}, step=step)

    def finish(self) -> None:
        self._tracker.finish()


def check_trackers(names: tuple[str, ...]) -> None:
    """Raise `UserError` for a tracker that accelerate does not know or that is not installed."""
    if not names:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    installed = sorted({str(name) for name in get_available_trackers()} - {"wandb"})
    here = f"here there are: {', '.join(installed) or 'none'}"
    for name in names:
        if name == "wandb":
            raise UserError("track.trackers = ['wandb']: W&B has an option of its own, track.wandb")
        if name not in {str(known) for known in LOGGER_TYPE_TO_CLASS}:
            known = sorted({str(known) for known in LOGGER_TYPE_TO_CLASS} - {"wandb"})
            raise UserError(f"track.trackers: there is no {name!r}; accelerate knows {', '.join(known)}; {here}")
        if name not in installed:
            raise UserError(f"track.trackers: {name!r} is not installed; {here}")
