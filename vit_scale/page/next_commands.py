"""Commands that reproduce, resume and inspect a run."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from vit_scale.cli import command_line
from vit_scale.page.runs import PageRun


@dataclass(frozen=True)
class Command:
    """A shell command and its purpose."""

    line: str
    purpose: str


def commands(run: PageRun) -> list[Command]:
    """Return commands to run from the directory in which the page was written."""
    folder, config = str(run.folder), str(run.folder / "config.yaml")

    def train(run_dir: str) -> str:
        return command_line("train", config, f"run.dir={run_dir}", launcher=_launcher(run))

    found = [_checkout(run), Command(train(f"{folder}-again"), "train again with the same options")]
    if not run.finished:
        found.append(Command(train(folder), "resume"))
    if offline := sorted(map(str, run.folder.glob("wandb/offline-run-*"))):
        found.append(Command(shlex.join(["wandb", "sync", *offline]), "upload to W&B"))
    found.append(Command(command_line("batch", config), "show training images after augmentation"))
    found.append(Command(command_line("report", config), "report parameters, MACs and memory"))
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
