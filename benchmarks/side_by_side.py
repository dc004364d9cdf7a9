"""What the benchmarks share: two sides measured in turn in one run, medians, spread and the ratio, as text or JSON."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from vit_scale.kernels.onednn import linear

Rounds = dict[str, list[float]]
"""What each side gave in each round."""


@dataclass(frozen=True)
class Row:
    """One comparison: medians of both sides, and the median and quartiles of their ratio within a round."""

    case: str
    ours: float
    peer: float
    unit: str
    ratio: float
    low: float
    high: float
    goal: float | None = None
    """What the ratio must reach here."""
    better: Literal["higher", "lower", "near"] = "higher"
    """`near`: the ratio should be 1, and `goal` is how far off it may be."""
    limit: str = ""
    """What keeps it from being better, in a sentence."""
    shares: tuple[float, float] | None = None
    """Of the matrix product's peak, by our side and the peer's (MFU); beside throughputs."""
    more: dict[str, float] = field(default_factory=dict)
    """Other figures by name."""

    @property
    def reached(self) -> bool | None:
        """Whether the goal is reached; None where there is none."""
        if self.goal is None:
            return None
        if self.better == "near":
            return abs(self.ratio - 1) <= self.goal
        return self.ratio >= self.goal if self.better == "higher" else self.ratio <= self.goal

    def goal_in_words(self) -> str:
        """The goal and whether it is reached; empty where there is none."""
        if self.goal is None:
            return ""
        sign = {"higher": ">=", "lower": "<=", "near": "1 +-"}[self.better]
        return f"{sign} {self.goal:g}: {'reached' if self.reached else 'not reached'}"


def interleave(sides: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 1) -> Rounds:
    """Call each side in each round, every other round in the opposite order; warm-up rounds do not count."""
    values: Rounds = {name: [] for name in sides}
    for number in range(-warmup, rounds):
        for name in sorted(sides, reverse=bool(number % 2)):
            value = sides[name]()
            if number >= 0:
                values[name].append(value)
    return values


def seconds(work: Callable[[], object], device: str = "cpu") -> float:
    """How long `work` takes, on a GPU by its own clock."""
    if device == "cpu":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    before.record()
    work()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1e3


def compare(case: str, values: Rounds, ours: str, peer: str, unit: str, **rest: object) -> Row:
    """A row from the rounds of two sides; the ratio is ours to the peer's."""
    ratios = [x / y for x, y in zip(values[ours], values[peer], strict=True)]
    low, middle, high = quartiles(ratios)
    sides = (statistics.median(values[ours]), statistics.median(values[peer]))
    return Row(case, *sides, unit, middle, low, high, **rest)  # type: ignore[arg-type]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def matmul_gflops(device: str = "cpu", dtype: torch.dtype = torch.float32, repeats: int = 10) -> float:
    """GFLOP/s of a matrix product, by the faster of MKL and oneDNN on a CPU: what the share of the peak is taken of."""
    size = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    work = [functools.partial(product, a, b) for product in (torch.mm, linear)]
    best = min(seconds(product, device) for product in work * repeats)
    return 2 * size**3 / best / 1e9


def peak_of_programs(device: str) -> float:
    """GFLOP/s of a matrix product in the precision that training programs choose for themselves on a device."""
    return matmul_gflops(device, torch.bfloat16 if device == "cuda" else torch.float32)


def with_shares_of_peak(row: Row, model: nn.Module, peak: float) -> Row:
    """The row with the share of the matrix product's `peak` that its images per second are, for each side (MFU)."""
    from vit_scale.cost.count import count_model

    gflops = 6 * count_model(model).macs / 1e9  # Of an image, forward and backward, without stochastic depth.
    return replace(row, shares=(row.ours * gflops / peak, row.peer * gflops / peak))


def machine(device: str = "cpu") -> str:
    """Processor, cores, threads and versions."""
    name = torch.cuda.get_device_name() if device == "cuda" else _processor()
    versions = [f"{package} {importlib.metadata.version(package)}" for package in ("torch", "timm")]
    threads = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return ", ".join([name, threads, *versions, f"Python {platform.python_version()}"])


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    about = "cpu or cuda (default: cuda where there is a GPU)"
    options.add_argument("--device", type=_choose_device, choices=["cpu", "cuda"], default="auto", help=about)
    options.add_argument("--rounds", type=int, default=rounds, help="(default: %(default)s)")
    options.add_argument("--json", action="store_true", help="for machines")
    return options


def _choose_device(asked: str) -> str:
    """`auto` made cpu or cuda. Programs that a benchmark starts look for a GPU themselves: for `cpu` it is hidden."""
    if asked == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked


def model_and_batch(option: str) -> tuple[str, int]:
    """`vit_cifar_small:64` as a name and a number of images."""
    name, batch = option.split(":")
    return name, int(batch)


def show(rows: Sequence[Row], args: argparse.Namespace, notes: Sequence[str] = ()) -> None:
    """Print the rows as a table, or as JSON."""
    if args.json:
        found = [asdict(row) | {"reached": row.reached} for row in rows]
        print(json.dumps({"machine": machine(args.device), "rows": found, "notes": list(notes)}, indent=2))
        return
    print(machine(args.device))
    width = max(len(row.case) for row in rows)
    print(f"{'':{width}}  {'ours':>12}  {'peer':>12}  {'':12}  {'ratio':>6}  {'quartiles':>13}  goal")
    for row in rows:
        ours, peer = sides_in_words(row)
        print(f"{row.case:{width}}  {ours:>12}  {peer:>12}  {row.unit:12}  {_ratio(row)}")
        for name, value in row.more.items():
            print(f"{'':{width}}  {number(value):>10}  {name}")
    for note in notes:
        print(note)


def sides_in_words(row: Row) -> tuple[str, str]:
    """Both figures, each with its share of the peak where that is known: `65.5 (68 %)`."""
    ours, peer = number(row.ours), number(row.peer)
    if row.shares is None:
        return ours, peer
    return f"{ours} ({100 * row.shares[0]:.0f} %)", f"{peer} ({100 * row.shares[1]:.0f} %)"


def number(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(row: Row) -> str:
    return f"{row.ratio:6.2f}  {row.low:6.2f}-{row.high:6.2f}  {row.goal_in_words()}"
