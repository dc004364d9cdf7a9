"""Entry points: argument parsing, exit status, and the `vit-scale` command table."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vit_scale.errors import UserError, did_you_mean
from vit_scale.launcher import adopt_launcher


def run_main(main: Callable[[Sequence[str]], int]) -> None:
    """Run `main(argv)` and exit with its status; a `UserError` is a message on stderr and status 2."""
    adopt_launcher()
    try:
        status = main(sys.argv[1:])
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
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
    """argparse, whose errors are `UserError`s."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{message}\n{self.format_usage().strip()}")


class Command(NamedTuple):
    """Where a command's `main(argv)` lives, what it does, and what stands in front of its arguments."""

    module: str
    summary: str
    arguments: tuple[str, ...] = ()


COMMANDS = {
    "train": Command("vit_scale.commands.train", "train a recipe"),
    "plan": Command("vit_scale.commands.train", "say what a recipe would train, and in what time", ("--dry-run",)),
    "eval": Command("vit_scale.commands.eval", "accuracy, confusion and calibration of a run or a model"),
    "predict": Command("vit_scale.commands.predict", "classify pictures with a run"),
    "export": Command("vit_scale.commands.export", "a run's model for timm, ONNX, torch.export or the hub"),
    "show": Command("vit_scale.commands.show_run", "a page with the curves and pictures of runs"),
    "batch": Command("vit_scale.commands.show_batch", "a picture of what the model receives"),
    "sweep": Command("vit_scale.commands.sweep", "search over options of a recipe"),
    "report": Command("vit_scale.commands.report", "parameters, MACs and memory of models"),
}
USAGE = "usage: vit-scale COMMAND [arguments ...]        vit-scale COMMAND --help"


def main() -> None:
    """Run the command that the first argument names; exits with its status."""
    run_main(dispatch)


def dispatch(argv: Sequence[str]) -> int:
    """`argv` is the command's name and its arguments."""
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"vit_scale {importlib.metadata.version('vit_scale')}")
        return 0
    command = find_command(name)
    # Usage texts begin with what was typed.
    sys.argv[0] = f"vit-scale {name}"
    return _main_of(command)([*command.arguments, *rest])


def find_command(name: str) -> Command:
    """The command of this name, or a UserError with the nearest one."""
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or f"there are {', '.join(COMMANDS)}"
        raise UserError(f"{name}: no such command; {hint}\n{USAGE}")
    return COMMANDS[name]


def _main_of(command: Command) -> Callable[[Sequence[str]], int]:
    return importlib.import_module(command.module).main


def _help() -> str:
    lines = [f"  {name:<9}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            USAGE,
            "",
            "Train Vision Transformers, from one CPU to many GPU nodes.",
            "",
            *lines,
            "",
            "On many processes: accelerate launch -m vit_scale COMMAND [arguments ...]",
        ]
    )
