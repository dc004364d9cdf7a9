"""`vit-scale sweep` and `launch/sweep.py`: search over options of a recipe, without an account."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from vit_scale.cli import Parser
from vit_scale.errors import UserError

USAGE = "%(prog)s SWEEP [section.option=value ...] [--count N] [--dir FOLDER] [--seed N]"
EXAMPLES = """examples:
  python launch/sweep.py recipes/sweeps/lr.yaml --count 8
  python launch/sweep.py recipes/sweeps/lr.yaml --count 8 schedule.epochs=10 --dir runs/sweeps/lr-short
  python launch/sweep.py recipes/sweeps/drop_path.yaml

A sweep file is W&B's: `wandb sweep FILE` and `wandb agent ID` run the same one on many machines.
Ctrl-C saves and stops; the same command goes on. The folder then has
  best.yaml      the best training as a recipe      trial-000/ ...   the run folder of each training
  plot.html      the metric over each parameter     study.db         the search, as an optuna study
"""


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The arguments, and options for all trainings."""
    parser = Parser(
        usage=USAGE,
        description="Search for the best options: grid, random or Bayesian, one training after another.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sweep", help="a sweep file, such as recipes/sweeps/lr.yaml")
    parser.add_argument("--count", type=int, help="trainings in all (default: the file's run_cap, or the whole grid)")
    parser.add_argument("--dir", help="folder of the sweep (default: runs/sweeps/<name of the file>)")
    parser.add_argument("--seed", type=int, default=0, help="of the search (default: %(default)s)")
    args, options = parser.parse_known_args(argv)
    if args.count is not None and args.count < 1:
        raise UserError(f"--count {args.count}: must be at least 1")
    return args, options


def main(argv: Sequence[str]) -> int:
    args, options = parse(argv)
    from vit_scale.sweep.run_sweep import run_sweep
    from vit_scale.sweep.spec import load_sweep

    sweep = load_sweep(args.sweep, options)
    folder = Path(args.dir or Path("runs/sweeps") / Path(args.sweep).stem)
    return run_sweep(sweep, folder, count=args.count, options=options, seed=args.seed)
