"""`vit-scale train` and `launch/train.py`: train a recipe, or plan the run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from vit_scale.cli import Parser
from vit_scale.recipe import load_recipe, options_help, to_yaml

USAGE = "%(prog)s RECIPE [section.option=value ...] [--print-config] [--dry-run [--gpus N] [--gpu TYPE]]"
EXAMPLES = """examples:
  python launch/train.py recipes/digits.yaml
  python launch/train.py recipes/digits.yaml optim.lr=2e-3 run.dir=runs/lr-2e-3
  accelerate launch launch/train.py recipes/vit_large.yaml
  python launch/train.py recipes/vit_large.yaml --dry-run --gpus 64 --gpu H100

if installed: `vit-scale train`, or `accelerate launch -m vit_scale train` for multiple processes
"""

PLANNING = ("gpus", "gpu", "mfu", "images", "json")
"""Flags that require --dry-run."""


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line into arguments and option overrides."""
    parser = Parser(usage=USAGE, description="Train a recipe.", add_help=False)
    parser.add_argument("recipe", nargs="?", help="YAML file, e.g. recipes/digits.yaml")
    parser.add_argument("--print-config", action="store_true", help="print the merged options as YAML and exit")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the plan (memory, time, communication, ...) and exit"
    )
    planning = parser.add_argument_group("with --dry-run")
    planning.add_argument("--gpus", type=int, metavar="N", help="number of GPUs")
    planning.add_argument("--gpu", metavar="TYPE", help="GPU type, e.g. H100 or 'A100 40GB'")
    planning.add_argument("--mfu", type=float, help="assumed MFU (fraction of peak FLOP/s), e.g. 0.4")
    planning.add_argument(
        "--images", type=int, metavar="N", help="number of training images, for sources of unknown size"
    )
    planning.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("-h", "--help", action="store_true", help="print this help with all options and exit")
    args, overrides = parser.parse_known_args(argv)
    if args.help:
        print(f"{parser.format_help()}\n{EXAMPLES}\nrecipe options with their defaults:\n{options_help()}")
        raise SystemExit(0)
    if args.recipe is None:
        parser.error("no recipe given")
    for name in PLANNING:
        if getattr(args, name) and not args.dry_run:
            parser.error(f"--{name} requires --dry-run")
    if "=" in args.recipe:
        parser.error(f"the recipe must come first, before {args.recipe}")
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
    from vit_scale.train.run_recipe import run_recipe

    status = run_recipe(config, args.recipe)
    # Not before the run: they import torch, and the run starts the check against timm in the background first.
    from vit_scale.strategies.processes import close_processes
    from vit_scale.strategies.rank_failure import RANK_FAILURE_EXIT_CODE, exit_immediately

    if status == RANK_FAILURE_EXIT_CODE:
        exit_immediately()
    close_processes()
    return status
