"""Whole training, images to updates: launch/train.py beside a loop built as timm's train.py is.

    python benchmarks/train_end_to_end.py [--data FOLDER] [--small FOLDER] [--rounds 3] [--json]

Both sides are programs of their own, started in turn, with the same images, model, batch, threads, augmentation
(random resized crop, `rand-m9-mstd0.5-inc1`, erasing), MixUp, CutMix, label smoothing, AdamW, EMA and drop path; ours
also guards against non-finite values, logs, and writes an offline W&B run. The first half of the updates warms up; the
rate is that of the second, at whose end both must have come to about the same loss. Starting is startup.py's. Without
folders, images are cut from scikit-learn's photographs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from photographs import make_photographs
from programs import logged, run_program, time_until
from side_by_side import Row, compare, interleave, parser, peak_of_programs, show, with_shares_of_peak

import vit_scale

HERE = Path(__file__).parent
GOAL = 1.35
SAME_LOSS = 0.1
"""Weights, crops and mixtures are drawn differently, so that losses after a few updates are only alike."""
LIMIT = "the model's step, nearly all of the time on two cores: see train_step.py; loading competes for the same cores"


@dataclass(frozen=True)
class Case:
    """What is trained on what."""

    name: str
    model: str
    size: int
    batch: int
    data: str
    workers: int = 2


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__, rounds=3)
    options.add_argument("--data", help="photographs, at 224 px")
    options.add_argument("--small", help="small images, at 32 px, such as CIFAR-10")
    options.add_argument("--steps", type=int, default=8, help="updates of each side in each round")
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        small = args.small or make_photographs(Path(scratch, "small"), 4000, 32, 32)
        large = args.data or make_photographs(Path(scratch, "photographs"))
        cases = [
            Case("small images", "vit_cifar_small", 32, 64, small),
            Case("photographs", "vit_small_patch16_224", 224, 16, large),
        ]
        show([measure(case, args, Path(scratch)) for case in cases], args)


def measure(case: Case, args: argparse.Namespace, scratch: Path) -> Row:
    """Images per second of both sides."""
    losses: dict[str, float] = {}

    def side(name: str, run: Callable[[], tuple[float, float]]) -> Callable[[], float]:
        def rate() -> float:
            found, losses[name] = run()
            return found

        return rate

    sides = {
        "ours": side("ours", lambda: run_ours(case, args.steps, scratch)),
        "timm": side("timm", lambda: run_timm(case, args.steps)),
    }
    values = interleave(sides, args.rounds, warmup=0)
    assert abs(losses["ours"] / losses["timm"] - 1) < SAME_LOSS, f"not the same training: losses {losses}"
    name = f"{case.name}: {case.model}, batch {case.batch}"
    row = compare(name, values, "ours", "timm", "images/s", goal=GOAL, limit=LIMIT)
    row.more.update({"loss at the end, ours": losses["ours"], "loss at the end, peer": losses["timm"]})
    return with_shares_of_peak(row, vit_scale.create_model(case.model), peak_of_programs(args.device))


def our_recipe(case: Case, steps: int, folder: Path) -> dict[str, Any]:
    """DeiT's recipe in our options, with as much logging as a long run has."""
    return {
        "model": {"name": case.model, "drop_path": 0.1},
        "data": {"source": case.data, "val_fraction": 0.002, "workers": case.workers},
        "augment": {
            "rand_augment": "rand-m9-mstd0.5-inc1",
            "interpolation": "random",
            "erase": 0.25,
            "mixup": 0.8,
            "cutmix": 1.0,
            "label_smoothing": 0.1,
        },
        "optim": {"lr": 1e-3, "weight_decay": 0.05, "clip_norm": 0.0},
        "schedule": {"steps": steps},
        "batch": {"global": case.batch, "micro": case.batch},
        "ema": {"decay": 0.999},
        "run": {"dir": str(folder), "log_every": steps // 2, "eval_every": 10**6, "save_every": 10**6},
        "track": {"wandb": "offline"},
    }


def run_ours(case: Case, steps: int, scratch: Path) -> tuple[float, float]:
    """Images per second, and the loss of the last updates."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(our_recipe(case, steps, folder / "run")))
    metrics = folder / "run/metrics.jsonl"
    # Ended after the last update: the evaluation of all validation images that follows is not what is measured.
    time_until(
        [sys.executable, "launch/train.py", str(recipe)],
        lambda: metrics.exists() and f'"step": {steps},' in metrics.read_text(),
    )
    line = logged(folder / "run", steps)
    return line["speed/images_per_second"], line["train/loss"]


def run_timm(case: Case, steps: int) -> tuple[float, float]:
    """Images per second, and the loss of the last update."""
    half = steps // 2
    command = [sys.executable, str(HERE / "timm_train.py"), "--data", case.data, "--model", case.model]
    sizes = {"--size": case.size, "--batch": case.batch, "--steps": steps, "--workers": case.workers}
    sizes["--log-every"] = half
    out = run_program([*command, *(str(word) for pair in sizes.items() for word in pair)])
    at = {line["step"]: line for line in map(json.loads, out.splitlines())}
    return (steps - half) * case.batch / (at[steps]["seconds"] - at[half]["seconds"]), at[steps]["loss"]


if __name__ == "__main__":
    main()
