"""Images per second of the input pipeline, side by side with timm's `create_loader` doing the same work.

    python benchmarks/input_pipeline.py [--data FOLDER] [--size 224] [--json]

Both sides read the same images with the same number of workers, take a random resized crop (random interpolation),
flip, apply `rand-m9-mstd0.5-inc1`, erase with probability 0.25, and hand over normalised float batches; the statistics
of the batches are compared before anything is timed. Rounds are interleaved, and the ratio is the median of the rounds'
ratios. `decode only` is what the workers reach if they decode every JPEG as a whole with libjpeg-turbo and do nothing
else; a pipeline that does not decode what it does not need may exceed it. Without --data, photographs that come with
scikit-learn are cut into JPEG files of about 470x400.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import psutil
import simplejpeg
import torch
from photographs import make_photographs
from PIL import Image
from side_by_side import machine
from timm_images import FOREVER, TimmImages
from torch.utils.data import DataLoader, Dataset

from vit_scale.config import AugmentConfig, DataConfig
from vit_scale.data.cache import with_cache
from vit_scale.data.loading import TrainLoader
from vit_scale.data.normalize import NORMALIZATIONS, Normalize
from vit_scale.data.sources import Source, open_data

AUGMENT = AugmentConfig(rand_augment="rand-m9-mstd0.5-inc1", erase=0.25)
MEAN, STD = NORMALIZATIONS["imagenet"]


@dataclass
class Result:
    """Medians over rounds: images per second, their ratio to timm and to decoding alone, processor time."""

    name: str
    images_per_second: float
    times_timm: float
    share_of_decode_only: float
    cpu_ms_per_image: float
    """Processor time of all processes, which other programs on the machine disturb least."""
    times_timm_by_cpu: float
    """The ratio to timm by processor time: that of the rates on a machine where nothing else runs."""


def main() -> None:
    """Parse, measure, print."""
    # The training process only normalises here; more threads would take the cores from the workers.
    torch.set_num_threads(1)
    args = parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.data or make_photographs(Path(scratch) / "photographs")
        source = open_source(folder)
        size = args.size or default_size(source)
        sides = build_sides(source, folder, size, args, scratch)
        same = compare_statistics(sides)
        results = measure(sides, args)
        memory = worker_memory(source, size, args)
    report = {"machine": machine(), "data": f"{Path(folder).name}: {len(source):,} images", "size": size}
    report |= {"workers": args.workers, "batch": args.batch, "results": [asdict(result) for result in results]}
    report |= {"statistics": same, "worker_megabytes_after_each_epoch": memory}
    print(json.dumps(report, indent=2) if args.json else as_text(report))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a data.source; default: photographs of scikit-learn")
    parser.add_argument("--size", type=int, help="image size; default: 224, or the images' own if they are small")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each side in each round")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def open_source(folder: str) -> Source:
    """All images of the training split."""
    source = open_data(DataConfig(source=folder, val_fraction=1e-9), seed=0).train
    assert isinstance(source, Source), "the benchmark needs images by index"
    return source


def default_size(source: Source) -> int:
    """224, or the size of small images."""
    image = source.read(0).image
    width = Image.open(image if isinstance(image, str) else io.BytesIO(image)).size[0]
    return width if width <= 64 else 224


# ------------------------------------------------------------------------------------------------------ the two sides


def build_sides(source: Source, folder: str, size: int, args: argparse.Namespace, scratch: str) -> dict[str, Any]:
    """Endless iterators over batches (or numbers of decoded images), by name."""
    cache = DataConfig(source=folder, cache="decoded", cache_dir=scratch)
    cached = with_cache(source, cache, img_size=(size, size), in_chans=3)
    return {
        "timm": timm_batches(folder, size, args),
        "vit_scale": our_batches(source, size, args),
        "vit_scale cached": our_batches(cached, size, args),
        "decode only": decode_only(source, args),
    }


def our_batches(source: Any, size: int, args: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Normalised batches of vit_scale."""
    loader = TrainLoader(
        source,
        augment=AUGMENT,
        img_size=(size, size),
        in_chans=3,
        global_batch=args.batch,
        micro_batch=args.batch,
        rank=0,
        world=1,
        seed=0,
        workers=args.workers,
        end_step=FOREVER,
        mean=MEAN,
        std=STD,
        held=1,
    )
    normalize = Normalize(MEAN, STD, reuse=True)  # As training does.
    return (normalize(batch.images) for batch in loader)


