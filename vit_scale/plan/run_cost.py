"""FLOPs of a run, and its duration at an assumed MFU (fraction of peak FLOP/s).

The MFU is assumed, not measured; override it with `--mfu`. The values are based on these published results, but lower,
since real runs also load data and synchronize:

- timm, one RTX 3090, synthetic images, AMP (its results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv): ViT-B/16 at
  390.9 images/s is 58%, ViT-L/16 at 117.1 images/s is 61% of that GPU's 71 TFLOP/s;
- big_vision, TPU v3-8: ViT-S/16, 90 epochs in 6 to 7 hours (its configs/vit_s16_i1k.py), is about 28% of 492 TFLOP/s;
- ViT-22B on TPU v4 (arXiv:2302.05442): 55%.

GPUs with a higher ratio of compute to memory bandwidth reach a lower MFU, and so do small models; the smallest are
limited by kernel launch latency.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from vit_scale.config import Config
from vit_scale.cost.activations import Precision
from vit_scale.cost.training import training_cost
from vit_scale.data.progressive import Progressive
from vit_scale.plan.machine import Machine
from vit_scale.report.model_report import ModelReport
from vit_scale.schedule import Plan

SIZES = {"tiny": (10e6, 1e9), "small": (50e6, 10e9), "base": (200e6, 40e9), "large": (float("inf"), float("inf"))}
"""Size name -> upper limits of parameters and MACs per image; the first size with either below its limit applies."""
ASSUMED_MFU = {
    "consumer and older": {"tiny": 0.12, "small": 0.30, "base": 0.40, "large": 0.45},
    "A100": {"tiny": 0.08, "small": 0.25, "base": 0.35, "large": 0.45},
    "H100 and later": {"tiny": 0.05, "small": 0.20, "base": 0.30, "large": 0.40},
    # Measured: 66% with vit_cifar_small, 77% with ViT-S/16, relative to a matmul on the same two cores.
    "CPU": {"tiny": 0.60, "small": 0.70, "base": 0.70, "large": 0.70},
}
# GPUs with a peak FLOP/s below these belong to the first or second row.
_OLDER, _AMPERE = 200e12, 500e12
# Seconds of CPU time per image, measured on an AMD EPYC core (docs/benchmarks.md): decoding what a crop of a photograph
# of 500 pixels needs, everything after that at 224 x 224, and the least for a tiny image.
_DECODE, _AUGMENT, _LEAST = 0.85e-3, 0.33e-3, 0.05e-3
_TINY_SIDE = 64


@dataclass(frozen=True)
class Cost:
    """Cost of the run. `seconds` and derived values are None if the peak FLOP/s is unknown."""

    flops_per_image: float
    """Actual FLOPs of forward and backward: reduced by stochastic depth, increased by recomputation; the mean over
    the run with progressive resizing."""
    images: int
    flops: float
    mfu: float
    mfu_source: str
    seconds: float | None
    device_hours: float | None
    images_per_second: float | None
    """Over all devices."""
    loading_cores: float | None
    """CPU cores that each device needs to load that many images."""
    frozen_flops_per_image: dict[str, float]
    """FLOPs of parts that are not trained, such as a teacher, included in `flops_per_image`."""


def run_cost(
    config: Config, report: ModelReport, plan: Plan, machine: Machine, precision: Precision, mfu: float | None
) -> Cost:
    """Compute FLOPs and duration of `plan`; `mfu` overrides the assumed one."""
    count, per_image = report.count, flops_per_image(config, report, plan)
    images = plan.steps * plan.global_batch
    mfu, source = (mfu, "set by --mfu") if mfu is not None else assumed_mfu(machine, count.params, count.macs)
    peak = machine.peak_at(precision, tf32=config.parallel.tf32)
    speed = None if peak is None else machine.devices * peak * mfu
    seconds = None if speed is None else per_image * images / speed
    return Cost(
        flops_per_image=per_image,
        images=images,
        flops=float(per_image * images),
        mfu=mfu,
        mfu_source=source,
        seconds=seconds,
        device_hours=None if seconds is None else machine.devices * seconds / 3600,
        images_per_second=None if speed is None else speed / per_image,
        loading_cores=None if speed is None else speed / per_image / machine.devices * loading_seconds(config, report),
        frozen_flops_per_image=training_cost(list(report.cost_parts), config, batch=plan.micro_batch).of_frozen,
    )


def loading_seconds(config: Config, report: ModelReport) -> float:
    """Return the CPU time to load an image at the model's size; with `data.cache` it is decoded already."""
    height, width = report.image_size
    decode = 0.0 if config.data.cache == "decoded" or max(height, width) <= _TINY_SIDE else _DECODE
    return max(_LEAST, decode + _AUGMENT * height * width / 224**2)


def flops_per_image(config: Config, report: ModelReport, plan: Plan) -> float:
    """Return the actual training FLOPs per image, averaged over the run."""
    parts = list(report.cost_parts)
    progressive = Progressive(config.augment.progressive, plan.steps)
    sides = (
        Counter(progressive.size_at(step) for step in range(plan.steps)) if config.augment.progressive else {None: 1}
    )
    flops = {side: training_cost(parts, config, batch=plan.micro_batch, side=side).total for side in sides}
    return sum(flops[side] * steps for side, steps in sides.items()) / sum(sides.values())


def assumed_mfu(machine: Machine, params: int, macs: int) -> tuple[float, str]:
    """Return the assumed MFU and a description of the assumption."""
    size = next(name for name, (most_params, most_macs) in SIZES.items() if params < most_params or macs < most_macs)
    if machine.device == "cpu":
        row = "CPU"
    else:
        peak = machine.peak_flops or _AMPERE
        row = "consumer and older" if peak < _OLDER else "A100" if peak < _AMPERE else "H100 and later"
    return ASSUMED_MFU[row][size], f"assumed for a {size} model on {row}; docs/scaling.md"
