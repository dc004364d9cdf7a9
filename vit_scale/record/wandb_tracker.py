"""Weights & Biases. If the server is unreachable the run is logged offline, so that nothing is lost."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vit_scale.config import Config
from vit_scale.errors import first_line
from vit_scale.recipe import to_tree
from vit_scale.record.trackers import SHUTDOWN_TIMEOUT_S, Tracker
from vit_scale.tasks.task import Table

if TYPE_CHECKING:
    from PIL import Image

INIT_TIMEOUT_S = 10.0
"""How long a server may take to accept the run before it is logged offline."""
FINISH_TIMEOUT_S = 15.0
UPLOAD_BYTES_PER_SECOND = 1e6
"""The slowest upload of an artifact that is waited for."""

Mode = Literal["online", "offline"]


class WandbTracker(Tracker):
    """One W&B run over all launches of a training run."""

    name = "W&B"

    def __init__(
        self,
        config: Config,
        folder: Path,
        *,
        run_id: str,
        resumed: bool,
        last_logged_step: int,
        pending_step: int | None = None,
        facts: dict[str, Any],
        info: Callable[[str], None],
    ) -> None:
        """Prepare; nothing is sent before `start`.

        Args:
            config: the options.
            folder: the run directory.
            run_id: the id of the W&B run.
            resumed: whether earlier launches have used it.
            last_logged_step: the highest step that they may have logged.
            pending_step: a step whose evaluation was interrupted, and is logged later than its other metrics.
            facts: describe the run when it starts; another thread may change them.
            info: prints a line.
        """
        self.id = run_id
        self._config, self._folder, self._facts, self._info = config, folder, facts, info
        self._pending_step = pending_step
        self._first_step = last_logged_step + 1 if resumed else 0
        self._run: Any = None
        self._complete = True

    def load(self) -> None:
        import wandb  # noqa: F401

    def start(self) -> None:
        mode, problem = _choose_mode(self._config.track.wandb)
        if mode == "online":
            problem = self._start_online()
        if problem is not None:
            self._info(f"W&B {problem}. Logging offline; training continues.")
        if self._run is None:
            self._run = self._init("offline")
        self._run.define_metric("step", hidden=True)
        # No `summary="max"`: it makes a mapping of a metric's summary, where a sweep expects a number.
        self._run.define_metric("*", step_metric="step")

    def _start_online(self) -> str | None:
        """Return why it failed, or None."""
        import wandb

        try:
            self._run = self._init("online")
        except Exception as error:  # noqa: BLE001 -- whatever the client raises
            wandb.teardown()  # its service would still reserve the run id
            return f"is unreachable: {_reason(error)}"
        # The server knows which steps it has.
        self._first_step = self._run.starting_step
        return None

    def _init(self, mode: Mode) -> Any:
        import wandb

        track = self._config.track
        known = {key: self._facts[key] for key in ("versions", "git_commit") if key in self._facts}
        facts = {key: self._facts[key] for key in _FACTS if key in self._facts}
        return wandb.init(
            project=track.project,
            entity=track.entity,
            name=track.name or self._folder.resolve().name,
            group=track.group,
            tags=list(track.tags) or None,
            dir=self._folder,
            id=self.id,
            resume="allow",
            mode=mode,
            config=to_tree(self._config) | known | {"facts": facts},
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=FINISH_TIMEOUT_S,
                finish_timeout_raises=True,
                # By default the client silently gives up on a server that is unreachable for some minutes.
                x_file_stream_retry_max=100_000,
            ),
        )

    # -------------------------------------------------------------------------------------------------------- logging

    def log(self, step: int, metrics: dict[str, float | None]) -> None:
        self._log(step, metrics)

    def check(self, check: dict[str, Any]) -> None:
        """Log numbers to the summary and shapes per stage as a table."""
        import wandb

        numbers = ("matched", "equal", "reason", "params", "timm_params", "macs", "timm_macs", "differences")
        self._run.summary.update({"timm": {key: check[key] for key in numbers}})
        rows = [[stage, str(shapes["ours"]), str(shapes["timm"])] for stage, shapes in check["stages"].items()]
        self._log(0, {"timm/shapes": wandb.Table(columns=["stage", "ours", "timm"], data=rows)})

    def image(self, step: int, name: str, image: Image.Image) -> None:
        import wandb

        self._log(step, {f"pictures/{name}": wandb.Image(image)})

    def table(self, step: int, table: Table, weights: str) -> None:
        """Log rows as a W&B table; a matrix as W&B's confusion matrix."""
        import wandb

        if not table.matrix:
            columns: list[str | int] = [*table.columns]
            self._log(step, {table.name: wandb.Table(columns=columns, data=table.rows)})
            return
        names = table.columns
        cells = [[names[i], names[j], n] for i, row in enumerate(table.rows) for j, n in enumerate(row)]
        columns = ["Actual", "Predicted", "nPredictions"]
        fields = {str(name): str(name) for name in columns}
        title = {"title": f"{table.title}, {weights} weights"}
        shown = wandb.plot_table("wandb/confusion_matrix/v1", wandb.Table(columns=columns, data=cells), fields, title)
        self._log(step, {table.name: shown})

    def weights(self, files: list[Path]) -> None:
        if not self._config.track.artifact:
            return
        import wandb

        artifact = wandb.Artifact(f"{self.id}-weights", type="model")
        for path in files:
            artifact.add_file(str(path))
        logged = self._run.log_artifact(artifact, aliases=["final"])
        if not self._run.offline:
            logged.wait(timeout=int(self.shutdown_timeout() - FINISH_TIMEOUT_S))

    def summarize(self, summary: dict[str, Any]) -> None:
        self._run.summary.update({k: v for k, v in summary.items() if isinstance(v, int | float | str)})

    def finish(self) -> None:
        self._complete = False
        self._run.finish(exit_code=0)
        self._complete = self._run.offline or not _upload_failed(Path(self._run.settings.log_internal))

    def shutdown_timeout(self) -> float:
        files = self._folder.glob("*.safetensors") if self._config.track.artifact else ()
        return SHUTDOWN_TIMEOUT_S + sum(path.stat().st_size for path in files) / UPLOAD_BYTES_PER_SECOND

    def sync_command(self) -> str | None:
        """Return the command that uploads what the server does not have; None if it has everything."""
        offline = sorted((self._folder / "wandb").glob(f"offline-run-*-{self.id}"))
        folders = [folder for folder in offline if not any(folder.glob("*.synced"))]
        options = []
        if self._run is not None and not self._run.offline and not self._complete:
            folders.append(Path(self._run.dir).parent)
            options.append("--include-online")
        return shlex.join(["wandb", "sync", *options, *map(os.path.relpath, folders)]) if folders else None

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        """Skip steps that a killed run already logged after its last checkpoint: W&B's history cannot go back."""
        if step >= self._first_step or step == self._pending_step:
            self._run.log({"step": step, **values}, step=max(step, self._first_step))


