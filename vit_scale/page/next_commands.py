"""Commands that reproduce, resume and inspect a run."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from vit_scale.page.runs import PageRun


@dataclass(frozen=True)
class Command:
    """A shell command and its purpose."""

    line: str
    purpose: str


def commands(run: PageRun) -> list[Command]:
    """Return commands to run from the directory in which the page was written."""
    folder, config = str(run.folder), str(run.folder / "config.yaml")
    train = [*_launcher(run), "launch/train.py", config]
    found = [_checkout(run)]
    found.append(Command(shlex.join([*train, f"run.dir={folder}-again"]), "train again with the same options"))
    if not run.finished:
        found.append(Command(shlex.join([*train, f"run.dir={folder}"]), "resume"))
    if offline := sorted(map(str, run.folder.glob("wandb/offline-run-*"))):
        found.append(Command(shlex.join(["wandb", "sync", *offline]), "upload to W&B"))
    found.append(
        Command(shlex.join(["python", "launch/show_batch.py", config]), "show training images after augmentation")
    )
    found.append(Command(shlex.join(["python", "launch/report.py", config]), "report parameters, MACs and memory"))
    return [command for command in found if command is not None]


def _launcher(run: PageRun) -> list[str]:
    processes = run.summary.get("processes")
    if not isinstance(processes, int) or processes < 2:
        return ["python"]
    return ["accelerate", "launch", "--multi_gpu", "--num_processes", str(processes)]


def _checkout(run: PageRun) -> Command | None:
    commit = run.summary.get("git_commit")
    if not isinstance(commit, str):
        return None
    clean = commit.removesuffix("-dirty")
    changed = " (with uncommitted changes)" if clean != commit else ""
    return Command(shlex.join(["git", "checkout", clean]), f"check out the code of this run{changed}")
