"""Throughput of the input pipeline vs. timm and Hugging Face, with identical work.

    python benchmarks/input_pipeline.py [--data SOURCE ...] [--rounds 5] [--json]

All sides read the same images with the same number of workers, apply random resized crop, flip, RandAugment
(`rand-m9-mstd0.5-inc1`) and random erasing with probability 0.25, and return normalized float batches; the batch
statistics are compared before timing. One baseline is timm's `create_loader`, the other `with_transform` of Hugging
Face datasets with torchvision transforms v2. "Decoding alone" is the throughput of workers that only decode every full
JPEG with libjpeg-turbo; a pipeline that decodes only what it needs may exceed it. Without --data, scikit-learn's
photographs are cropped to JPEG files of about 470x400.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from compare import Rounds, Row, compare, parser, quartiles, show
from loaders import CACHED, DECODING, HUGGING_FACE, OURS, TIMM, build_sides, our_batches
from photographs import make_photographs
from PIL import Image

from vit_scale.config import DataConfig
from vit_scale.data.data import open_data
from vit_scale.data.sources.table_source import Source

SMALL = 64
TARGETS = {(OURS, False): 2.0, (CACHED, False): 6.0, (OURS, True): 3.0, (CACHED, True): 3.0}
"""Targets by side and whether images are small."""
LIMITS = {
    OURS: "JPEG decoding: 2/3 of the time for photographs, mostly Huffman decoding; 1/6 for small images",
    CACHED: "resizing (1/5 of the time), RandAugment (1/3), normalization in the training process (1/6)",
}


def main() -> None:
    """Run the benchmark and print the results."""
    # The training process only normalizes here; more threads would compete with the workers for cores.
    torch.set_num_threads(1)
    options = parser(__doc__, rounds=5)
    options.add_argument("--data", nargs="+", help="data.source; default: scikit-learn's photographs")
    options.add_argument("--size", type=int, help="image size; default: 224, or the original size of small images")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--seconds", type=float, default=3.0, help="per side and round")
    args = options.parse_args()
    rows: list[Row] = []
    notes: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        for folder in args.data or [make_photographs(Path(scratch) / "photographs")]:
            found, seen = measure_folder(folder, args, scratch)
            rows, notes = rows + found, notes + seen
    show(rows, args, notes)


def measure_folder(folder: str, args: argparse.Namespace, scratch: str) -> tuple[list[Row], list[str]]:
    """Return the rows and notes for one data.source."""
    source = open_source(folder)
    size = args.size or default_size(source)
    sides = build_sides(source, folder, size, args, scratch)
    statistics = compare_statistics(sides)
    rates, costs = measure(sides, args)
    memory = ", ".join(f"{value:.0f}" for value in worker_memory(source, size, args))
    name = f"{Path(folder).name} at {size} px"
    rows = [
        row(f"{name}, {side} vs. {baseline}", side, baseline, rates, costs, TARGETS[side, size <= SMALL])
        for baseline in (TIMM, HUGGING_FACE)
        for side in (OURS, CACHED)
    ]
    notes = [
        f"{name}: mean and std of the batches: {statistics}",
        f"{name}: memory of our workers after each epoch in MB: {memory}",
    ]
    return rows, notes


def open_source(folder: str) -> Source:
    """Open all images of the training split."""
    source = open_data(DataConfig(source=folder, val_fraction=1e-9), seed=0).train
    assert isinstance(source, Source), "the benchmark requires indexable images"
    return source


def default_size(source: Source) -> int:
    """Return 224, or the original size of small images."""
    image = source.read(0).image
    width = Image.open(image if isinstance(image, str) else io.BytesIO(image)).size[0]
    return width if width <= SMALL else 224


def row(case: str, side: str, baseline: str, rates: Rounds, costs: Rounds, target: float) -> Row:
    """Build a row, with the ratio to decoding alone and the ratio in CPU time."""
    result = compare(case, rates, side, baseline, "images/s", target=target, limit=LIMITS[side])
    result.more["x decoding alone"] = _median_ratio(rates, side, DECODING)
    result.more["ms CPU time per image"] = quartiles(costs[side])[1]
    result.more["ratio in CPU time"] = _median_ratio(costs, baseline, side)
    return result


def _median_ratio(values: Rounds, over: str, under: str) -> float:
    return quartiles([x / y for x, y in zip(values[over], values[under], strict=True)])[1]


# ---------------------------------------------------------------------------------------------------------- measuring


def compare_statistics(sides: Mapping[str, Any], batches: int = 8) -> str:
    """Compare mean and std of some batches of each side: identical work gives the same distribution."""
    found = {}
    for name in (TIMM, HUGGING_FACE, OURS, CACHED):
        images = torch.cat([next(sides[name]).clone() for _ in range(batches)])
        found[name] = (images.mean().item(), images.std().item())
    for name in (OURS, CACHED):
        distance = max(abs(x - y) for x, y in zip(found[name], found[TIMM], strict=True))
        assert distance < 0.15, f"{name} does different work than timm: {found}"
    return ", ".join(f"{name} {mean:.2f} {std:.2f}" for name, (mean, std) in found.items())


def measure(sides: Mapping[str, Any], args: argparse.Namespace) -> tuple[Rounds, Rounds]:
    """Return images/s and CPU ms per image, per side and round."""
    rates: Rounds = {name: [] for name in sides}
    costs: Rounds = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, side in sides.items():
            rate, cost = run(side, args)
            rates[name].append(rate)
            costs[name].append(cost)
    return rates, costs


def run(side: Any, args: argparse.Namespace) -> tuple[float, float]:
    """Return images/s and CPU ms per image, after other workers are idle and this side's queue is drained."""
    wait_until_idle()
    for _ in range(2 * args.workers + 2):
        next(side)
    count, start, cpu = 0, time.perf_counter(), cpu_seconds()
    while time.perf_counter() - start < args.seconds:
        next(side)
        count += args.batch
    return count / (time.perf_counter() - start), (cpu_seconds() - cpu) / count * 1e3


def wait_until_idle() -> None:
    """Wait until workers have filled their queues, so that they do not slow down the next side."""
    busy = True
    while busy:
        before = cpu_seconds()
        time.sleep(0.2)
        busy = cpu_seconds() - before > 0.02


def cpu_seconds() -> float:
    """Return the CPU time of this process and its workers so far."""
    me = psutil.Process()
    return sum(times.user + times.system for times in (process.cpu_times() for process in (me, *me.children())))


def worker_memory(source: Source, size: int, args: argparse.Namespace, epochs: int = 6) -> list[float]:
    """Return the unshared memory of the workers after each epoch, in MB."""
    before = set(psutil.Process().children())
    batches = our_batches(source, size, args)
    per_epoch = max(1, min(len(source), 5000) // args.batch)
    megabytes = []
    for _ in range(epochs):
        for _ in range(per_epoch):
            next(batches)
        workers = set(psutil.Process().children()) - before
        megabytes.append(round(sum(worker.memory_full_info().uss for worker in workers) / 1e6, 1))
    return megabytes


if __name__ == "__main__":
    main()
