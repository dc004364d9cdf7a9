"""`vit-scale init` and `launch/init.py`: write a recipe for a dataset."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vit_scale.cli import Parser, command_line
from vit_scale.errors import UserError
from vit_scale.launcher import silence_libraries
from vit_scale.recipe import build_config, load_recipe, to_tree
from vit_scale.record.terminal import Terminal

EXAMPLES = """examples:
  python launch/init.py photos                            # photos/cat/1.jpg, photos/dog/2.jpg, ...
  python launch/init.py photos --minutes 60 --out long.yaml
  python launch/init.py photos data.labels=labels.csv     # any option of section data
  python launch/init.py uoft-cs/cifar10                   # any data.source

The recipe is a suggestion for this system: it fits the time, and says why in comments. Edit it as you like.
"""


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line into arguments and options of the data."""
    parser = Parser(
        usage="%(prog)s FOLDER [data.option=value ...] [--out RECIPE.yaml] [--minutes 10] [--force]",
        description="Look at a dataset and at this system, and write a recipe that trains on it in a given time.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="FOLDER", help="one subdirectory of images per class; or any data.source")
    parser.add_argument("--out", metavar="RECIPE.yaml", help="output file (default: recipes/<name of the folder>.yaml)")
    parser.add_argument("--minutes", type=float, default=10.0, help="time budget of the run (default: %(default)g)")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    args, options = parser.parse_known_args(argv)
    if not (args.minutes > 0 and math.isfinite(args.minutes)):
        parser.error(f"--minutes {args.minutes:g}: must be greater than 0")
    for option in options:
        if not option.removeprefix("--").startswith("data.") or "=" not in option:
            parser.error(f"{option}: expected an option of the data such as data.labels=labels.csv; edit the recipe")
    return args, options


def main(argv: Sequence[str]) -> int:
    """Write the recipe and print the next commands."""
    args, options = parse(argv)
    out = Path(args.out) if args.out else default_path(args.source)
    if out.suffix not in (".yaml", ".yml"):
        raise UserError(f"--out {out}: the name must end in .yaml")
    if out.exists() and not args.force:
        raise UserError(f"{out} already exists: choose another file with --out, or overwrite it with --force")
    data = data_options(args.source, options)
    silence_libraries()
    terminal = Terminal(enabled=True)
    terminal.info(f"Reading {args.source} ...")
    with terminal.phase("Loading libraries"):
        from vit_scale.plan.init_recipe import init_recipe
        from vit_scale.plan.write_recipe import write_recipe
        from vit_scale.train.open_run import choose_run_dir

    suggested = init_recipe(data, args.minutes, terminal)
    for warning in suggested.facts.warnings():
        terminal.info(f"Warning: {warning}")
    write_recipe(out, suggested.text)
    terminal.info(f"\nWrote {out}:\n\n{suggested.text}")
    run_dir = choose_run_dir(load_recipe(out), str(out))
    terminal.info("\n".join(next_commands(out, run_dir, suggested.machine.devices)))
    return 0


def data_options(source: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the section `data` of the recipe as far as the user chose it; raises `UserError` for a wrong value."""
    if Path(source).is_file():
        raise UserError(f"{source}: is a file; expected a directory with one subdirectory of images per class")
    config = build_config({"data": {"source": source}, "schedule": {"epochs": 1}}, overrides)
    if config.data.streaming:
        raise UserError("data.streaming = true: the images of a stream cannot be counted; set it in the recipe")
    names = ["source", *(option.partition("=")[0].removeprefix("--").removeprefix("data.") for option in overrides)]
    return {name: to_tree(config)["data"][name] for name in dict.fromkeys(names)}


def default_path(source: str) -> Path:
    """Return `recipes/<name>.yaml`, or `<name>.yaml` if there is no directory recipes/."""
    path = Path(source).expanduser()
    name = path.resolve().name if path.exists() else source.rstrip("/").rsplit("/", 1)[-1]
    name = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "recipe"
    return (Path("recipes") if Path("recipes").is_dir() else Path()) / f"{name}.yaml"


def next_commands(out: Path, run_dir: Path, devices: int) -> list[str]:
    """Return the commands to run next, with their purpose; `run_dir`: of the next run of the recipe `out`."""
    launcher = ("accelerate", "launch") if devices > 1 else ("python",)
    commands = {
        command_line("train", str(out), launcher=launcher): "train",
        command_line("train", str(out), "--try", launcher=launcher): "only try it: a few steps, evaluate, save, resume",
        command_line("eval", str(run_dir)): "metrics by class, after training",
    }
    width = max(map(len, commands))
    return ["Next", *(f"  {command:<{width}}  # {purpose}" for command, purpose in commands.items())]
