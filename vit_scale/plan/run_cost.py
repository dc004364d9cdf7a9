"""FLOPs of a run, and its time at an assumed share of the devices' peak.

The share (MFU) is an assumption, not a measurement of ours; `--mfu` sets another. It was set with an eye to these
published figures, and lower, as real runs also read data and wait for one another:

- timm, one RTX 3090, synthetic images, AMP (its results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv): ViT-B/16 at
  390.9 images/s is 58 %, ViT-L/16 at 117.1 images/s 61 % of that GPU's 71 TFLOP/s;
- big_vision, TPU v3-8: ViT-S/16, 90 epochs in 6 to 7 hours (its configs/vit_s16_i1k.py), is about 28 % of 492 TFLOP/s;
- ViT-22B on TPU v4 (arXiv:2302.05442): 55 %.

GPUs that compute more for each byte they can move are harder to keep busy, and so are small models; the smallest wait
for their kernels to be launched.
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
"""Name of a size -> parameters, and MACs of an image, below either of which a model has it."""
ASSUMED_MFU = {
    "consumer and older": {"tiny": 0.12, "small": 0.30, "base": 0.40, "large": 0.45},
    "A100": {"tiny": 0.08, "small": 0.25, "base": 0.35, "large": 0.45},
    "H100 and later": {"tiny": 0.05, "small": 0.20, "base": 0.30, "large": 0.40},
    # Measured here: 66 % with vit_cifar_small, 77 % with ViT-S/16, of a matrix product on the same two cores.
    "CPU": {"tiny": 0.60, "small": 0.70, "base": 0.70, "large": 0.70},
}
# Below these peaks in TFLOP/s a GPU belongs to the first or second row.
_OLDER, _AMPERE = 200e12, 500e12


@dataclass(frozen=True)
class Cost:
    """Of the whole run. `seconds` and what follows from it are None where the peak of the device is not known."""

    flops_per_image: float
    """Forward and backward, as spent: less by what stochastic depth skips, more by what is recomputed; the mean over
    the run where images are smaller at first."""
    images: int
    flops: float
    mfu: float
    mfu_source: str
    seconds: float | None
    device_hours: float | None
    images_per_second: float | None
    """Of all devices."""


def run_cost(
    config: Config, report: ModelReport, plan: Plan, machine: Machine, precision: Precision, mfu: float | None
) -> Cost:
    """FLOPs and time of `plan`; `mfu` in place of the assumed share."""
    count, per_image = report.count, flops_per_image(config, report, plan)
    images = plan.steps * plan.global_batch
    share, source = (mfu, "given by --mfu") if mfu is not None else assumed_mfu(machine, count.params, count.macs)
    peak = machine.peak_at(precision)
    speed = None if peak is None else machine.devices * peak * share
    seconds = None if speed is None else per_image * images / speed
    return Cost(
        flops_per_image=per_image,
        images=images,
        flops=float(per_image * images),
        mfu=share,
        mfu_source=source,
        seconds=seconds,
        device_hours=None if seconds is None else machine.devices * seconds / 3600,
        images_per_second=None if speed is None else speed / per_image,
    )


def flops_per_image(config: Config, report: ModelReport, plan: Plan) -> float:
    """What training spends on an image, on average over the run."""
    parts = list(report.cost_parts)
    progressive = Progressive(config.augment.progressive, plan.steps)
    sides = (
        Counter(progressive.size_at(step) for step in range(plan.steps)) if config.augment.progressive else {None: 1}
    )
    flops = {side: training_cost(parts, config, batch=plan.micro_batch, side=side).total for side in sides}
    return sum(flops[side] * steps for side, steps in sides.items()) / sum(sides.values())


def assumed_mfu(machine: Machine, params: int, macs: int) -> tuple[float, str]:
    """The share of the peak, and how it was assumed."""
    size = next(name for name, (most_params, most_macs) in SIZES.items() if params < most_params or macs < most_macs)
    if machine.device == "cpu":
        row = "CPU"
    else:
        peak = machine.peak_flops or _AMPERE
        row = "consumer and older" if peak < _OLDER else "A100" if peak < _AMPERE else "H100 and later"
    return ASSUMED_MFU[row][size], f"assumed for a {size} model on {row}; docs/scaling.md"
