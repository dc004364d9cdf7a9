"""Throughput of two processes vs. one, with equal threads and images per process.

    python benchmarks/scaling.py [--rounds 2] [--strategy ddp] [--json]

Both run `accelerate launch` with the same recipe, alternately, on synthetic images without loading cost; on CPU over
gloo with one thread per process. The throughput is measured over the second half of the steps.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import yaml
from compare import compare, interleave, parser, program_peak, show, with_mfu
from programs import logged_rate, run_program

import vit_scale

TARGET = 1.8
LIMIT = "the all-reduce of gradients after each backward pass; on one CPU both processes share its memory and cache"


def main() -> None:
    """Run the benchmark and print the results."""
    options = parser(__doc__, rounds=2)
    options.add_argument("--model", default="vit_cifar_small")
    options.add_argument("--micro", type=int, default=32, help="batch size per process (default: %(default)s)")
    options.add_argument("--steps", type=int, default=16)
    options.add_argument("--strategy", default="ddp", help="for two processes (default: %(default)s)")
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        sides = {str(count): lambda count=count: rate(count, args, Path(scratch)) for count in (1, 2)}
        values = interleave(sides, args.rounds, warmup=0)
    case = f"{args.model}, {args.micro} images per process, {args.strategy}: two processes vs. one"
    row = compare(case, values, "2", "1", "images/s", target=TARGET, limit=LIMIT)
    show([with_mfu(row, vit_scale.create_model(args.model), program_peak(args.device))], args)


def rate(processes: int, args: argparse.Namespace, scratch: Path) -> float:
    """Return the images/s of `processes` processes."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    batch = args.micro * processes
    recipe = {
        "model": {"name": args.model},
        "data": {"source": "synthetic", "synthetic_images": 4 * batch, "workers": 0},
        "schedule": {"steps": args.steps},
        "batch": {"global": batch, "micro": args.micro},
        "parallel": {"strategy": args.strategy if processes > 1 else "auto"},
        "run": {"dir": str(folder / "run"), "log_every": args.steps // 2, "eval_every": 10**6, "save_every": 10**6},
        "track": {"wandb": "disabled"},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    launcher = [str(Path(sys.executable).with_name("accelerate")), "launch", "--num_processes", str(processes)]
    launcher += ["--multi_gpu"] if processes > 1 else []
    threads = {} if args.device == "cuda" else {"OMP_NUM_THREADS": "1"}
    run_program([*launcher, "launch/train.py", str(folder / "recipe.yaml")], threads)
    return logged_rate(folder / "run", args.steps)


if __name__ == "__main__":
    main()
