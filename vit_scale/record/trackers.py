"""Trackers: where a run is logged besides its own directory (W&B, TensorBoard, ...).

Trackers by accelerate's names are here; W&B shows more and is in wandb_tracker.py. Each runs in a thread
(background.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vit_scale.config import Config
from vit_scale.errors import UserError
from vit_scale.recipe import flatten
from vit_scale.tasks.task import Table

if TYPE_CHECKING:
    from PIL import Image

Metrics = dict[str, float]

SHUTDOWN_TIMEOUT_S = 40.0


class Tracker:
    """What a tracker may log. All methods are called in one thread, in order, and may raise anything."""

    name: str

    def load(self) -> None:
        """Import what takes long to import; called first."""

    def start(self) -> None:
        """Connect; called next."""

    def log(self, step: int, metrics: dict[str, float | None]) -> None:
        """Log the metrics of a step; values that are not finite are None."""

    def check(self, check: dict[str, Any]) -> None:
        """Log the check of the model against timm, at the start of a new run."""

    def image(self, step: int, name: str, image: Image.Image) -> None:
        """Log an image with its name in the run directory."""

    def table(self, step: int, table: Table, weights: str) -> None:
        """Log a table of the evaluated weights, `raw` or `ema`."""

    def weights(self, files: list[Path]) -> None:
        """Log the files of the final weights."""

    def summarize(self, summary: dict[str, Any]) -> None:
        """Log values that describe the run as a whole."""

    def finish(self) -> None:
        """Close; everything has been logged."""

    def shutdown_timeout(self) -> float:
        """Return how many seconds the end of training may wait for this tracker; called in another thread."""
        return SHUTDOWN_TIMEOUT_S


class AccelerateTracker(Tracker):
    """An accelerate tracker by name; it gets metrics only."""

    def __init__(self, name: str, config: Config, folder: Path, step: int) -> None:
        self.name = name
        self._config, self._folder, self._step = config, folder, step
        self._tracker: Any = None

    def start(self) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        kind = LOGGER_TYPE_TO_CLASS[self.name]
        # TensorBoard then drops steps that a killed run logged after its last checkpoint.
        purge = {"purge_step": self._step + 1} if self.name == "tensorboard" and self._step else {}
        if kind.requires_logging_directory:
            self._tracker = kind(self.name, self._folder, **purge)
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
    """Raise `UserError` for a tracker that accelerate does not support or that is not installed."""
    if not names:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    installed = sorted({str(name) for name in get_available_trackers()} - {"wandb"})
    here = f"installed: {', '.join(installed) or 'none'}"
    for name in names:
        if name == "wandb":
            raise UserError("track.trackers = ['wandb']: use track.wandb for W&B")
        if name not in {str(known) for known in LOGGER_TYPE_TO_CLASS}:
            known = sorted({str(known) for known in LOGGER_TYPE_TO_CLASS} - {"wandb"})
            raise UserError(f"track.trackers: unknown tracker {name!r}; accelerate supports {', '.join(known)}; {here}")
        if name not in installed:
            raise UserError(f"track.trackers: {name!r} is not installed; {here}")