_FACTS = (
    "model", "params", "macs", "strategy", "precision", "processes", "timm_check", "peak_flops", "peak_source",
)  # fmt: skip


def is_disabled(requested: str) -> bool:
    """Return whether W&B is disabled, by `track.wandb` or, if that is `auto`, by the environment."""
    return requested == "disabled" or (requested == "auto" and os.environ.get("WANDB_MODE") == "disabled")


def choose_run_id(before: str | None) -> str:
    """Return the W&B run id: set by a sweep agent or the user, used by earlier launches, or new."""
    return os.environ.get("WANDB_RUN_ID") or before or secrets.token_hex(4)


def _choose_mode(requested: str) -> tuple[Mode, str | None]:
    """Return the mode, and why it is not the requested one; never prompts."""
    mode = os.environ.get("WANDB_MODE") if requested == "auto" else requested
    if mode in ("offline", "dryrun"):
        return "offline", None
    import wandb

    try:
        logged_in = wandb.login(prompt=False, verify=False)
    except Exception as error:  # noqa: BLE001 -- a key that is none
        return "offline", f"rejects the API key: {first_line(error)}"
    if logged_in:
        return "online", None
    return "offline", "has no API key here (run `wandb login`)" if mode == "online" else None


def _upload_failed(log: Path) -> bool:
    """Return whether the client gave up on the server, as with a rejected API key: only its log says so."""
    try:
        return "filestream: fatal error" in log.read_text(errors="replace")
    except OSError:
        return False


def _reason(error: Exception) -> str:
    """Shorten the client's message."""
    text = str(error).strip()
    if "error 401" in text or "error 403" in text:
        return "the server rejects the API key (`wandb login --relogin` sets another)"
    last = text.splitlines()[-1] if text else type(error).__name__
    if last.endswith("context deadline exceeded"):
        return f"no response within {INIT_TIMEOUT_S:.0f} s"
    return last.rpartition("retrying: ")[2].rstrip(".")[:200]
