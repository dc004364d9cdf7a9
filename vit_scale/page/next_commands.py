"""What to type to have a run again, to go on with it, and to look closer."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from vit_scale.page.runs import PageRun


@dataclass(frozen=True)
class Command:
    """A line for the shell and what it is for."""

    line: str
    purpose: str


def commands(run: PageRun) -> list[Command]:
    """In the order in which they are wanted; from the folder that the page was written in."""
    folder, config = str(run.folder), str(run.folder / "config.yaml")
    train = [*_launcher(run), "launch/train.py", config]
    found = [_checkout(run)]
    found.append(Command(shlex.join([*train, f"run.dir={folder}-again"]), "train it again with the same options"))
    if not run.finished:
        found.append(Command(shlex.join([*train, f"run.dir={folder}"]), "go on where it stopped"))
    if offline := sorted(map(str, run.folder.glob("wandb/offline-run-*"))):
        found.append(Command(shlex.join(["wandb", "sync", *offline]), "upload it to W&B"))
    found.append(Command(shlex.join(["python", "launch/show_batch.py", config]), "what the model saw"))
    found.append(Command(shlex.join(["python", "launch/report.py", config]), "its parameters, MACs and memory"))
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
    changed = ", which had changes that were not committed" if clean != commit else ""
    return Command(shlex.join(["git", "checkout", clean]), f"the code of this run{changed}")
