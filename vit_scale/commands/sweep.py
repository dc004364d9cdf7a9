"""`vit-scale sweep` and `launch/sweep.py`: search hyperparameters of a recipe, without an account."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from vit_scale.cli import Parser
from vit_scale.errors import UserError

USAGE = "%(prog)s SWEEP [section.option=value ...] [--count N] [--dir DIR] [--seed N]"
EXAMPLES = """examples:
  python launch/sweep.py recipes/sweeps/lr.yaml --count 8
  python launch/sweep.py recipes/sweeps/lr.yaml --count 8 schedule.epochs=10 --dir runs/sweeps/lr-short
  python launch/sweep.py recipes/sweeps/drop_path.yaml

Sweep files use the W&B format: `wandb sweep FILE` and `wandb agent ID` run the same sweep on many nodes.
Ctrl-C saves and stops; rerun the same command to resume. The sweep directory contains
  best.yaml      the best trial as a recipe         trial-000/ ...   the run directory of each trial
  plot.html      the metric over each parameter     study.db         the search as an Optuna study
"""


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line into arguments and options for all trials."""
    parser = Parser(
        usage=USAGE,
        description="Search hyperparameters by grid, random or Bayesian search, one trial at a time.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sweep", help="sweep file, e.g. recipes/sweeps/lr.yaml")
    parser.add_argument(
        "--count", type=int, help="total number of trials (default: run_cap of the file, or the full grid)"
    )
    parser.add_argument("--dir", help="sweep directory (default: runs/sweeps/<file name>)")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the search (default: %(default)s)")
    args, options = parser.parse_known_args(argv)
    if args.count is not None and args.count < 1:
        raise UserError(f"--count {args.count}: must be at least 1")
    return args, options


def main(argv: Sequence[str]) -> int:
    """Load the sweep file and run its trials."""
    args, options = parse(argv)
    from vit_scale.sweep.run_sweep import run_sweep
    from vit_scale.sweep.spec import load_sweep

    sweep = load_sweep(args.sweep, options)
    folder = Path(args.dir or Path("runs/sweeps") / Path(args.sweep).stem)
    return run_sweep(sweep, folder, count=args.count, options=options, seed=args.seed)
