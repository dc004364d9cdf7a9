"""`vit-scale init` and `launch/init.py`: write a recipe for a dataset."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from vit_scale.cli import Parser
from vit_scale.errors import UserError

EXAMPLES = """examples:
  python launch/init.py photos                            # photos/cat/1.jpg, photos/dog/2.jpg, ...
  python launch/init.py photos --minutes 60 --out long.yaml
  python launch/init.py uoft-cs/cifar10                   # any data.source

The recipe is a suggestion for this system: it fits the time, and says why in comments. Edit it as you like.
"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(
        usage="%(prog)s FOLDER [--out RECIPE.yaml] [--minutes 10] [--force]",
        description="Look at a dataset and at this system, and write a recipe that trains on it in a given time.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="FOLDER", help="one subdirectory of images per class; or any data.source")
    parser.add_argument("--out", metavar="RECIPE.yaml", help="output file (default: recipes/<name of the folder>.yaml)")
    parser.add_argument("--minutes", type=float, default=10.0, help="time budget of the run (default: %(default)g)")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    args = parser.parse_args(argv)
    if not (args.minutes > 0 and math.isfinite(args.minutes)):
        parser.error(f"--minutes {args.minutes:g}: must be greater than 0")
    return args


def main(argv: Sequence[str]) -> int:
    """Write the recipe and print the next commands."""
    args = parse(argv)
    out = Path(args.out) if args.out else default_path(args.source)
    if out.suffix not in (".yaml", ".yml"):
        raise UserError(f"--out {out}: the name must end in .yaml")
    if out.exists() and not args.force:
        raise UserError(f"{out} already exists: choose another file with --out, or overwrite it with --force")
    from vit_scale.launcher import silence_libraries

    silence_libraries()
    from vit_scale.plan.init_recipe import check_source, init_recipe
    from vit_scale.plan.write_recipe import write_recipe

    suggested = init_recipe(check_source(args.source), args.minutes, lambda text: print(text, flush=True))
    for warning in suggested.facts.warnings():
        print(f"Warning: {warning}")
    write_recipe(out, suggested.text)
    print(f"\nWrote {out}:\n\n{suggested.text}")
    print("\n".join(next_commands(out, suggested.machine.devices)))
    return 0


def default_path(source: str) -> Path:
    """Return `recipes/<name>.yaml`, or `<name>.yaml` if there is no directory recipes/."""
    path = Path(source).expanduser()
    name = path.resolve().name if path.exists() else source.rstrip("/").rsplit("/", 1)[-1]
    name = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "recipe"
    return (Path("recipes") if Path("recipes").is_dir() else Path()) / f"{name}.yaml"


def next_commands(out: Path, devices: int) -> list[str]:
    """Return the commands to run next, with their purpose."""
    recipe = shlex.quote(str(out))
    launcher = "accelerate launch" if devices > 1 else "python"
    commands = {
        f"{launcher} launch/train.py {recipe}": "train",
        f"{launcher} launch/train.py {recipe} --try": "only try it: a few steps, evaluate, save, resume",
        f"python launch/eval.py runs/{shlex.quote(out.stem)}": "metrics by class, after training",
    }
    width = max(map(len, commands))
    return ["Next", *(f"  {command:<{width}}  # {purpose}" for command, purpose in commands.items())]