def timm_batches(folder: str, size: int, args: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Normalised batches of timm."""
    from timm.data import create_loader

    loader = create_loader(
        cast(Any, TimmImages(folder)),
        input_size=(3, size, size),
        batch_size=args.batch,
        is_training=True,
        auto_augment=AUGMENT.rand_augment,
        re_prob=AUGMENT.erase,
        re_mode="pixel",
        interpolation="random",
        color_jitter=0,
        mean=MEAN,
        std=STD,
        num_workers=args.workers,
        pin_memory=False,
        device=torch.device("cpu"),
    )
    return (images for images, _ in loader)


class Decoding(Dataset[int]):
    """Whole JPEG files decoded in colour, `batch` at a time."""

    def __init__(self, source: Source, batch: int):
        self.source, self.batch = source, batch

    def __len__(self) -> int:
        return FOREVER

    def __getitem__(self, index: int) -> int:
        for i in range(index * self.batch, (index + 1) * self.batch):
            image = self.source.read(i % len(self.source)).image
            data = Path(image).read_bytes() if isinstance(image, str) else memoryview(image).cast("B")
            if simplejpeg.is_jpeg(data):
                simplejpeg.decode_jpeg(data, strict=False)
            else:
                Image.open(io.BytesIO(data)).convert("RGB")
        return self.batch


def decode_only(source: Source, args: argparse.Namespace) -> Iterator[int]:
    return iter(DataLoader(Decoding(source, args.batch), batch_size=None, num_workers=args.workers))


# ---------------------------------------------------------------------------------------------------------- measuring


def compare_statistics(sides: dict[str, Any], batches: int = 8) -> dict[str, dict[str, float]]:
    """Mean and deviation of some batches of each side: the same work gives the same distribution."""
    found = {}
    for name, side in sides.items():
        if name == "decode only":
            continue
        images = torch.cat([next(side).clone() for _ in range(batches)])
        found[name] = {"mean": round(images.mean().item(), 3), "std": round(images.std().item(), 3)}
    for name, values in found.items():
        for key, value in values.items():
            assert abs(value - found["timm"][key]) < 0.15, f"{name} does other work than timm: {found}"
    return found


def measure(sides: dict[str, Any], args: argparse.Namespace) -> list[Result]:
    """Median rates; ratios within each round, because the machine's speed changes from round to round."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    costs: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, side in sides.items():
            rate, cost = run(side, args)
            rates[name].append(rate)
            costs[name].append(cost)
    results = []
    for name, values in rates.items():
        to_timm = statistics.median(x / y for x, y in zip(values, rates["timm"], strict=True))
        to_decode = statistics.median(x / y for x, y in zip(values, rates["decode only"], strict=True))
        by_cpu = statistics.median(y / x for x, y in zip(costs[name], costs["timm"], strict=True))
        cost = statistics.median(costs[name])
        results.append(Result(name, statistics.median(values), to_timm, to_decode, cost, by_cpu))
    return results


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


# ----------------------------------------------------------------------------------------------------------- printing


def as_text(report: dict[str, Any]) -> str:
    """A table for people."""
    lines = [
        report["machine"],
        f"{report['data']} at {report['size']} px, batches of {report['batch']}, {report['workers']} workers",
        f"{'':18s} {'images/s':>9s} {'x timm':>8s} {'x decode only':>14s} {'CPU ms/image':>13s} {'x timm':>8s}",
    ]
    for result in report["results"]:
        rate, ratio = f"{result['images_per_second']:9,.0f}", f"{result['times_timm']:8.2f}"
        share, cost = f"{result['share_of_decode_only']:14.2f}", f"{result['cpu_ms_per_image']:13.2f}"
        lines.append(f"{result['name']:18s} {rate} {ratio} {share} {cost} {result['times_timm_by_cpu']:8.2f}")
    lines.append(f"statistics: {report['statistics']}")
    memory = ", ".join(f"{value:.0f}" for value in report["worker_megabytes_after_each_epoch"])
    lines.append(f"memory of the workers after each epoch, MB: {memory}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
