"""From the command to the first update, beside timm's way of starting on the same images; and the quick commands.

    python benchmarks/startup.py [--data FOLDER] [--rounds 3] [--json]

Ours is launch/train.py with EMA and an offline W&B run; its first update is seen when metrics.jsonl has a line. timm's
is timm_train.py, which puts the parts of its train.py together; its first update is seen when it prints one. Both
programs are ended there.
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
from photographs import make_photographs
from programs import ROOT, time_until
from side_by_side import Row, compare, interleave, parser, quartiles, show
from train_end_to_end import Case, our_recipe

HERE = Path(__file__).parent
GOAL = 0.7
LIMIT = "importing torch, accelerate and datasets, which both sides need"
QUICK = {
    "launch/train.py --help": ["launch/train.py", "--help"],
    "launch/report.py vit_large_patch16_224": ["launch/report.py", "vit_large_patch16_224"],
}


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__, rounds=3)
    options.add_argument("--data", help="images, at 32 px; default: cut from scikit-learn's photographs")
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        data = args.data or make_photographs(Path(scratch, "small"), 4000, 32, 32)
        case = Case("small images", "vit_cifar_small", 32, 16, data)
        sides = {"ours": lambda: start_ours(case, Path(scratch)), "timm": lambda: start_timm(case)}
        values = interleave(sides, args.rounds)
    first = compare("to the first update", values, "ours", "timm", "s", goal=GOAL, better="lower", limit=LIMIT)
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
    """How long a command takes; there is no peer, so the ratio is to one second."""
    times = []
    for _ in range(args.rounds):
        start = time.perf_counter()
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    low, middle, high = quartiles(times)
    goal = 1.0 if "--help" in name else None
    return Row(name, middle, 1.0, "s", middle, low, high, goal=goal, better="lower")


if __name__ == "__main__":
    main()
