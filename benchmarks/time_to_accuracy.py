"""Accuracy after a given time: recipes/cifar10/two_cores.yaml vs. timm components with DeiT's recipe.

    python benchmarks/time_to_accuracy.py --data SOURCE [--minutes 25] [--sides ours timm] [--output docs/results]

Both sides get the same wall-clock time, from the command to the last evaluation, on the same images and system, for
plain ViTs of the same dimension, depth and number of heads. Ours runs on one process per core (`--processes`), after a
short trial to determine the number of steps; timm's schedule follows the clock. Writes OUTPUT.json with all evaluations
and losses, and OUTPUT.png with the curves. SOURCE is any data.source with images of 32 pixels.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from compare import machine
from programs import ROOT, logged_rate, run_program

from vit_scale.recipe import load_recipe

HERE = Path(__file__).parent
RECIPE = ROOT / "recipes/cifar10/two_cores.yaml"
EVALUATIONS = 4
TRIAL_STEPS = 60
MARGIN = 0.97
"""Fraction of the time to plan for, since the speed of a system varies."""
SHAPE = ("embed_dim", "depth", "num_heads", "dropout")
Curve = dict[str, Any]


def main() -> None:
    """Train both sides and write the results."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", required=True)
    options.add_argument("--minutes", type=float, default=25)
    options.add_argument("--sides", nargs="+", choices=["ours", "timm"], default=["ours", "timm"])
    options.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options.add_argument("--output", type=Path, default=ROOT / "docs/results")
    args = options.parse_args()
    sides = {"ours": train_ours, "timm": train_timm}
    curves = {side: sides[side](args) for side in args.sides}
    for side, curve in curves.items():
        last = curve["evaluations"][-1]
        print(f"{side}: top-1 {last['top1']:.2%} after {curve['minutes']:.1f} minutes, {last['images']:,} images")
    file = args.output.with_suffix(".json")
    known = json.loads(file.read_text()) if file.exists() else {}
    known |= {"machine": machine(), "date": time.strftime("%Y-%m-%d"), **curves}
    file.write_text(json.dumps(known, indent=1) + "\n")
    draw(known, args.output.with_suffix(".png"))


# --------------------------------------------------------------------------------------------------------------- ours


def train_ours(args: argparse.Namespace) -> Curve:
    """Train the recipe with as many steps as fit into the time."""
    batch = load_recipe(RECIPE, []).batch.global_
    with tempfile.TemporaryDirectory() as scratch:
        cache = f"data.cache_dir={scratch}/cache"
        rate, overhead, evaluation = run_trial(args, Path(scratch, "trial"), cache, batch)
        seconds = 60 * args.minutes - overhead - (EVALUATIONS - 1) * evaluation
        steps = int(MARGIN * seconds * rate / batch)
        lengths = [*length(steps), f"run.eval_every={-(-steps // EVALUATIONS)}", "run.log_every=20"]
        start = time.perf_counter()
        lines = launch(args, Path(scratch, "run"), cache, *lengths)
        minutes = (time.perf_counter() - start) / 60
    evaluations = [
        {"seconds": line["seconds"], "images": line["step"] * batch, "top1": line["val/top1"]}
        for line in lines
        if "val/top1" in line
    ]
    losses = [{"seconds": line["seconds"], "loss": line["train/loss"]} for line in lines if "train/loss" in line]
    return {"evaluations": evaluations, "losses": losses, "minutes": minutes, "processes": args.processes}


def run_trial(args: argparse.Namespace, folder: Path, cache: str, batch: int) -> tuple[float, float, float]:
    """Return images/s, the seconds of startup, evaluation and shutdown, and the seconds of one evaluation."""
    start = time.perf_counter()
    rarely = ["run.eval_every=1000000", f"run.log_every={TRIAL_STEPS}"]
    lines = launch(args, folder, cache, *length(TRIAL_STEPS), *rarely)
    total = time.perf_counter() - start
    rate = logged_rate(folder, TRIAL_STEPS)
    logged, evaluated = (next(line["seconds"] for line in lines if key in line) for key in ("train/loss", "val/top1"))
    overhead = total - TRIAL_STEPS * batch / rate
    print(
        f"trial: {rate:.0f} images/s, {overhead:.0f} s overhead, {evaluated - logged:.0f} s per evaluation", flush=True
    )
    return rate, overhead, evaluated - logged


