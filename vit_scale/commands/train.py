"""`vit-scale train` and `launch/train.py`: train a recipe, or say what would be trained."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from vit_scale.cli import Parser
from vit_scale.recipe import load_recipe, options_help, to_yaml

USAGE = "%(prog)s RECIPE [section.option=value ...] [--print-config] [--dry-run [--gpus N] [--gpu KIND]]"
EXAMPLES = """examples:
  python launch/train.py recipes/digits.yaml
  python launch/train.py recipes/digits.yaml optim.lr=2e-3 run.dir=runs/try
  accelerate launch launch/train.py recipes/vit_large.yaml
  python launch/train.py recipes/vit_large.yaml --dry-run --gpus 64 --gpu H100

installed: `vit-scale train` for `python launch/train.py`, `accelerate launch -m vit_scale train` for many processes
"""

PLANNING = ("gpus", "gpu", "mfu", "images", "json")
"""Flags that only a dry run understands."""


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The arguments, and the overrides of options."""
    parser = Parser(usage=USAGE, description="Train a recipe.", add_help=False)
    parser.add_argument("recipe", nargs="?", help="a YAML file, such as recipes/digits.yaml")
    parser.add_argument("--print-config", action="store_true", help="print the merged options as YAML and stop")
    parser.add_argument("--dry-run", action="store_true", help="print memory, time and all else of the plan and stop")
    planning = parser.add_argument_group("with --dry-run")
    planning.add_argument("--gpus", type=int, metavar="N", help="plan for this many GPUs")
    planning.add_argument("--gpu", metavar="KIND", help="of this kind, such as H100 or 'A100 40GB'")
    planning.add_argument("--mfu", type=float, help="share of their peak to reckon with, such as 0.4")
    planning.add_argument("--images", type=int, metavar="N", help="training images of a source that is not known")
    planning.add_argument("--json", action="store_true", help="print the plan for machines")
    parser.add_argument("-h", "--help", action="store_true", help="print this and every option, and stop")
    args, overrides = parser.parse_known_args(argv)
    if args.help:
        print(f"{parser.format_help()}\n{EXAMPLES}\noptions, with their defaults:\n{options_help()}")
        raise SystemExit(0)
    if args.recipe is None:
        parser.error("which recipe?")
    for name in PLANNING:
        if getattr(args, name) and not args.dry_run:
            parser.error(f"--{name} goes with --dry-run")
    if "=" in args.recipe:
        parser.error(f"the recipe comes first, before {args.recipe}")
    return args, overrides


def main(argv: Sequence[str]) -> int:
    """Read the recipe and train it."""
    args, overrides = parse(argv)
    config = load_recipe(args.recipe, overrides)
    if args.print_config:
        print(to_yaml(config), end="")
        return 0
    if args.dry_run:
        from vit_scale.plan.dry_run import dry_run

        return dry_run(config, args.recipe, args.gpus, args.gpu, mfu=args.mfu, images=args.images, as_json=args.json)
    from vit_scale.strategies.processes import close_processes
    from vit_scale.train.run_recipe import run_recipe

    status = run_recipe(config, args.recipe)
    from vit_scale.strategies.rank_failure import (
        RANK_FAILURE_EXIT_CODE,
        exit_immediately,
    )  # Imports torch; a run begins before that.

    if status == RANK_FAILURE_EXIT_CODE:
        exit_immediately()
    close_processes()
    return status
