"""Train a recipe: `accelerate launch launch/train.py RECIPE [section.option=value ...]`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from vit_scale.cli import Parser, run_main
from vit_scale.recipe import load_recipe, options_help, to_yaml

USAGE = "%(prog)s RECIPE [section.option=value ...] [--print-config] [--dry-run [--gpus N]]"
EXAMPLES = """examples:
  python launch/train.py recipes/digits.yaml
  python launch/train.py recipes/digits.yaml optim.lr=2e-3 run.dir=runs/try
  accelerate launch launch/train.py recipes/vit_large.yaml
"""


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The arguments, and the overrides of options."""
    parser = Parser(usage=USAGE, description="Train a recipe.", add_help=False)
    parser.add_argument("recipe", nargs="?", help="a YAML file, such as recipes/digits.yaml")
    parser.add_argument("--print-config", action="store_true", help="print the merged options as YAML and stop")
    parser.add_argument("--dry-run", action="store_true", help="print what would be trained and stop")
    parser.add_argument("--gpus", type=int, help="with --dry-run: plan for this many GPUs")
    parser.add_argument("-h", "--help", action="store_true", help="print this and every option, and stop")
    args, overrides = parser.parse_known_args(argv)
    if args.help:
        print(f"{parser.format_help()}\n{EXAMPLES}\noptions, with their defaults:\n{options_help()}")
        raise SystemExit(0)
    if args.recipe is None:
        parser.error("which recipe?")
    if "=" in args.recipe:
        parser.error(f"the recipe comes first, before {args.recipe}")
    return args, overrides


def main(argv: Sequence[str]) -> int:
    args, overrides = parse(argv)
    config = load_recipe(args.recipe, overrides)
    if args.print_config:
        print(to_yaml(config), end="")
        return 0
    if args.dry_run:
        from vit_scale.train.dry_run import dry_run

        return dry_run(config, args.recipe, args.gpus)
    from vit_scale.train import close_processes, run_recipe
    from vit_scale.train.lost import LOST_STATUS, leave_at_once

    status = run_recipe(config, args.recipe)
    if status == LOST_STATUS:
        leave_at_once()
    close_processes()
    return status


if __name__ == "__main__":
    run_main(main)
