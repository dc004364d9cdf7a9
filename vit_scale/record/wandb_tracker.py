"""The run as Weights & Biases sees it. A server that cannot be reached makes it an offline run, so nothing is lost."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vit_scale.config import Config
from vit_scale.errors import first_line
from vit_scale.recipe import to_tree
from vit_scale.record.trackers import SECONDS_TO_END, Say, Tracker
from vit_scale.tasks.classify.confusion import ConfusionTable

if TYPE_CHECKING:
    from PIL import Image

INIT_SECONDS = 10.0
"""How long a server may take to accept the run before it is recorded offline."""
FINISH_SECONDS = 15.0
UPLOAD_BYTES_PER_SECOND = 1e6
"""The slowest upload of an artifact that is waited for."""

Mode = Literal["online", "offline"]


class WandbTracker(Tracker):
    """One W&B run over all starts of a training run."""

    name = "W&B"

    def __init__(
        self,
        config: Config,
        folder: Path,
        *,
        run_id: str,
        resumed: bool,
        told_step: int,
        facts: dict[str, Any],
        say: Say,
    ) -> None:
        """`told_step`: the highest step that earlier starts may have logged; `facts`: what is known of the run when it
        starts; another thread may change them."""
        self.id = run_id
        self._config, self._folder, self._facts, self._say = config, folder, facts, say
        self._first_step = told_step + 1 if resumed else 0
        self._run: Any = None
        self._whole = True

    def load(self) -> None:
        import wandb  # noqa: F401

    def start(self) -> None:
        mode, problem = _choose_mode(self._config.track.wandb)
        if mode == "online":
            problem = self._start_online()
        if problem is not None:
            self._say(f"W&B {problem}. The run is recorded offline; training goes on.")
        if self._run is None:
            self._run = self._init("offline")
        self._run.define_metric("step", hidden=True)
        # No `summary="max"`: it makes a mapping of a metric's summary, where a sweep wants a number.
        self._run.define_metric("*", step_metric="step")

    def _start_online(self) -> str | None:
        """Why that failed, or None."""
        import wandb

        try:
            self._run = self._init("online")
        except Exception as error:  # noqa: BLE001 -- whatever the client raises
            wandb.teardown()  # its service would still hold the run's id
            return f"cannot be reached: {_reason(error)}"
        # The server knows best which steps it has.
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
                init_timeout=INIT_SECONDS,
                finish_timeout=FINISH_SECONDS,
                finish_timeout_raises=True,
                # By default a server that is away for some minutes is given up for the rest of the run, unsaid.
                x_file_stream_retry_max=100_000,
            ),
        )

    # ----------------------------------------------------------------------------------------------------- what is told

    def log(self, step: int, metrics: dict[str, float | None]) -> None:
        self._log(step, metrics)

    def check(self, check: dict[str, Any]) -> None:
        """Figures in the summary, shapes by stage as a table."""
        import wandb

        figures = ("matched", "equal", "reason", "params", "timm_params", "macs", "timm_macs", "differences")
        self._run.summary.update({"timm": {key: check[key] for key in figures}})
        rows = [[stage, str(shapes["ours"]), str(shapes["timm"])] for stage, shapes in check["stages"].items()]
        self._log(0, {"timm/shapes": wandb.Table(columns=["stage", "ours", "timm"], data=rows)})

    def picture(self, step: int, name: str, picture: Image.Image) -> None:
        import wandb

        self._log(step, {f"pictures/{name}": wandb.Image(picture)})

    def confusion(self, step: int, table: ConfusionTable) -> None:
        import wandb

        cells = table.pairs
        if table.counts is not None:
            cells = [(i, j, n) for i, row in enumerate(table.counts) for j, n in enumerate(row)]
        rows = [[table.classes[i], table.classes[j], n] for i, j, n in cells]
        columns: list[str | int] = ["Actual", "Predicted", "nPredictions"]
        shown: Any = wandb.Table(columns=columns, data=rows)
        if table.counts is not None:
            fields = {str(name): str(name) for name in columns}
            title = {"title": f"confusion, {table.weights} weights"}
            shown = wandb.plot_table("wandb/confusion_matrix/v1", shown, fields, title)
        self._log(step, {"confusion": shown})

    def weights(self, files: list[Path]) -> None:
        if not self._config.track.artifact:
            return
        import wandb

        artifact = wandb.Artifact(f"{self.id}-weights", type="model")
        for path in files:
            artifact.add_file(str(path))
        logged = self._run.log_artifact(artifact, aliases=["final"])
        if not self._run.offline:
            logged.wait(timeout=int(self.seconds_to_end() - FINISH_SECONDS))

    def summarize(self, summary: dict[str, Any]) -> None:
        self._run.summary.update({k: v for k, v in summary.items() if isinstance(v, int | float | str)})

    def finish(self) -> None:
        self._whole = False
        self._run.finish(exit_code=0)
        self._whole = self._run.offline or not _upload_failed(Path(self._run.settings.log_internal))

    def seconds_to_end(self) -> float:
        files = self._folder.glob("model*.safetensors") if self._config.track.artifact else ()
        return SECONDS_TO_END + sum(path.stat().st_size for path in files) / UPLOAD_BYTES_PER_SECOND

    def sync_command(self) -> str | None:
        """What uploads all that the server does not have; None where it has everything."""
        offline = sorted((self._folder / "wandb").glob(f"offline-run-*-{self.id}"))
        folders = [folder for folder in offline if not any(folder.glob("*.synced"))]
        options = []
        if self._run is not None and not self._run.offline and not self._whole:
            folders.append(Path(self._run.dir).parent)
            options.append("--include-online")
        return shlex.join(["wandb", "sync", *options, *map(os.path.relpath, folders)]) if folders else None

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        """A killed run may have told of steps beyond its last checkpoint; W&B's history cannot go back."""
        if step >= self._first_step:
            self._run.log({"step": step, **values}, step=step)


