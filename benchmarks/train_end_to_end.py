"""End-to-end training throughput: launch/train.py vs. a loop like timm's train.py.

    python benchmarks/train_end_to_end.py [--data SOURCE] [--small SOURCE] [--rounds 3] [--json]

Both sides are separate programs, started alternately, with the same images, model, batch size, threads, augmentation
(random resized crop, `rand-m9-mstd0.5-inc1`, erasing), MixUp, CutMix, label smoothing, AdamW, EMA and drop path; ours
also checks for non-finite values, logs, and writes an offline W&B run. The first half of the steps is warmup; the
throughput is measured over the second half, after which both must have about the same loss. Startup is measured by
startup.py. By default, images are cropped from scikit-learn's photographs.
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
from compare import Row, compare, interleave, parser, program_peak, show, with_mfu
from photographs import make_photographs
from programs import logged, run_program, time_until

import vit_scale

HERE = Path(__file__).parent
TARGET = 1.35
SAME_LOSS = 0.1
"""Weights, crops and mixing are drawn differently, so losses after a few steps are only similar."""
LIMIT = (
    "the training step, nearly all of the time on two cores (see train_step.py); data loading competes for the cores"
)


@dataclass(frozen=True)
class Case:
    """Model and data of a comparison."""

    name: str
    model: str
    size: int
    batch: int
    data: str
    workers: int = 2


def main() -> None:
    """Run the benchmark and print the results."""
    options = parser(__doc__, rounds=3)
    options.add_argument("--data", help="photographs, used at 224 px")
    options.add_argument("--small", help="small images, e.g. CIFAR-10, used at 32 px")
    options.add_argument("--steps", type=int, default=8, help="steps per side and round")
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
    """Measure the images/s of both sides."""
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
    assert abs(losses["ours"] / losses["timm"] - 1) < SAME_LOSS, f"losses differ: {losses}"
    name = f"{case.name}: {case.model}, batch {case.batch}"
    row = compare(name, values, "ours", "timm", "images/s", target=TARGET, limit=LIMIT)
    row.more.update({"final loss, ours": losses["ours"], "final loss, baseline": losses["timm"]})
    return with_mfu(row, vit_scale.create_model(case.model), program_peak(args.device))


def our_recipe(case: Case, steps: int, folder: Path) -> dict[str, Any]:
    """Return DeiT's recipe in our options, with as much logging as in a long run."""
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
    """Return images/s and the loss of the last steps."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(our_recipe(case, steps, folder / "run")))
    metrics = folder / "run/metrics.jsonl"
    # Kill it after the last step: the subsequent evaluation of all validation images is not measured.
    time_until(
        [sys.executable, "launch/train.py", str(recipe)],
        lambda: metrics.exists() and f'"step": {steps},' in metrics.read_text(),
    )
    line = logged(folder / "run", steps)
    return line["speed/images_per_second"], line["train/loss"]


def run_timm(case: Case, steps: int) -> tuple[float, float]:
    """Return images/s and the loss of the last step."""
    half = steps // 2
    command = [sys.executable, str(HERE / "timm_train.py"), "--data", case.data, "--model", case.model]
    sizes = {"--size": case.size, "--batch": case.batch, "--steps": steps, "--workers": case.workers}
    sizes["--log-every"] = half
    out = run_program([*command, *(str(word) for pair in sizes.items() for word in pair)])
    at = {line["step"]: line for line in map(json.loads, out.splitlines())}
    return (steps - half) * case.batch / (at[steps]["seconds"] - at[half]["seconds"]), at[steps]["loss"]


if __name__ == "__main__":
    main()
