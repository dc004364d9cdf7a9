"""RandAugment (Cubuk et al., 2020) by timm's spec strings: the same operations, magnitudes and probabilities."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from vit_scale.config import AugmentConfig
from vit_scale.data.augment import color_ops as color
from vit_scale.data.augment import geometric_ops as geometric
from vit_scale.data.augment.color_ops import Planes
from vit_scale.errors import UserError

SLOTS_PER_LAYER = 5
"""Random numbers for each layer: which operation, whether, how strong, which sign, which interpolation."""

_FULL = 10.0  # The magnitude that means "full strength".
_NORMAL = NormalDist()


class Dice(NamedTuple):
    """What an operation may depend on besides its level (0 to 1, more with `mmax`)."""

    negative: bool
    bicubic: bool
    fill: Planes

    def sign(self, value: float) -> float:
        return -value if self.negative else value


Operation = Callable[[Planes, float, Dice], Planes]


def _enhance(level: float) -> float:
    return 0.1 + 1.8 * level


def _enhance_away(level: float, dice: Dice) -> float:
    return max(0.1, 1 + dice.sign(0.9 * level))


# What each name does at a level. "Increasing" twins grow stronger with the level, where the originals do not.
OPERATIONS: dict[str, Operation] = {
    "AutoContrast": lambda x, level, dice: color.auto_contrast(x),
    "Equalize": lambda x, level, dice: color.equalize(x),
    "Invert": lambda x, level, dice: color.invert(x),
    "Posterize": lambda x, level, dice: color.posterize(x, int(level * 4)),
    "PosterizeIncreasing": lambda x, level, dice: color.posterize(x, 4 - int(level * 4)),
    "Solarize": lambda x, level, dice: color.solarize(x, min(256, int(level * 256))),
    "SolarizeIncreasing": lambda x, level, dice: color.solarize(x, 256 - min(256, int(level * 256))),
    "SolarizeAdd": lambda x, level, dice: color.solarize_add(x, min(128, int(level * 110))),
    "Color": lambda x, level, dice: color.saturation(x, _enhance(level)),
    "ColorIncreasing": lambda x, level, dice: color.saturation(x, _enhance_away(level, dice)),
    "Contrast": lambda x, level, dice: color.contrast(x, _enhance(level)),
    "ContrastIncreasing": lambda x, level, dice: color.contrast(x, _enhance_away(level, dice)),
    "Brightness": lambda x, level, dice: color.brightness(x, _enhance(level)),
    "BrightnessIncreasing": lambda x, level, dice: color.brightness(x, _enhance_away(level, dice)),
    "Sharpness": lambda x, level, dice: color.sharpness(x, _enhance(level)),
    "SharpnessIncreasing": lambda x, level, dice: color.sharpness(x, _enhance_away(level, dice)),
    "Desaturate": lambda x, level, dice: color.saturation(x, 1 - min(1.0, 0.5 + 0.5 * level)),
    "GaussianBlur": lambda x, level, dice: color.blur(x, min(2.0, 0.1 + 1.9 * level)),
    "Rotate": lambda x, level, dice: geometric.rotate(x, dice.sign(30 * level), dice.bicubic, dice.fill),
    "ShearX": lambda x, level, dice: geometric.shear_x(x, dice.sign(0.3 * level), dice.bicubic, dice.fill),
    "ShearY": lambda x, level, dice: geometric.shear_y(x, dice.sign(0.3 * level), dice.bicubic, dice.fill),
    "TranslateXRel": lambda x, level, dice: geometric.translate_x(x, dice.sign(0.45 * level), dice.bicubic, dice.fill),
    "TranslateYRel": lambda x, level, dice: geometric.translate_y(x, dice.sign(0.45 * level), dice.bicubic, dice.fill),
}

_GROWING = ("Posterize", "Solarize", "Color", "Contrast", "Brightness", "Sharpness")
_PLAIN = (
    *("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "SolarizeAdd", "Color", "Contrast"),
    *("Brightness", "Sharpness", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel"),
)
_INCREASING = tuple(name + "Increasing" if name in _GROWING else name for name in _PLAIN)
_UNWEIGHTED = {"3a": ("SolarizeIncreasing", "Desaturate", "GaussianBlur")}

# Sets with weights are drawn without replacement.
_WEIGHTED: dict[str, dict[str, float]] = {
    "weights": {
        **dict.fromkeys(_INCREASING, 0.05),
        **{"Rotate": 3, "ShearX": 2, "ShearY": 2, "TranslateXRel": 1, "TranslateYRel": 1},
        **{"ColorIncreasing": 0.25, "SharpnessIncreasing": 0.25, "AutoContrast": 0.25},
    },
    "3aw": {
        **{"SolarizeIncreasing": 6, "Desaturate": 6, "GaussianBlur": 6, "Rotate": 3, "ShearX": 2, "ShearY": 2},
        **{"PosterizeIncreasing": 1, "AutoContrast": 1, "ColorIncreasing": 1, "SharpnessIncreasing": 1},
        **{"ContrastIncreasing": 1, "BrightnessIncreasing": 1, "Equalize": 1, "Invert": 1},
    },
}


@dataclass(frozen=True)
class RandAugmentSpec:
    """What a spec string says."""

    magnitude: float = _FULL
    layers: int = 2
    probability: float = 0.5
    magnitude_std: float = 0.0
    """Standard deviation of the magnitude; infinite: uniform from 0 to the magnitude."""
    magnitude_max: float = _FULL
    increasing: bool = False
    choices: str = ""
    """Name of a set of operations: empty, `weights`, `3a` or `3aw`."""


def parse_spec(augment: AugmentConfig) -> RandAugmentSpec | None:
    """The RandAugment that the options ask for, by a spec string or by fields; None: none."""
    if not augment.rand_augment:
        if augment.rand_magnitude is None:
            return None
        return RandAugmentSpec(
            augment.rand_magnitude, augment.rand_layers, 0.5, augment.rand_magnitude_std, _FULL, augment.rand_increasing
        )
    if augment.rand_magnitude is not None:
        raise UserError("augment.rand_augment and augment.rand_magnitude: give one of the two")
    kind, *sections = augment.rand_augment.split("-")
    if kind != "rand":
        raise UserError(_complaint(augment.rand_augment, kind, "specs start with `rand`, such as rand-m9-mstd0.5-inc1"))
    fields: dict[str, float | int | bool | str] = {}
    for section in sections:
        fields.update(_parse_section(section, augment.rand_augment))
    return RandAugmentSpec(**fields)  # type: ignore[arg-type]


def _parse_section(section: str, spec: str) -> dict[str, float | int | bool | str]:
    if section.startswith("t"):
        if section[1:] not in (*_WEIGHTED, *_UNWEIGHTED):
            raise UserError(_complaint(spec, section, "sets are tweights, t3a, t3aw"))
        return {"choices": section[1:]}
    match = re.fullmatch(r"([a-z]+)(\d+(?:\.\d*)?|inf)", section)
    key, text = match.groups() if match else ("", "0")
    value = float(text)
    match key:
        case "m":
            return {"magnitude": value}
        case "n" if value >= 1 and value == int(value):
            return {"layers": int(value)}
        case "p" if value <= 1:
            return {"probability": value}
        case "mstd":
            return {"magnitude_std": math.inf if value > 100 else value}
        case "mmax" if value > 0:
            return {"magnitude_max": value}
        case "inc":
            return {"increasing": bool(value)}
    raise UserError(_complaint(spec, section, "sections are m, n, p (0..1), mstd, mmax, inc with a number, and t"))


def _complaint(spec: str, section: str, allowed: str) -> str:
    return f"augment.rand_augment={spec}: `{section}` is not understood; {allowed}"


class RandAugment:
    """Applies a spec to planes [C, H, W]; every choice is read from a row of uniform numbers."""

    def __init__(self, spec: RandAugmentSpec, interpolation: str, fill: Planes):
        self.spec, self.interpolation, self.fill = spec, interpolation, fill
        self.weights = _WEIGHTED.get(spec.choices)
        self.names = _UNWEIGHTED.get(spec.choices) or (_INCREASING if spec.increasing else _PLAIN)
        self.slots = spec.layers * SLOTS_PER_LAYER

    def __call__(self, x: Planes, u: Sequence[float]) -> Planes:
        return self.change([x], [u])[0]

    def change(self, images: list[Planes], rows: Sequence[Sequence[float]]) -> list[Planes]:
        """Each image by its own row; those with the same operation one after the other, which is faster."""
        images, chosen = list(images), [self.choose(u) for u in rows]
        for layer in range(self.spec.layers):
            first = layer * SLOTS_PER_LAYER
            due = [i for i, u in enumerate(rows) if u[first + 1] < self.spec.probability and layer < len(chosen[i])]
            for i in sorted(due, key=lambda i: chosen[i][layer]):
                strength, sign, filter_ = rows[i][first + 2 : first + SLOTS_PER_LAYER]
                dice = Dice(sign < 0.5, self._bicubic(filter_), self.fill)
                operation = OPERATIONS[chosen[i][layer]]
                images[i] = operation(np.ascontiguousarray(images[i]), self._magnitude(strength) / _FULL, dice)
        return images

    def choose(self, u: Sequence[float]) -> list[str]:
        """Names of the operations, one a layer."""
        draws = u[0 : self.slots : SLOTS_PER_LAYER]
        if self.weights is None:
            return [self.names[int(draw * len(self.names))] for draw in draws]
        left = dict(self.weights)
        return [_take_weighted(left, draw) for draw in draws if left]

    def _magnitude(self, u: float) -> float:
        spec, magnitude = self.spec, self.spec.magnitude
        if spec.magnitude_std == math.inf:
            magnitude = u * magnitude
        elif spec.magnitude_std > 0:
            magnitude += spec.magnitude_std * _NORMAL.inv_cdf(max(u, 1e-12))
        return max(0.0, min(magnitude, spec.magnitude_max))

    def _bicubic(self, u: float) -> bool:
        return u < 0.5 if self.interpolation == "random" else self.interpolation == "bicubic"


def _take_weighted(left: dict[str, float], u: float) -> str:
    """Draw one by weight, and take it out."""
    ends = np.cumsum(list(left.values()))
    name = list(left)[int(np.searchsorted(ends, u * ends[-1], side="right"))]
    del left[name]
    return name
