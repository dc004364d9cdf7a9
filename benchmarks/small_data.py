"""Methods for small data at equal CPU time on CIFAR-10: a ViT, a ResNet, distillation, and MAE then fine-tuning.

    python benchmarks/small_data.py --data SOURCE [--minutes 5] [--seeds 0 1 2] [--sides vit ...] [--output FILE]

Each side gets the same CPU time for its training steps, on one thread: two short runs measure the CPU time of a step,
and the number of steps follows. CPU time, unlike wall-clock time, changes little when other programs run. Start-up and
evaluation are not included; neither is the teacher's training, which is a side of its own (`teacher`). Runs are kept in
--runs, and the same command resumes. Writes OUTPUT.json with all evaluations, and OUTPUT.png with top-1 over CPU time
and over FLOPs. SOURCE is any data.source with the images of CIFAR-10. Options are those of the recipes, except the
image size of the ResNet, 64 instead of 128 pixels: two cores would not finish one epoch otherwise.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from compare import machine
from programs import ROOT, run_program

from vit_scale.recipe import load_recipe

TRIAL_STEPS = (8, 40)
"""Lengths of the two runs whose difference is the CPU time of a step."""
EVALUATIONS = 4
"""Evaluations of a stage."""
KNN = "val/knn_top1"
ALWAYS = ["data.workers=0", "data.cache=none", "track.wandb=disabled", "track.images=never", "run.keep=1"]
RESNET = ("recipes/cifar10/resnet.yaml", ("model.img_size=64", "augment.crop_padding=8"))
Side = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """One run of a side."""

    recipe: str
    options: tuple[str, ...] = ()
    share: float = 1.0
    """Fraction of the side's CPU time; above 1 for the teacher."""
    is_pretraining: bool = False
    """Whether it only reports the accuracy of k-NN, and the next stage starts from its weights."""


SIDES = {
    "vit": [Stage("recipes/cifar10/two_cores.yaml")],
    "resnet": [Stage(*RESNET)],
    "teacher": [Stage(*RESNET, share=3)],
    "distilled": [Stage("recipes/cifar10/distilled.yaml", ("distill.teacher={runs}/teacher-0-0",))],
    "mae": [
        Stage("recipes/cifar10/mae.yaml", share=0.5, is_pretraining=True),
        Stage("recipes/cifar10/mae_finetune.yaml", ("model.weights={previous}",), share=0.5),
    ],
}
LABELS = {
    "vit": "ViT",
    "resnet": "ResNet-18",
    "teacher": "ResNet-18, 3x the time (the teacher)",
    "distilled": "ViT taught by the ResNet",
    "mae": "ViT, half MAE, half fine-tuning",
}


