"""The command `vit-scale`: one word for each of the programs in launch/, which call the same functions."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vit_scale.errors import UserError


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
    from vit_scale.cli import run_main

    run_main(dispatch)


def dispatch(argv: Sequence[str]) -> int:
    """`argv` is the command's name and its arguments."""
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0
    if name == "--version":
        from vit_scale import __version__

        print(f"vit_scale {__version__}")
        return 0
    command = find_command(name)
    # Usage texts begin with what was typed.
    sys.argv[0] = f"vit-scale {name}"
    return _main_of(command)([*command.arguments, *rest])


def find_command(name: str) -> Command:
    """The command of this name, or a UserError with the nearest one."""
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
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
