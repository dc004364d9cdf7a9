"""Compare a model with its timm counterpart on the meta device: parameters, output shapes per stage, MACs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from vit_scale.config import ModelConfig
from vit_scale.cost.closed_form import macs_by_part
from vit_scale.cost.meta import build_on_meta
from vit_scale.cost.trace import Shape, Trace, trace
from vit_scale.errors import UserError
from vit_scale.models.create import create_model
from vit_scale.models.timm_models import create_counterpart
from vit_scale.models.variants import TIMM_PREFIX, Variant, get_variant, resolve_variant

# Options that timm accepts as arguments: changing them does not change the timm model name.
_ARGUMENTS = ("img_size", "in_chans", "num_classes", "dropout", "attn_dropout")


@dataclass(frozen=True)
class StageShapes:
    """Output shapes of one stage for one image; a stage may return multiple tensors."""

    ours: list[Shape] | None
    timm: list[Shape] | None


@dataclass(frozen=True)
class TimmCheck:
    """Result of the comparison: equal if `matched` is set and `differences` is empty."""

    model: str
    matched: str | None
    """timm model name, or class if timm has no name for the shape; None if timm has no counterpart."""
    reason: str = ""
    """Why there is no counterpart, or why nothing was compared."""
    params: int = 0
    timm_params: int = 0
    tensors: int = 0
    macs: int = 0
    timm_macs: int = 0
    stages: dict[str, StageShapes] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    """One line per difference, starting with the layer."""

    @property
    def equal(self) -> bool:
        """Whether there is a counterpart and it matches in everything compared."""
        return self.matched is not None and not self.differences

    def summary(self) -> str:
        """Describe the result on one line."""
        if self.matched is None:
            return f"skipped: no timm counterpart: {self.reason}"
        if self.differences:
            more = f" (and {len(self.differences) - 1:,} more)" if len(self.differences) > 1 else ""
            return f"failed: differs from timm's {self.matched}: {self.differences[0]}{more}"
        if self.reason:
            return f"skipped: {self.matched} is a {self.reason}"
        return f"passed: {self.tensors} tensors, {len(self.stages)} stages and MACs match timm's {self.matched}"

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain numbers, strings, lists and mappings."""
        return {**dataclasses.asdict(self), "equal": self.equal}


def check_against_timm(
    model: ModelConfig | str, *, num_classes: int | None = None, in_chans: int | None = None
) -> TimmCheck:
    """Build `model` and its timm counterpart on the meta device and compare them.

    `num_classes` and `in_chans` apply if the options do not set them.
    """
    config = ModelConfig(name=model) if isinstance(model, str) else model
    config = dataclasses.replace(
        config,
        num_classes=num_classes if config.num_classes is None else config.num_classes,
        in_chans=config.in_chans or in_chans,
    )
    if config.name.startswith(TIMM_PREFIX):
        return _describe_timm_model(config)
    variant = resolve_variant(config)
    matched, named = _counterpart_of(config.name, variant)
    try:
        theirs = build_on_meta(lambda: create_counterpart(named))
    except UserError as error:
        return TimmCheck(config.name, None, reason=str(error))
    return compare(config.name, build_for_counting(config), matched, theirs)


def compare(name: str, ours: nn.Module, matched: str, theirs: nn.Module) -> TimmCheck:
    """Compare a vit_scale model with a timm model, both on the meta device."""
    variant: Variant = ours.variant  # type: ignore[assignment]
    our_tensors, their_tensors = _shapes(ours), _shapes(theirs)
    our_trace = trace(ours, variant.img_size, variant.in_chans)
    their_trace = trace(theirs, variant.img_size, variant.in_chans)
    params, timm_params = (sum(p.numel() for p in model.parameters()) for model in (ours, theirs))
    names = dict.fromkeys([*our_trace.stages, *their_trace.stages])
    stages = {stage: StageShapes(our_trace.stages.get(stage), their_trace.stages.get(stage)) for stage in names}
    differences = [
        *_differing("parameters", f"{params:,}", f"{timm_params:,}"),
        *_tensor_differences(our_tensors, their_tensors),
        *(line for stage, s in stages.items() for line in _differing(f"{stage}: output", s.ours, s.timm)),
        *_mac_differences(variant, our_trace, their_trace),
    ]
    return TimmCheck(
        model=name,
        matched=matched,
        params=params,
        timm_params=timm_params,
        tensors=len(our_tensors),
        macs=our_trace.macs.total(),
        timm_macs=their_trace.macs.total(),
        stages=stages,
        differences=differences,
    )


def _describe_timm_model(config: ModelConfig) -> TimmCheck:
    """Return the same numbers for a timm model, without a comparison."""
    model = build_for_counting(config)
    traced = trace(model, model.img_size, model.in_chans)  # type: ignore[arg-type]
    stages = {name: StageShapes(shapes, shapes) for name, shapes in traced.stages.items()}
    params, macs = sum(p.numel() for p in model.parameters()), traced.macs.total()
    return TimmCheck(
        model=config.name,
        matched=config.name.removeprefix(TIMM_PREFIX),
        reason="timm model",
        params=params,
        timm_params=params,
        tensors=len(_shapes(model)),
        macs=macs,
        timm_macs=macs,
        stages=stages,
    )


def build_for_counting(config: ModelConfig) -> nn.Module:
    """Build the model on the meta device, ignoring options that affect neither shapes nor counts."""
    options = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    options |= {"weights": None, "kernel": "auto"}
    return build_on_meta(lambda: create_model(**options))


def _counterpart_of(name: str, variant: Variant) -> tuple[str, Variant]:
    """Return the timm name (or class, if the shape is not the named model's) and the variant to build it from."""
    row = get_variant(name)
    as_in_table = dataclasses.replace(variant, **{field: getattr(row, field) for field in _ARGUMENTS})
    if row.timm_name is not None and as_in_table == row:
        return row.timm_name, variant
    matched = "VisionTransformerDistilled" if variant.distilled else "VisionTransformer"
    return matched, dataclasses.replace(variant, timm_name=None)


def _shapes(model: nn.Module) -> dict[str, Shape]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _tensor_differences(ours: Mapping[str, Shape], theirs: Mapping[str, Shape]) -> Iterator[str]:
    for name in dict.fromkeys([*ours, *theirs]):
        yield from _differing(name, ours.get(name), theirs.get(name))


def _mac_differences(variant: Variant, ours: Trace, theirs: Trace) -> Iterator[str]:
    for part in dict.fromkeys([*ours.macs, *theirs.macs]):
        yield from _differing(f"MACs of {part}", f"{ours.macs[part]:,}", f"{theirs.macs[part]:,}")
    yield from _differing("LayerNorm elements", f"{ours.norm_elements:,}", f"{theirs.norm_elements:,}")
    # A model without a head has no operations there: 0 in the closed form, nothing in the trace.
    formula, traced = ({part: n for part, n in macs.items() if n} for macs in (macs_by_part(variant), ours.macs))
    if formula != traced:
        yield f"MACs: closed form {formula}, forward pass {traced}"


def _differing(what: str, ours: object, theirs: object) -> list[str]:
    if ours == theirs:
        return []
    return [f"{what}: ours {_present(ours)}, timm {_present(theirs)}"]


def _present(value: object) -> str:
    return "missing" if value is None else str(value)