def main() -> None:
    """Train all requested sides and write the results; sides of an earlier call are kept."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", required=True)
    options.add_argument("--minutes", type=float, default=5, help="CPU minutes of training steps per side")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    options.add_argument("--runs", type=Path, default=ROOT / "runs/small_data")
    options.add_argument("--output", type=Path, default=ROOT / "docs/small_data")
    args = options.parse_args()
    file = args.output.with_suffix(".json")
    known = json.loads(file.read_text()) if file.exists() else {"sides": {}}
    for name in args.sides:
        side = known["sides"].setdefault(name, {"runs": {}})
        for seed in args.seeds[:1] if name == "teacher" else args.seeds:
            if str(seed) not in side["runs"]:
                side["runs"][str(seed)] = train_side(args, name, side, seed)
                known |= {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "minutes": args.minutes}
                file.write_text(json.dumps(known, indent=1) + "\n")
                print(f"{name}, seed {seed}: {side['runs'][str(seed)][-1]}", flush=True)
    draw(known["sides"], args.output.with_suffix(".png"))
    print_table(known["sides"])


def train_side(args: argparse.Namespace, name: str, side: Side, seed: int) -> list[dict[str, float]]:
    """Train all stages of a side with one seed; return its evaluations."""
    points: list[dict[str, float]] = []
    knn = side.setdefault("knn", {}).setdefault(str(seed), [])
    minutes = flops = 0.0
    previous: Path | None = None
    for number, stage in enumerate(SIDES[name]):
        places = {"runs": args.runs, "previous": previous}
        given = [f"data.source={args.data}", *ALWAYS, *(option.format(**places) for option in stage.options)]
        cost = side.setdefault(f"stage {number}", None) or measure_step(args, stage, given, f"{name}-{number}")
        side[f"stage {number}"] = cost
        steps = round(60 * args.minutes * stage.share / cost["cpu_seconds_per_step"])
        folder = args.runs / f"{name}-{number}-{seed}"
        every = -(-steps // EVALUATIONS)
        evaluate = "probe_every" if stage.is_pretraining else "eval_every"
        train(stage, folder, [*given, f"run.seed={seed}", f"schedule.steps={steps}", f"run.{evaluate}={every}"])
        for line in read_metrics(folder):
            if KNN in line or "val/top1" in line:
                spent = minutes + line["step"] / steps * args.minutes * stage.share
                done = flops + line["step"] * cost["flops_per_step"]
                point = {"minutes": spent, "flops": done, "top1": accuracy(line), "step": line["step"]}
                (knn if KNN in line else points).append(point)
        minutes, flops, previous = (
            minutes + args.minutes * stage.share,
            flops + steps * cost["flops_per_step"],
            folder,
        )
    return points


def accuracy(line: dict[str, float]) -> float:
    """Return the accuracy of the EMA weights if there are any: which weights count is not chosen on test images."""
    return line[KNN] if KNN in line else line.get("val_ema/top1", line["val/top1"])


def measure_step(args: argparse.Namespace, stage: Stage, given: list[str], name: str) -> dict[str, float]:
    """Return the CPU seconds and the FLOPs of a training step, averaged over progressive image sizes."""
    short, long = TRIAL_STEPS
    seconds = {}
    for steps in TRIAL_STEPS:
        folder = args.runs / f"trial-{name}-{steps}"
        never = ["run.eval_images=100", "run.eval_every=1000", "run.log_every=1", f"schedule.steps={steps}"]
        before = cpu_seconds()
        train(stage, folder, [*given, *never, "run.resume=never"])
        seconds[steps] = cpu_seconds() - before
    rates = [line for line in read_metrics(folder) if "speed/mfu" in line]
    peak = json.loads((folder / "summary.json").read_text())["peak_flops"]
    batch = load_recipe(ROOT / stage.recipe, list(given)).batch.global_
    flops = mean(line["speed/mfu"] * peak * batch / line["speed/images_per_second"] for line in rates)
    return {"cpu_seconds_per_step": (seconds[long] - seconds[short]) / (long - short), "flops_per_step": flops}


def train(stage: Stage, folder: Path, options: list[str]) -> None:
    """Train one stage on one thread; a finished run is left unchanged."""
    command = [sys.executable, "launch/train.py", stage.recipe, *options, f"run.dir={folder}"]
    run_program(command, {"OMP_NUM_THREADS": "1"})


def cpu_seconds() -> float:
    """Return the CPU time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Return all entries of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def finals(side: Side) -> list[float]:
    """Return the last accuracy of each seed."""
    return [points[-1]["top1"] for points in side["runs"].values()]


def print_table(sides: dict[str, Side]) -> None:
    """Print the table of docs/results.md."""
    print("| side | top-1 (mean) | seeds | training TFLOPs |\n| --- | --- | --- | --- |")
    for name, side in sides.items():
        values, last = finals(side), next(iter(side["runs"].values()))[-1]
        listed = ", ".join(f"{value:.1%}" for value in values)
        print(f"| {LABELS[name]} | {mean(values):.1%} | {listed} | {last['flops'] / 1e12:.2f} |")


def draw(sides: dict[str, Side], path: Path) -> None:
    """Plot accuracy over CPU time and over FLOPs: the mean over seeds, and the range."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4), dpi=100, sharey=True)
    for axes, key, scale, label in zip(
        panels, ("minutes", "flops"), (1, 1e-12), ("CPU minutes of training", "TFLOPs of training"), strict=True
    ):
        for name, side in sides.items():
            color = None
            for runs, style, kind in ((side["runs"], "-", ""), (side.get("knn", {}), ":", ": 20-NN during MAE")):
                columns = list(zip(*runs.values(), strict=True))
                if not columns:
                    continue
                x = [scale * mean(point[key] for point in column) for column in columns]
                y = [[100 * point["top1"] for point in column] for column in columns]
                (line,) = axes.plot(x, list(map(mean, y)), style, marker="o", color=color, label=LABELS[name] + kind)
                color = line.get_color()
                axes.fill_between(x, list(map(min, y)), list(map(max, y)), color=color, alpha=0.2)
        axes.set(xlabel=label, xscale="log", ylim=(0, 100))
        axes.xaxis.set_major_locator(mpl.ticker.LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(mpl.ticker.NullLocator())
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("CIFAR-10 test top-1, %")
    panels[0].legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
