"""An entry of a sweep file's `parameters:`, in W&B's words, as a distribution."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vit_scale.errors import UserError
from vit_scale.sweep.distributions import Choice, Distribution, Normal, Uniform, Whole

Spec = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A distribution of W&B: how it is made, the keys it must have and those it may have."""

    build: Callable[[Spec], Distribution]
    needs: tuple[str, ...] = ()
    may_have: tuple[str, ...] = ()


def _uniform(spec: Spec, *, exponents: bool = False, log: bool = False, quantised: bool = False) -> Uniform:
    low, high = (math.exp(spec[k]) if exponents else spec[k] for k in ("min", "max"))
    return Uniform(low, high, log, spec.get("q", 1) if quantised else None)


def _inverse_log_uniform(spec: Spec) -> Uniform:
    """W&B: the logarithm of 1/x is even between `min` and `max`."""
    return Uniform(math.exp(-spec["max"]), math.exp(-spec["min"]), log=True)


def _normal(spec: Spec, *, log: bool = False, quantised: bool = False) -> Normal:
    return Normal(spec.get("mu", 0.0), spec.get("sigma", 1.0), log, spec.get("q", 1) if quantised else None)


def _choice(spec: Spec) -> Choice:
    probabilities = spec.get("probabilities")
    return Choice(tuple(spec["values"]), None if probabilities is None else tuple(probabilities))


BOUNDS = ("min", "max")
MOMENTS = ("mu", "sigma")
KINDS: dict[str, Kind] = {
    "constant": Kind(lambda s: Choice((s["value"],)), ("value",)),
    "categorical": Kind(_choice, ("values",)),
    "categorical_w_probabilities": Kind(_choice, ("values", "probabilities")),
    "int_uniform": Kind(lambda s: Whole(s["min"], s["max"]), BOUNDS),
    "uniform": Kind(_uniform, BOUNDS),
    "q_uniform": Kind(lambda s: _uniform(s, quantised=True), BOUNDS, ("q",)),
    "log_uniform": Kind(lambda s: _uniform(s, exponents=True, log=True), BOUNDS),
    "log_uniform_values": Kind(lambda s: _uniform(s, log=True), BOUNDS),
    "q_log_uniform": Kind(lambda s: _uniform(s, exponents=True, log=True, quantised=True), BOUNDS, ("q",)),
    "q_log_uniform_values": Kind(lambda s: _uniform(s, log=True, quantised=True), BOUNDS, ("q",)),
    "inv_log_uniform": Kind(_inverse_log_uniform, BOUNDS),
    "inv_log_uniform_values": Kind(lambda s: _uniform(s, log=True), BOUNDS),
    "normal": Kind(_normal, (), MOMENTS),
    "q_normal": Kind(lambda s: _normal(s, quantised=True), (), (*MOMENTS, "q")),
    "log_normal": Kind(lambda s: _normal(s, log=True), (), MOMENTS),
    "q_log_normal": Kind(lambda s: _normal(s, log=True, quantised=True), (), (*MOMENTS, "q")),
}


def read_distribution(where: str, spec: Any) -> Distribution:
    """The distribution that an entry of `parameters:` describes; `where` begins the `UserError` of a bad one."""
    if not isinstance(spec, dict) or not spec:
        raise UserError(f"{where} = {spec!r}: must be a mapping such as {{value: 1}} or {{values: [1, 2]}}")
    name = spec.get("distribution") or _implied(where, spec)
    if name not in KINDS:
        raise UserError(f"{where}: distribution {name!r} is not supported; those that are: {', '.join(KINDS)}")
    kind = KINDS[name]
    missing = [key for key in kind.needs if key not in spec]
    extra = sorted(set(spec) - {*kind.needs, *kind.may_have, "distribution"})
    if missing or extra:
        wrong = f"lacks {', '.join(missing)}" if missing else f"has no use for {', '.join(extra)}"
        raise UserError(f"{where}: {name} {wrong}; it takes {', '.join((*kind.needs, *kind.may_have))}")
    _check_numbers(where, name, spec)
    _check_values(where, spec)
    return kind.build(spec)


def _implied(where: str, spec: Spec) -> str:
    """The distribution that W&B takes where none is named."""
    if "probabilities" in spec:
        return "categorical_w_probabilities"
    if "values" in spec or "value" in spec:
        return "categorical" if "values" in spec else "constant"
    if "min" in spec and "max" in spec:
        whole = all(isinstance(spec[key], int) and not isinstance(spec[key], bool) for key in BOUNDS)
        return "int_uniform" if whole else "uniform"
    raise UserError(f"{where}: give value, values, min and max, or a distribution; there is {', '.join(spec)}")


def _check_numbers(where: str, name: str, spec: Spec) -> None:
    for key in (*BOUNDS, *MOMENTS, "q"):
        number = spec.get(key, 1)
        if isinstance(number, bool) or not isinstance(number, int | float):
            hint = _number_hint(number)
            raise UserError(f"{where}.{key} = {number!r}: must be a number{hint}")
        if name == "int_uniform" and not isinstance(number, int):
            raise UserError(f"{where}.{key} = {number!r}: int_uniform takes whole numbers; use uniform or q_uniform")
    if spec.get("min", 0) > spec.get("max", math.inf):
        raise UserError(f"{where}: min = {spec['min']} is greater than max = {spec['max']}")
    if name.endswith("log_uniform_values") and spec["min"] <= 0:
        raise UserError(f"{where}.min = {spec['min']}: a logarithm needs a number greater than 0")
    if spec.get("q", 1) <= 0 or spec.get("sigma", 1) < 0:
        raise UserError(f"{where}: q must be greater than 0 and sigma at least 0")


def _number_hint(text: Any) -> str:
    try:
        return f"; W&B's YAML reads that as text, write {float(text):.1e}"
    except (TypeError, ValueError):
        return ""


def _check_values(where: str, spec: Spec) -> None:
    values = spec.get("values", [spec.get("value", 0)])
    if not isinstance(values, list) or not values:
        raise UserError(f"{where}.values = {values!r}: must be a list of at least one value")
    if None in values:
        raise UserError(f"{where}: W&B passes null on as the text None; write the text 'null', in quotes, for no value")
    weights = spec.get("probabilities")
    if weights is None:
        return
    if not isinstance(weights, list) or len(weights) != len(values):
        raise UserError(f"{where}.probabilities = {weights!r}: must be a list of {len(values)} numbers, as values is")
    numbers = all(isinstance(weight, int | float) and weight >= 0 for weight in weights)
    if not numbers or abs(sum(weights) - 1) > 1e-6:
        raise UserError(f"{where}.probabilities = {weights!r}: must be numbers of at least 0 that add up to 1")
