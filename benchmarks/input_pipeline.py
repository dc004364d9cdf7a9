"""Images per second of the input pipeline beside timm's and Hugging Face's, doing the same work.

    python benchmarks/input_pipeline.py [--data FOLDER ...] [--rounds 5] [--json]

All sides read the same images with the same number of workers, take a random resized crop, flip, apply RandAugment
(`rand-m9-mstd0.5-inc1`), erase with probability 0.25, and hand over normalised float batches; the statistics of the
batches are compared before anything is timed. One peer is timm's `create_loader`, the other `with_transform` of
Hugging Face's datasets with torchvision's transforms v2. Decoding alone is what the workers reach if they decode every
JPEG as a whole with libjpeg-turbo and do nothing else; a pipeline that does not decode what it does not need may
exceed it. Without --data, photographs that come with scikit-learn are cut into JPEG files of about 470x400.
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
from loaders import CACHED, DECODING, HUGGING_FACE, OURS, TIMM, build_sides, our_batches
from photographs import make_photographs
from PIL import Image
from side_by_side import Rounds, Row, compare, parser, quartiles, show

from vit_scale.config import DataConfig
from vit_scale.data.data import open_data
from vit_scale.data.sources.table_source import Source

SMALL = 64
GOALS = {(OURS, False): 2.0, (CACHED, False): 6.0, (OURS, True): 3.0, (CACHED, True): 3.0}
"""By side, and whether images are small."""
LIMITS = {
    OURS: "decoding JPEG, two thirds of a photograph's time, most of it Huffman codes; a sixth of a small image's",
    CACHED: "resizing a fifth, RandAugment a third, normalising in the training process a sixth",
}


def main() -> None:
    """Parse, measure, print."""
    # The training process only normalises here; more threads would take the cores from the workers.
    torch.set_num_threads(1)
    options = parser(__doc__, rounds=5)
    options.add_argument("--data", nargs="+", help="data.source; default: photographs of scikit-learn")
    options.add_argument("--size", type=int, help="image size; default: 224, or the images' own if they are small")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--seconds", type=float, default=3.0, help="of each side in each round")
    args = options.parse_args()
    rows: list[Row] = []
    notes: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        for folder in args.data or [make_photographs(Path(scratch) / "photographs")]:
            found, seen = measure_folder(folder, args, scratch)
            rows, notes = rows + found, notes + seen
    show(rows, args, notes)


def measure_folder(folder: str, args: argparse.Namespace, scratch: str) -> tuple[list[Row], list[str]]:
    """The rows of one data.source, and what else was seen."""
    source = open_source(folder)
    size = args.size or default_size(source)
    sides = build_sides(source, folder, size, args, scratch)
    statistics = compare_statistics(sides)
    rates, costs = measure(sides, args)
    memory = ", ".join(f"{value:.0f}" for value in worker_memory(source, size, args))
    name = f"{Path(folder).name} at {size} px"
    rows = [
        row(f"{name}, {side} over {peer}", side, peer, rates, costs, GOALS[side, size <= SMALL])
        for peer in (TIMM, HUGGING_FACE)
        for side in (OURS, CACHED)
    ]
    notes = [
        f"{name}: mean and deviation of the batches: {statistics}",
        f"{name}: memory of our workers after each epoch, MB: {memory}",
    ]
    return rows, notes


def open_source(folder: str) -> Source:
    """All images of the training split."""
    source = open_data(DataConfig(source=folder, val_fraction=1e-9), seed=0).train
    assert isinstance(source, Source), "the benchmark needs images by index"
    return source


def default_size(source: Source) -> int:
    """224, or the size of small images."""
    image = source.read(0).image
    width = Image.open(image if isinstance(image, str) else io.BytesIO(image)).size[0]
    return width if width <= SMALL else 224


def row(case: str, side: str, peer: str, rates: Rounds, costs: Rounds, goal: float) -> Row:
    """One comparison, with the ratios to decoding alone and by processor time."""
    result = compare(case, rates, side, peer, "images/s", goal=goal, limit=LIMITS[side])
    result.more["of decoding alone"] = _median_ratio(rates, side, DECODING)
    result.more["ms of processor time an image"] = quartiles(costs[side])[1]
    result.more["ratio by processor time"] = _median_ratio(costs, peer, side)
    return result


def _median_ratio(values: Rounds, over: str, under: str) -> float:
    return quartiles([x / y for x, y in zip(values[over], values[under], strict=True)])[1]


# ---------------------------------------------------------------------------------------------------------- measuring


def compare_statistics(sides: Mapping[str, Any], batches: int = 8) -> str:
    """Mean and deviation of some batches of each side: the same work gives the same distribution."""
    found = {}
    for name in (TIMM, HUGGING_FACE, OURS, CACHED):
        images = torch.cat([next(sides[name]).clone() for _ in range(batches)])
        found[name] = (images.mean().item(), images.std().item())
    for name in (OURS, CACHED):
        far = max(abs(x - y) for x, y in zip(found[name], found[TIMM], strict=True))
        assert far < 0.15, f"{name} does other work than timm: {found}"
    return ", ".join(f"{name} {mean:.2f} {deviation:.2f}" for name, (mean, deviation) in found.items())


def measure(sides: Mapping[str, Any], args: argparse.Namespace) -> tuple[Rounds, Rounds]:
    """Images per second, and milliseconds of processor time an image, of each side in each round."""
    rates: Rounds = {name: [] for name in sides}
    costs: Rounds = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, side in sides.items():
            rate, cost = run(side, args)
            rates[name].append(rate)
            costs[name].append(cost)
    return rates, costs


def run(side: Any, args: argparse.Namespace) -> tuple[float, float]:
    """Images per second and CPU ms per image, once others' workers are idle and this side's queue is used up."""
    wait_until_idle()
    for _ in range(2 * args.workers + 2):
        next(side)
    count, start, cpu = 0, time.perf_counter(), cpu_seconds()
    while time.perf_counter() - start < args.seconds:
        next(side)
        count += args.batch
    return count / (time.perf_counter() - start), (cpu_seconds() - cpu) / count * 1e3


def wait_until_idle() -> None:
    """Workers fill their queues after the last batch was taken; that must not slow down the side that is next."""
    busy = True
    while busy:
        before = cpu_seconds()
        time.sleep(0.2)
        busy = cpu_seconds() - before > 0.02


def cpu_seconds() -> float:
    """Processor time of this process and its workers so far."""
    me = psutil.Process()
    return sum(times.user + times.system for times in (process.cpu_times() for process in (me, *me.children())))


def worker_memory(source: Source, size: int, args: argparse.Namespace, epochs: int = 6) -> list[float]:
    """Memory of the workers alone (not shared with others) after each epoch, in MB."""
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