def length(steps: int) -> list[str]:
    """Return the options for `steps` steps, with the recipe's fraction of warmup."""
    schedule = load_recipe(RECIPE, []).schedule
    warmup = round(steps * (schedule.warmup_epochs or 0) / (schedule.epochs or 1))
    epochs = ["schedule.epochs=null", "schedule.warmup_epochs=null"]
    return [*epochs, f"schedule.steps={steps}", f"schedule.warmup_steps={warmup}"]


def launch(args: argparse.Namespace, folder: Path, *options: str) -> list[dict[str, Any]]:
    """Train; returns the entries of metrics.jsonl with the seconds at which each was written."""
    accelerate = [str(Path(sys.executable).with_name("accelerate")), "launch"]
    accelerate += ["--num_processes", str(args.processes), *(["--multi_gpu"] if args.processes > 1 else [])]
    given = [f"data.source={args.data}", f"run.dir={folder}", *options]
    threads = str(max(1, (os.cpu_count() or 1) // args.processes))
    lines: list[dict[str, Any]] = []
    ended = threading.Event()
    watch = threading.Thread(target=read_as_written, args=(folder / "metrics.jsonl", lines, ended))
    watch.start()
    try:
        run_program([*accelerate, "launch/train.py", str(RECIPE), *given], {"OMP_NUM_THREADS": threads})
    finally:
        ended.set()
        watch.join()
    return lines


def read_as_written(path: Path, lines: list[dict[str, Any]], ended: threading.Event) -> None:
    """Append the lines of a file as they are written, with the seconds since the call, until `ended` is set."""
    start = time.perf_counter()
    while True:
        is_last = ended.wait(0.5)
        written = path.read_text().splitlines() if path.exists() else []
        for line in written[len(lines) :]:
            lines.append(json.loads(line) | {"seconds": time.perf_counter() - start})
        if is_last:
            return


# --------------------------------------------------------------------------------------------------------------- timm


def train_timm(args: argparse.Namespace) -> Curve:
    """Run timm_train.py for the same time, with a model of the same shape."""
    model = load_recipe(RECIPE, []).model
    shape = {name: getattr(model, name) for name in SHAPE if getattr(model, name) is not None}
    batch = 128
    command = [sys.executable, str(HERE / "timm_train.py"), "--data", args.data, "--model", model.name]
    command += ["--model-options", json.dumps(shape), "--batch", str(batch)]
    command += ["--minutes", str(MARGIN * args.minutes), "--evaluations", str(EVALUATIONS)]
    start = time.perf_counter()
    lines = [json.loads(line) for line in run_program(command).splitlines()]
    minutes = (time.perf_counter() - start) / 60
    evaluations = [
        {"seconds": line["seconds"], "images": line["step"] * batch, "top1": max(line["top1"], line["ema_top1"])}
        for line in lines
        if "top1" in line
    ]
    losses = [{key: line[key] for key in ("seconds", "loss")} for line in lines if "loss" in line][::20]
    return {"evaluations": evaluations, "losses": losses, "minutes": minutes, "processes": 1}


def draw(curves: dict[str, Any], path: Path) -> None:
    """Plot accuracy over time."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), dpi=110)
    names = {"ours": "vit_scale, recipes/cifar10/two_cores.yaml", "timm": "timm components, DeiT's recipe"}
    for side, name in names.items():
        if side in curves:
            points = curves[side]["evaluations"]
            x, y = [point["seconds"] / 60 for point in points], [100 * point["top1"] for point in points]
            axes.plot(x, y, marker="o", label=name)
            axes.annotate(f"{y[-1]:.1f}%", (x[-1], y[-1]), xytext=(-6, 6), textcoords="offset points", ha="right")
    axes.set(xlabel="minutes on two CPU cores", ylabel="CIFAR-10 test top-1, %", ylim=(0, 100))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
