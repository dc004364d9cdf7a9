"""Time to first step vs. timm on the same images, and duration of short commands.

    python benchmarks/startup.py [--data SOURCE] [--rounds 3] [--json]

Ours is launch/train.py with EMA and an offline W&B run; its first step is done when metrics.jsonl has a line. timm's is
timm_train.py, which combines the components of its train.py; its first step is done when it prints a line. Both are
then killed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from compare import Row, compare, interleave, parser, quartiles, show
from photographs import make_photographs
from programs import ROOT, time_until
from train_end_to_end import Case, our_recipe

HERE = Path(__file__).parent
TARGET = 0.7
LIMIT = "importing torch, accelerate and datasets, which both sides require"
QUICK = {
    "launch/train.py --help": ["launch/train.py", "--help"],
    "launch/report.py vit_large_patch16_224": ["launch/report.py", "vit_large_patch16_224"],
}


def main() -> None:
    """Run the benchmark and print the results."""
    options = parser(__doc__, rounds=3)
    options.add_argument("--data", help="images, used at 32 px; default: crops of scikit-learn's photographs")
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        data = args.data or make_photographs(Path(scratch, "small"), 4000, 32, 32)
        case = Case("small images", "vit_cifar_small", 32, 16, data)
        sides = {"ours": lambda: start_ours(case, Path(scratch)), "timm": lambda: start_timm(case)}
        values = interleave(sides, args.rounds)
    first = compare("time to first step", values, "ours", "timm", "s", target=TARGET, better="lower", limit=LIMIT)
    show([first, *(quick(name, command, args) for name, command in QUICK.items())], args)


def start_ours(case: Case, scratch: Path) -> float:
    folder = Path(tempfile.mkdtemp(dir=scratch))
    recipe = our_recipe(case, 1000, folder / "run")
    recipe["run"]["log_every"] = 1
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    metrics = folder / "run/metrics.jsonl"
    command = [sys.executable, "launch/train.py", str(folder / "recipe.yaml")]
    return time_until(command, lambda: metrics.exists() and metrics.stat().st_size > 0)


def start_timm(case: Case) -> float:
    with tempfile.TemporaryFile() as out:
        command = [sys.executable, str(HERE / "timm_train.py"), "--data", case.data, "--batch", str(case.batch)]
        return time_until(command, lambda: os.fstat(out.fileno()).st_size > 0, stdout=out.fileno())


def quick(name: str, command: list[str], args: argparse.Namespace) -> Row:
    """Measure the duration of a command; without a baseline, the ratio is relative to one second."""
    times = []
    for _ in range(args.rounds):
        start = time.perf_counter()
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    low, middle, high = quartiles(times)
    target = 1.0 if "--help" in name else None
    return Row(name, middle, 1.0, "s", middle, low, high, target=target, better="lower")


if __name__ == "__main__":
    main()
