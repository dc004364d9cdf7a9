"""RandAugment (Cubuk et al., 2020) with timm's spec strings: the same operations, magnitudes and probabilities."""

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
"""Random numbers per layer: operation, whether to apply it, strength, sign, interpolation."""

_FULL = 10.0  # Magnitude of full strength.
_NORMAL = NormalDist()


class Draw(NamedTuple):
    """Random choices of an operation besides its level (0 to 1, more with `mmax`)."""

    negative: bool
    bicubic: bool
    fill: Planes

    def sign(self, value: float) -> float:
        return -value if self.negative else value


Operation = Callable[[Planes, float, Draw], Planes]


def _enhance(level: float) -> float:
    return 0.1 + 1.8 * level


def _enhance_away(level: float, draw: Draw) -> float:
    return max(0.1, 1 + draw.sign(0.9 * level))


# Operations at a level. "Increasing" variants grow stronger with the level; the originals do not.
OPERATIONS: dict[str, Operation] = {
    "AutoContrast": lambda x, level, draw: color.auto_contrast(x),
    "Equalize": lambda x, level, draw: color.equalize(x),
    "Invert": lambda x, level, draw: color.invert(x),
    "Posterize": lambda x, level, draw: color.posterize(x, int(level * 4)),
    "PosterizeIncreasing": lambda x, level, draw: color.posterize(x, 4 - int(level * 4)),
    "Solarize": lambda x, level, draw: color.solarize(x, min(256, int(level * 256))),
    "SolarizeIncreasing": lambda x, level, draw: color.solarize(x, 256 - min(256, int(level * 256))),
    "SolarizeAdd": lambda x, level, draw: color.solarize_add(x, min(128, int(level * 110))),
    "Color": lambda x, level, draw: color.saturation(x, _enhance(level)),
    "ColorIncreasing": lambda x, level, draw: color.saturation(x, _enhance_away(level, draw)),
    "Contrast": lambda x, level, draw: color.contrast(x, _enhance(level)),
    "ContrastIncreasing": lambda x, level, draw: color.contrast(x, _enhance_away(level, draw)),
    "Brightness": lambda x, level, draw: color.brightness(x, _enhance(level)),
    "BrightnessIncreasing": lambda x, level, draw: color.brightness(x, _enhance_away(level, draw)),
    "Sharpness": lambda x, level, draw: color.sharpness(x, _enhance(level)),
    "SharpnessIncreasing": lambda x, level, draw: color.sharpness(x, _enhance_away(level, draw)),
    "Desaturate": lambda x, level, draw: color.saturation(x, 1 - min(1.0, 0.5 + 0.5 * level)),
    "GaussianBlur": lambda x, level, draw: color.blur(x, min(2.0, 0.1 + 1.9 * level)),
    "Rotate": lambda x, level, draw: geometric.rotate(x, draw.sign(30 * level), draw.bicubic, draw.fill),
    "ShearX": lambda x, level, draw: geometric.shear_x(x, draw.sign(0.3 * level), draw.bicubic, draw.fill),
    "ShearY": lambda x, level, draw: geometric.shear_y(x, draw.sign(0.3 * level), draw.bicubic, draw.fill),
    "TranslateXRel": lambda x, level, draw: geometric.translate_x(x, draw.sign(0.45 * level), draw.bicubic, draw.fill),
    "TranslateYRel": lambda x, level, draw: geometric.translate_y(x, draw.sign(0.45 * level), draw.bicubic, draw.fill),
}

MOVING = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")
"""Operations that move pixels; a mask or a box would have to move with them."""
_GROWING = ("Posterize", "Solarize", "Color", "Contrast", "Brightness", "Sharpness")
_PLAIN = (
    *("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "SolarizeAdd", "Color", "Contrast"),
    *("Brightness", "Sharpness", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel"),
)
_INCREASING = tuple(name + "Increasing" if name in _GROWING else name for name in _PLAIN)
_UNWEIGHTED = {"3a": ("SolarizeIncreasing", "Desaturate", "GaussianBlur")}

# Weighted sets are drawn without replacement.
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
    """A parsed spec string."""

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
    """Return the RandAugment that the options request, by a spec string or by fields; None if disabled."""
    if not augment.rand_augment:
        if augment.rand_magnitude is None:
            return None
        return RandAugmentSpec(
            augment.rand_magnitude, augment.rand_layers, 0.5, augment.rand_magnitude_std, _FULL, augment.rand_increasing
        )
    if augment.rand_magnitude is not None:
        raise UserError("augment.rand_augment and augment.rand_magnitude are mutually exclusive")
    kind, *sections = augment.rand_augment.split("-")
    if kind != "rand":
        raise UserError(_invalid(augment.rand_augment, kind, "specs start with `rand`, e.g. rand-m9-mstd0.5-inc1"))
    fields: dict[str, float | int | bool | str] = {}
    for section in sections:
        fields.update(_parse_section(section, augment.rand_augment))
    return RandAugmentSpec(**fields)  # type: ignore[arg-type]


def _parse_section(section: str, spec: str) -> dict[str, float | int | bool | str]:
    if section.startswith("t"):
        if section[1:] not in (*_WEIGHTED, *_UNWEIGHTED):
            raise UserError(_invalid(spec, section, "sets: tweights, t3a, t3aw"))
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
    raise UserError(_invalid(spec, section, "sections: m, n, p (0..1), mstd, mmax, inc with a number, and t"))


def _invalid(spec: str, section: str, allowed: str) -> str:
    return f"augment.rand_augment={spec}: invalid section `{section}`; {allowed}"


class RandAugment:
    """Applies a spec to planes [C, H, W]; every random choice is read from a row of uniform numbers."""

    def __init__(self, spec: RandAugmentSpec, interpolation: str, fill: Planes):
        self.spec, self.interpolation, self.fill = spec, interpolation, fill
        self.weights = _WEIGHTED.get(spec.choices)
        self.names = _UNWEIGHTED.get(spec.choices) or (_INCREASING if spec.increasing else _PLAIN)
        self.slots = spec.layers * SLOTS_PER_LAYER

    def __call__(self, x: Planes, u: Sequence[float]) -> Planes:
        return self.change([x], [u])[0]

    def change(self, images: list[Planes], rows: Sequence[Sequence[float]]) -> list[Planes]:
        """Change each image by its own row; images with the same operation come one after another, which is faster."""
        images, chosen = list(images), [self.choose(u) for u in rows]
        for layer in range(self.spec.layers):
            first = layer * SLOTS_PER_LAYER
            due = [i for i, u in enumerate(rows) if u[first + 1] < self.spec.probability and layer < len(chosen[i])]
            for i in sorted(due, key=lambda i: chosen[i][layer]):
                strength, sign, filter_ = rows[i][first + 2 : first + SLOTS_PER_LAYER]
                draw = Draw(sign < 0.5, self._bicubic(filter_), self.fill)
                operation = OPERATIONS[chosen[i][layer]]
                images[i] = operation(np.ascontiguousarray(images[i]), self._magnitude(strength) / _FULL, draw)
        return images

    @property
    def moving(self) -> tuple[str, ...]:
        """Operations of the set that move pixels."""
        return tuple(name for name in MOVING if name in (self.weights or self.names))

    def choose(self, u: Sequence[float]) -> list[str]:
        """Return the names of the operations, one per layer."""
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
    """Draw one name by weight, and remove it."""
    ends = np.cumsum(list(left.values()))
    name = list(left)[int(np.searchsorted(ends, u * ends[-1], side="right"))]
    del left[name]
    return name
