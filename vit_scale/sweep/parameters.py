"""Parse an entry of `parameters:` in a W&B sweep file into a distribution."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vit_scale.errors import UserError
from vit_scale.sweep.distributions import Choice, Distribution, IntUniform, Normal, Uniform

Spec = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A W&B distribution: how to build it, its required keys and its optional keys."""

    build: Callable[[Spec], Distribution]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


def _uniform(spec: Spec, *, exponents: bool = False, log: bool = False, quantized: bool = False) -> Uniform:
    low, high = (math.exp(spec[k]) if exponents else spec[k] for k in ("min", "max"))
    return Uniform(low, high, log, spec.get("q", 1) if quantized else None)


def _inverse_log_uniform(spec: Spec) -> Uniform:
    """W&B: the logarithm of 1/x is uniform between `min` and `max`."""
    return Uniform(math.exp(-spec["max"]), math.exp(-spec["min"]), log=True)


def _normal(spec: Spec, *, log: bool = False, quantized: bool = False) -> Normal:
    return Normal(spec.get("mu", 0.0), spec.get("sigma", 1.0), log, spec.get("q", 1) if quantized else None)


def _choice(spec: Spec) -> Choice:
    probabilities = spec.get("probabilities")
    return Choice(tuple(spec["values"]), None if probabilities is None else tuple(probabilities))


BOUNDS = ("min", "max")
MOMENTS = ("mu", "sigma")
KINDS: dict[str, Kind] = {
    "constant": Kind(lambda s: Choice((s["value"],)), ("value",)),
    "categorical": Kind(_choice, ("values",)),
    "categorical_w_probabilities": Kind(_choice, ("values", "probabilities")),
    "int_uniform": Kind(lambda s: IntUniform(s["min"], s["max"]), BOUNDS),
    "uniform": Kind(_uniform, BOUNDS),
    "q_uniform": Kind(lambda s: _uniform(s, quantized=True), BOUNDS, ("q",)),
    "log_uniform": Kind(lambda s: _uniform(s, exponents=True, log=True), BOUNDS),
    "log_uniform_values": Kind(lambda s: _uniform(s, log=True), BOUNDS),
    "q_log_uniform": Kind(lambda s: _uniform(s, exponents=True, log=True, quantized=True), BOUNDS, ("q",)),
    "q_log_uniform_values": Kind(lambda s: _uniform(s, log=True, quantized=True), BOUNDS, ("q",)),
    "inv_log_uniform": Kind(_inverse_log_uniform, BOUNDS),
    "inv_log_uniform_values": Kind(lambda s: _uniform(s, log=True), BOUNDS),
    "normal": Kind(_normal, (), MOMENTS),
    "q_normal": Kind(lambda s: _normal(s, quantized=True), (), (*MOMENTS, "q")),
    "log_normal": Kind(lambda s: _normal(s, log=True), (), MOMENTS),
    "q_log_normal": Kind(lambda s: _normal(s, log=True, quantized=True), (), (*MOMENTS, "q")),
}


def read_distribution(where: str, spec: Any) -> Distribution:
    """Parse an entry of `parameters:`; raises `UserError`, whose message starts with `where`, if it is invalid."""
    if not isinstance(spec, dict) or not spec:
        raise UserError(f"{where} = {spec!r}: must be a mapping, e.g. {{value: 1}} or {{values: [1, 2]}}")
    name = spec.get("distribution") or _implied(where, spec)
    if name not in KINDS:
        raise UserError(f"{where}: distribution {name!r} is not supported; supported: {', '.join(KINDS)}")
    kind = KINDS[name]
    missing = [key for key in kind.required if key not in spec]
    extra = sorted(set(spec) - {*kind.required, *kind.optional, "distribution"})
    if missing or extra:
        problem = f"requires {', '.join(missing)}" if missing else f"does not support {', '.join(extra)}"
        raise UserError(f"{where}: {name} {problem}; its keys are {', '.join((*kind.required, *kind.optional))}")
    _check_numbers(where, name, spec)
    _check_values(where, spec)
    return kind.build(spec)


def _implied(where: str, spec: Spec) -> str:
    """Return the distribution that W&B uses if none is named."""
    if "probabilities" in spec:
        return "categorical_w_probabilities"
    if "values" in spec or "value" in spec:
        return "categorical" if "values" in spec else "constant"
    if "min" in spec and "max" in spec:
        integers = all(isinstance(spec[key], int) and not isinstance(spec[key], bool) for key in BOUNDS)
        return "int_uniform" if integers else "uniform"
    raise UserError(f"{where}: set value, values, min and max, or a distribution; found {', '.join(spec)}")


def _check_numbers(where: str, name: str, spec: Spec) -> None:
    for key in (*BOUNDS, *MOMENTS, "q"):
        number = spec.get(key, 1)
        if isinstance(number, bool) or not isinstance(number, int | float):
            hint = _number_hint(number)
            raise UserError(f"{where}.{key} = {number!r}: must be a number{hint}")
        if name == "int_uniform" and not isinstance(number, int):
            raise UserError(f"{where}.{key} = {number!r}: int_uniform requires integers; use uniform or q_uniform")
    if spec.get("min", 0) > spec.get("max", math.inf):
        raise UserError(f"{where}: min = {spec['min']} is greater than max = {spec['max']}")
    if name.endswith("log_uniform_values") and spec["min"] <= 0:
        raise UserError(f"{where}.min = {spec['min']}: must be greater than 0 for a logarithmic distribution")
    if spec.get("q", 1) <= 0 or spec.get("sigma", 1) < 0:
        raise UserError(f"{where}: q must be greater than 0 and sigma at least 0")


def _number_hint(text: Any) -> str:
    try:
        return f"; W&B's YAML parser reads it as a string, write {float(text):.1e}"
    except (TypeError, ValueError):
        return ""


def _check_values(where: str, spec: Spec) -> None:
    values = spec.get("values", [spec.get("value", 0)])
    if not isinstance(values, list) or not values:
        raise UserError(f"{where}.values = {values!r}: must be a list of at least one value")
    if None in values:
        raise UserError(f"{where}: W&B passes null as the string None; for no value, write the string 'null' in quotes")
    weights = spec.get("probabilities")
    if weights is None:
        return
    if not isinstance(weights, list) or len(weights) != len(values):
        raise UserError(f"{where}.probabilities = {weights!r}: must be a list of {len(values)} numbers, one per value")
    numbers = all(isinstance(weight, int | float) and weight >= 0 for weight in weights)
    if not numbers or abs(sum(weights) - 1) > 1e-6:
        raise UserError(f"{where}.probabilities = {weights!r}: must be non-negative numbers that sum to 1")
