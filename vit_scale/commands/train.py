"""`vit-scale train` and `launch/train.py`: train a recipe, or plan the run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from vit_scale.cli import Parser
from vit_scale.recipe import load_recipe, options_help, to_yaml

USAGE = (
    "%(prog)s RECIPE [section.option=value ...] [--print-config] [--list-checkpoints] [--try [N]] "
    "[--dry-run [--gpus N] [--gpu TYPE]]"
)
EXAMPLES = """examples:
  python launch/train.py recipes/digits.yaml
  python launch/train.py recipes/digits.yaml optim.lr=2e-3 run.dir=runs/lr-2e-3
  accelerate launch launch/train.py recipes/vit_large.yaml
  python launch/train.py recipes/vit_large.yaml --try
  python launch/train.py recipes/vit_large.yaml schedule.steps=20
  python launch/train.py recipes/vit_large.yaml --dry-run --gpus 64 --gpu H100
  python launch/train.py recipes/vit_large.yaml --dry-run --gpus 8 --gpu-memory 48 --gpu-tflops 181
  python launch/train.py recipes/digits.yaml --list-checkpoints
  python launch/train.py recipes/digits.yaml run.resume=step-00000600

if installed: `vit-scale train`, or `accelerate launch -m vit_scale train` for multiple processes
"""

PLANNING = ("gpus", "gpu", "gpu_memory", "gpu_tflops", "mfu", "images", "json")
"""Flags that require --dry-run."""

AUTO = "auto"


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line into arguments and option overrides."""
    parser = Parser(usage=USAGE, description="Train a recipe.", add_help=False)
    parser.add_argument("recipe", nargs="?", help="YAML file, e.g. recipes/digits.yaml")
    parser.add_argument("--print-config", action="store_true", help="print the merged options as YAML and exit")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the plan (memory, time, communication, ...) and exit"
    )
    parser.add_argument(
        "--list-checkpoints",
        action="store_true",
        help="print the checkpoints of the recipe's latest run, or of a run directory given instead, and exit",
    )
    parser.add_argument(
        "--try",
        dest="trial_steps",
        metavar="N",
        help="take N steps (default: 20, fewer if slow), evaluate, save and resume in a temporary directory, and exit; "
        "synthetic images replace data that are not on this system",
    )
    planning = parser.add_argument_group("with --dry-run")
    planning.add_argument("--gpus", type=int, metavar="N", help="number of GPUs")
    planning.add_argument("--gpu", metavar="TYPE", help="GPU type, e.g. H100 or 'A100 40GB'")
    planning.add_argument("--gpu-memory", type=float, metavar="GB", help="memory of a GPU that is not in the table")
    planning.add_argument(
        "--gpu-tflops", type=float, metavar="TFLOPS", help="its peak dense bf16 TFLOP/s; --gpu is then its name"
    )
    planning.add_argument("--mfu", type=float, help="assumed MFU (fraction of peak FLOP/s), e.g. 0.4")
    planning.add_argument(
        "--images", type=int, metavar="N", help="number of training images, for sources of unknown size"
    )
    planning.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("-h", "--help", action="store_true", help="print this help with all options and exit")
    args, overrides = parser.parse_known_args(_with_trial_steps(argv))
    if args.help:
        print(f"{parser.format_help()}\n{EXAMPLES}\nrecipe options with their defaults:\n{options_help()}")
        raise SystemExit(0)
    if args.recipe is None:
        parser.error("no recipe given")
    for name in PLANNING:
        if getattr(args, name) and not args.dry_run:
            parser.error(f"--{name.replace('_', '-')} requires --dry-run")
    if args.trial_steps is not None:
        if args.dry_run:
            parser.error("--try and --dry-run are mutually exclusive")
        if args.trial_steps != AUTO and not (args.trial_steps.isdecimal() and int(args.trial_steps) >= 2):
            parser.error(f"--try {args.trial_steps}: the number of steps must be at least 2")
    if "=" in args.recipe:
        parser.error(f"the recipe must come first, before {args.recipe}")
    return args, overrides


def _with_trial_steps(argv: Sequence[str]) -> list[str]:
    """Give `--try` its default unless a number follows: the next word may be the recipe or an option."""
    following = [*argv[1:], ""]
    return [
        f"--try={AUTO}" if word == "--try" and not after.lstrip("-").isdecimal() else word
        for word, after in zip(argv, following, strict=False)
    ]


def main(argv: Sequence[str]) -> int:
    """Read the recipe and train it."""
    args, overrides = parse(argv)
    if args.list_checkpoints:
        from vit_scale.commands.list_checkpoints import list_checkpoints

        return list_checkpoints(args.recipe, overrides)
    config = load_recipe(args.recipe, overrides)
    if args.print_config:
        print(to_yaml(config), end="")
        return 0
    if args.dry_run:
        from vit_scale.plan.dry_run import dry_run

        described = {"gpu_memory": args.gpu_memory, "gpu_tflops": args.gpu_tflops}
        options = {"mfu": args.mfu, "images": args.images, "as_json": args.json}
        return dry_run(config, args.recipe, args.gpus, args.gpu, **described, **options)
    if args.trial_steps is not None:
        from vit_scale.trial.trial_run import try_recipe

        status = try_recipe(config, args.recipe, None if args.trial_steps == AUTO else int(args.trial_steps))
    else:
        from vit_scale.train.run_recipe import run_recipe

        status = run_recipe(config, args.recipe)
    # Not before the run: they import torch, and the run starts the check against timm in the background first.
    from vit_scale.strategies.processes import close_processes
    from vit_scale.strategies.rank_failure import RANK_FAILURE_EXIT_CODE, exit_immediately

    if status == RANK_FAILURE_EXIT_CODE:
        exit_immediately()
    close_processes()
    return status
