"""Shared by all benchmarks: measure two sides alternately in one run, and report medians, spread and ratio."""

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
"""Measurements per side and round."""


@dataclass(frozen=True)
class Row:
    """One comparison: medians of both sides, and the median and quartiles of their ratio within a round."""

    case: str
    ours: float
    baseline: float
    unit: str
    ratio: float
    low: float
    high: float
    target: float | None = None
    """Value that the ratio must meet."""
    better: Literal["higher", "lower", "near"] = "higher"
    """`near`: the ratio should be 1, and `target` is the tolerance."""
    limit: str = ""
    """Limiting factor."""
    mfu: tuple[float, float] | None = None
    """MFU of our side and of the baseline, relative to a measured matmul; only for throughputs."""
    more: dict[str, float] = field(default_factory=dict)
    """Other numbers by name."""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target."""
        if self.target is None:
            return None
        if self.better == "near":
            return abs(self.ratio - 1) <= self.target
        return self.ratio >= self.target if self.better == "higher" else self.ratio <= self.target

    def format_target(self) -> str:
        """Format the target and whether it is met; empty without a target."""
        if self.target is None:
            return ""
        sign = {"higher": ">=", "lower": "<=", "near": "1 +/-"}[self.better]
        return f"{sign} {self.target:g}: {'met' if self.met else 'not met'}"


def interleave(sides: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 1) -> Rounds:
    """Call each side once per round, in reverse order every other round; warmup rounds are discarded."""
    values: Rounds = {name: [] for name in sides}
    for number in range(-warmup, rounds):
        for name in sorted(sides, reverse=bool(number % 2)):
            value = sides[name]()
            if number >= 0:
                values[name].append(value)
    return values


def seconds(work: Callable[[], object], device: str = "cpu") -> float:
    """Measure the duration of `work`, on a GPU with CUDA events."""
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


def compare(case: str, values: Rounds, ours: str, baseline: str, unit: str, **rest: object) -> Row:
    """Build a row from the rounds of two sides; the ratio is ours / baseline."""
    ratios = [x / y for x, y in zip(values[ours], values[baseline], strict=True)]
    low, middle, high = quartiles(ratios)
    sides = (statistics.median(values[ours]), statistics.median(values[baseline]))
    return Row(case, *sides, unit, middle, low, high, **rest)  # type: ignore[arg-type]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return first quartile, median and third quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def matmul_gflops(device: str = "cpu", dtype: torch.dtype = torch.float32, repeats: int = 10) -> float:
    """Measure GFLOP/s of a matmul, with the faster of MKL and oneDNN on CPU: the reference for MFU."""
    size = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    work = [functools.partial(matmul, a, b) for matmul in (torch.mm, linear)]
    best = min(seconds(matmul, device) for matmul in work * repeats)
    return 2 * size**3 / best / 1e9


def program_peak(device: str) -> float:
    """Measure GFLOP/s of a matmul in the precision that training programs select on a device."""
    return matmul_gflops(device, torch.bfloat16 if device == "cuda" else torch.float32)


def with_mfu(row: Row, model: nn.Module, peak: float) -> Row:
    """Add the MFU of both sides to a row in images/s, relative to `peak` GFLOP/s."""
    from vit_scale.cost.count import count_model

    gflops = 6 * count_model(model).macs / 1e9  # per image, forward and backward, without stochastic depth
    return replace(row, mfu=(row.ours * gflops / peak, row.baseline * gflops / peak))


def machine(device: str = "cpu") -> str:
    """Describe processor, cores, threads and versions."""
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
    """Create a parser with the options of all benchmarks."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    about = "cpu or cuda (default: cuda if available)"
    options.add_argument("--device", type=_choose_device, choices=["cpu", "cuda"], default="auto", help=about)
    options.add_argument("--rounds", type=int, default=rounds, help="(default: %(default)s)")
    options.add_argument("--json", action="store_true", help="print JSON")
    return options


def _choose_device(requested: str) -> str:
    """Resolve `auto`. For `cpu`, hide GPUs, since programs started by a benchmark would use them."""
    if requested == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if requested == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return requested


def model_and_batch(option: str) -> tuple[str, int]:
    """Parse `vit_cifar_small:64` into a name and a batch size."""
    name, batch = option.split(":")
    return name, int(batch)


def show(rows: Sequence[Row], args: argparse.Namespace, notes: Sequence[str] = ()) -> None:
    """Print the rows as a table or as JSON."""
    if args.json:
        found = [asdict(row) | {"met": row.met} for row in rows]
        print(json.dumps({"machine": machine(args.device), "rows": found, "notes": list(notes)}, indent=2))
        return
    print(machine(args.device))
    width = max(len(row.case) for row in rows)
    print(f"{'':{width}}  {'ours':>12}  {'baseline':>12}  {'':12}  {'ratio':>6}  {'quartiles':>13}  target")
    for row in rows:
        ours, baseline = format_sides(row)
        print(f"{row.case:{width}}  {ours:>12}  {baseline:>12}  {row.unit:12}  {_ratio(row)}")
        for name, value in row.more.items():
            print(f"{'':{width}}  {number(value):>10}  {name}")
    for note in notes:
        print(note)


def format_sides(row: Row) -> tuple[str, str]:
    """Format both numbers, with their MFU if known: `65.5 (68%)`."""
    ours, baseline = number(row.ours), number(row.baseline)
    if row.mfu is None:
        return ours, baseline
    return f"{ours} ({100 * row.mfu[0]:.0f}%)", f"{baseline} ({100 * row.mfu[1]:.0f}%)"


def number(value: float) -> str:
    """Format with three significant digits, or all digits before the decimal point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(row: Row) -> str:
    return f"{row.ratio:6.2f}  {row.low:6.2f}-{row.high:6.2f}  {row.format_target()}"
