"""Entry points: argument parsing, exit codes and the `vit-scale` command table."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from vit_scale.errors import RankError, UserError, did_you_mean
from vit_scale.launcher import adopt_launcher


def run_main(main: Callable[[Sequence[str]], int]) -> None:
    """Run `main(argv)` and exit with its status; a `UserError` is printed to stderr, once, and exits with code 2."""
    adopt_launcher()
    try:
        status = main(sys.argv[1:])
    except UserError as error:
        if os.environ.get("RANK", "0") == "0" or isinstance(error, RankError):
            print(f"error: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        status = 130
    except BrokenPipeError:  # `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    sys.exit(status)


class Parser(argparse.ArgumentParser):
    """Argument parser that raises `UserError`."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{message}\n{self.format_usage().strip()}")


class Command(NamedTuple):
    """Module that defines a command's `main(argv)`, one-line summary, and arguments to prepend."""

    module: str
    summary: str
    arguments: tuple[str, ...] = ()


COMMANDS = {
    "init": Command("vit_scale.commands.init", "write a recipe for a folder of images"),
    "train": Command("vit_scale.commands.train", "train a recipe"),
    "plan": Command("vit_scale.commands.train", "estimate time, memory and communication of a recipe", ("--dry-run",)),
    "eval": Command("vit_scale.commands.eval", "evaluate a run or a model: metrics, tables and figures of its task"),
    "predict": Command("vit_scale.commands.predict", "classify images with a run"),
    "probe": Command("vit_scale.commands.probe", "judge frozen features: k-NN and a linear probe"),
    "attention": Command("vit_scale.commands.attention", "look at what a model attends to: maps and statistics"),
    "export": Command("vit_scale.commands.export", "export a run's model to timm, ONNX, torch.export or the Hub"),
    "show": Command("vit_scale.commands.show_run", "write an HTML page with the curves and images of runs"),
    "batch": Command("vit_scale.commands.show_batch", "save a training batch as an image grid"),
    "sweep": Command("vit_scale.commands.sweep", "search hyperparameters of a recipe"),
    "doctor": Command("vit_scale.commands.doctor", "check whether training can be trusted on this machine"),
    "report": Command("vit_scale.commands.report", "report parameters, MACs and memory of models"),
}
USAGE = "usage: vit-scale COMMAND [arguments ...]        vit-scale COMMAND --help"


def main() -> None:
    """Run the command named by the first argument and exit with its status."""
    run_main(dispatch)


def dispatch(argv: Sequence[str]) -> int:
    """Run a command; `argv` is its name followed by its arguments. Returns the exit code."""
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"vit_scale {importlib.metadata.version('vit_scale')}")
        return 0
    command = find_command(name)
    # Usage texts start with the command as typed.
    sys.argv[0] = f"vit-scale {name}"
    return _main_of(command)([*command.arguments, *rest])


def command_line(name: str, *arguments: str, launcher: Sequence[str] = ("python",)) -> str:
    """Return command `name` as it works in the working directory: the script in launch/, or the installed command.

    `launcher`: what starts the script, for multiple processes.
    """
    command = COMMANDS[name]
    script = Path("launch", command.module.rpartition(".")[2]).with_suffix(".py")
    if script.is_file():
        words = [*launcher, str(script), *command.arguments]
    elif tuple(launcher) == ("python",) and shutil.which("vit-scale"):
        words = ["vit-scale", name]
    else:
        words = [*launcher, "-m", "vit_scale", name]
    return shlex.join([*words, *arguments])


def find_command(name: str) -> Command:
    """Return the command `name`; raises `UserError` with the nearest match if it is unknown."""
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or f"available: {', '.join(COMMANDS)}"
        raise UserError(f"{name}: unknown command; {hint}\n{USAGE}")
    return COMMANDS[name]


def _main_of(command: Command) -> Callable[[Sequence[str]], int]:
    return importlib.import_module(command.module).main


def _help() -> str:
    lines = [f"  {name:<11}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            USAGE,
            "",
            "Train Vision Transformers on anything from a single CPU to many GPU nodes.",
            "",
            *lines,
            "",
            "Multiple processes: accelerate launch -m vit_scale COMMAND [arguments ...]",
        ]
    )