_FACTS = (
    "model", "params", "macs", "strategy", "precision", "processes", "timm_check", "peak_flops", "peak_source",
)  # fmt: skip


def is_disabled(asked: str) -> bool:
    """Whether W&B is to be left alone, by `track.wandb` or, where that is `auto`, by the environment."""
    return asked == "disabled" or (asked == "auto" and os.environ.get("WANDB_MODE") == "disabled")


def choose_run_id(before: str | None) -> str:
    """The id of the W&B run: what a sweep's agent or the user has set, that of earlier starts, or a new one."""
    return os.environ.get("WANDB_RUN_ID") or before or secrets.token_hex(4)


def _choose_mode(asked: str) -> tuple[Mode, str | None]:
    """What to start in, and why it is not what was asked for; never a prompt."""
    mode = os.environ.get("WANDB_MODE") if asked == "auto" else asked
    if mode in ("offline", "dryrun"):
        return "offline", None
    import wandb

    try:
        logged_in = wandb.login(prompt=False, verify=False)
    except Exception as error:  # noqa: BLE001 -- a key that is none
        return "offline", f"does not take the key: {first_line(error)}"
    if logged_in:
        return "online", None
    return "offline", "has no key here (`wandb login` gives it one)" if mode == "online" else None


def _upload_failed(log: Path) -> bool:
    """Whether the client gave up on the server, as it does where its key is refused: it tells nobody but its log."""
    try:
        return "filestream: fatal error" in log.read_text(errors="replace")
    except OSError:
        return False


def _reason(error: Exception) -> str:
    """The client's message in a few words."""
    text = str(error).strip()
    if "error 401" in text or "error 403" in text:
        return "it refuses the key (`wandb login --relogin` sets another)"
    last = text.splitlines()[-1] if text else type(error).__name__
    if last.endswith("context deadline exceeded"):
        return f"no answer in {INIT_SECONDS:.0f} s"
    return last.rpartition("retrying: ")[2].rstrip(".")[:200]
