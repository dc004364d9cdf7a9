"""Load weights into a model of another resolution, patch size or number of classes, and report what changed."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from vit_scale.config import ModelConfig, with_current_names
from vit_scale.errors import UserError
from vit_scale.models.interface import full_shape
from vit_scale.models.timm_models import TimmModel
from vit_scale.models.variants import TIMM_PREFIX, resolve_variant
from vit_scale.models.weights.init import Editing
from vit_scale.models.weights.read import ADDED, StateDict, is_hub_name, read_hub, read_weights
from vit_scale.models.weights.resample import (
    Grid,
    resample_channels,
    resample_line,
    resample_patch_kernel,
    resample_positions,
    resample_relative_bias,
    source_grid,
)

_TOKENS = ("cls_token", "dist_token", "reg_token")
_RANDOM_FEATURES = ".attn.random_features"
_RELATIVE = "rel_pos.relative_position_bias_table"


@dataclasses.dataclass
class WeightsReport:
    """The outcome per tensor: names, with an explanation where there is one."""

    source: str
    kept: list[str] = dataclasses.field(default_factory=list)
    """Loaded unchanged."""
    resized: dict[str, str] = dataclasses.field(default_factory=dict)
    """Loaded after resizing: name to shapes."""
    initialized: dict[str, str] = dataclasses.field(default_factory=dict)
    """In the model but not loaded: name to the reason."""
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    """In the weights but not in the model: name to the reason."""

    def summary(self) -> str:
        """Return the report as text."""
        lines = [f"Weights from {self.source}: {len(self.kept)} tensors kept as they are."]
        added = Counter(name.split(".")[1] for name in self.skipped if name.startswith(ADDED))
        skipped = {name: why for name, why in self.skipped.items() if not name.startswith(ADDED)}
        skipped |= {f"{layer}.*": f"{count} tensors, not part of the backbone" for layer, count in added.items()}
        for title, tensors in (
            ("resized", self.resized),
            ("left as initialized", self.initialized),
            ("skipped", skipped),
        ):
            lines += [f"  {title}: {name} ({why})" for name, why in tensors.items()]
        return "\n".join(lines)


def load_weights(
    model: nn.Module, source: str | Path, *, grid: Grid | None = None, editing: Editing = nullcontext
) -> WeightsReport:
    """Load weights into a model and report what was kept, resized, skipped and left as initialized.

    `source`: a safetensors or torch file, a run directory (finished or not) or checkpoint directory (its EMA weights if
    there are any), or `timm/<name>` from the Hub, such as `timm/vit_base_patch16_224.augreg_in21k`.
    Weights of another resolution, patch size, number of channels or number of classes are resized; for another
    width or depth raise `UserError`. `grid`: rows and columns of patches that the weights were trained with, needed
    only for a single file if it is neither square nor proportional to the model's.
    """
    weights = _read_own_hub_weights(model, source) if _is_own_hub_name(model, source) else read_weights(source)
    grid = grid or _grid_of_run(Path(source))
    return fit_weights(model, weights, source=str(source), grid=grid, editing=editing)


def fit_weights(
    model: nn.Module, weights: StateDict, *, source: str, grid: Grid | None = None, editing: Editing = nullcontext
) -> WeightsReport:
    """Load tensors that are already in memory; see `load_weights`."""
    report = WeightsReport(source=source)
    own = _own_tensors(model, editing)
    fitted = {}
    for name, tensor in _fit_to_image(model, own, weights, report, grid).items():
        if name not in own:
            report.skipped[name] = "the model has no such tensor"
        elif tensor.shape == own[name].shape:
            fitted[name] = tensor
            if name not in report.resized:
                report.kept.append(name)
        elif name.startswith(_heads(model)):
            report.initialized[name] = f"the weights have {len(tensor)} classes, the model {len(own[name])}"
        elif name.endswith(_RANDOM_FEATURES):
            report.initialized[name] = f"the weights have {len(tensor)} random features, the model {len(own[name])}"
        else:
            raise _another_architecture(source, name, tensor.shape, own[name].shape)
    report.initialized |= {name: "not among the weights" for name in own if name not in weights}
    if not report.kept:
        raise UserError(f"model.weights = {source}: no tensor fits the model; they belong to another architecture.")
    sharded = _sharded(model)
    model.load_state_dict({name: tensor for name, tensor in fitted.items() if name not in sharded}, strict=False)
    for name, parameter in sharded.items():
        if name in fitted:
            with torch.no_grad(), editing(parameter) as full:
                full.copy_(fitted[name])
    return report


def _sharded(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if full_shape(p) != p.shape}


def _own_tensors(model: nn.Module, editing: Editing) -> StateDict:
    """Return the tensors of a model; of sharded ones only the shape, except position embeddings."""
    own = model.state_dict()
    for name, parameter in _sharded(model).items():
        if name == "pos_embed":
            with editing(parameter) as full:
                own[name] = full.detach().clone()
        else:
            own[name] = torch.empty(full_shape(parameter), device="meta")
    return own


def _is_own_hub_name(model: nn.Module, source: str | Path) -> bool:
    """Return whether these are timm's own weights for this timm model; a tag after a dot selects one of several."""
    name = str(source).removeprefix(TIMM_PREFIX)
    return is_hub_name(source) and isinstance(model, TimmModel) and name.split(".")[0] == model.timm_name.split(".")[0]


def _read_own_hub_weights(model: Any, source: str | Path) -> StateDict:
    """Let timm fit the weights of each family to the options of the model; skip a head that it reinitialized."""
    from timm.models import get_pretrained_cfg

    weights = read_hub(str(source), **model.timm_options)
    # Weights with another tag may have other classes, such as ImageNet-21k's.
    published = get_pretrained_cfg(str(source).removeprefix(TIMM_PREFIX))
    if published is not None and model.num_classes == published.num_classes:
        return weights
    return {name: tensor for name, tensor in weights.items() if not name.startswith(_heads(model))}


def _grid_of_run(folder: Path) -> Grid | None:
    """Return the patch grid from the options of a run, if the source is a run or checkpoint of one of our models."""
    try:
        if (folder / "meta.json").is_file():
            options = json.loads((folder / "meta.json").read_text())["config"]["model"]
        else:
            options = yaml.safe_load((folder / "config.yaml").read_text())["model"]
        return grid_of(ModelConfig(**with_current_names({"model": options})["model"]))
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return None  # Optional: weights are readable without the options of the run.


def grid_of(config: ModelConfig) -> Grid | None:
    """Return rows and columns of patches of one of our models; None for timm's."""
    try:
        return resolve_variant(config).grid
    except UserError:
        return None


def _another_architecture(source: str, name: str, found: torch.Size, own: torch.Size) -> UserError:
    return UserError(
        f"model.weights = {source}: {name} is {list(found)}, but {list(own)} in the model. These are weights of "
        "another architecture; use the model.name that they were trained with."
    )


def _heads(model: nn.Module) -> tuple[str, ...]:
    """Return the prefixes of classifier tensors."""
    published: dict[str, Any] = getattr(model, "pretrained_cfg", {})
    names = published.get("classifier", ("head", "head_dist"))
    return tuple(f"{name}." for name in ((names,) if isinstance(names, str) else names))


def _first_convolution(model: nn.Module) -> str:
    published: dict[str, Any] = getattr(model, "pretrained_cfg", {})
    return f"{published.get('first_conv', 'patch_embed.proj')}.weight"


def _fit_to_image(
    model: nn.Module, own: StateDict, weights: StateDict, report: WeightsReport, grid: Grid | None
) -> StateDict:
    """Return the weights with positions and patch convolution resized to the model's images."""
    new_grid = _grid(model)
    fitted = dict(weights)
    for name, tensor in ((name, tensor) for name, tensor in weights.items() if name in own):
        shape = own[name].shape
        same = tensor.shape == shape
        # The same number of patches may be on another grid, if it is known.
        if name == "pos_embed" and new_grid and not (same and grid in (None, new_grid)):
            fitted |= _fit_pos_embed(own, weights, report, new_grid, grid)
        elif same:
            continue
        elif name == _first_convolution(model):
            fitted[name] = _fit_kernel(tensor, shape)
        elif name in ("pos_embed.row", "pos_embed.column"):
            fitted[name] = resample_line(tensor, shape[1])
        elif name.endswith(_RELATIVE) and new_grid:
            fitted[name] = resample_relative_bias(tensor, shape[0], new_grid, grid)
        else:
            continue
        report.resized[name] = f"{list(tensor.shape)} to {list(shape)}"
    return fitted


def _fit_kernel(kernel: Tensor, shape: torch.Size) -> Tensor:
    if kernel.shape[1] != shape[1]:
        kernel = resample_channels(kernel, shape[1])
    return kernel if kernel.shape[2:] == shape[2:] else resample_patch_kernel(kernel, (shape[2], shape[3]))


def _grid(model: Any) -> Grid | None:
    """Return rows and columns of patches, for models with a patch size."""
    if model.patch_size is None:
        return None
    (height, width), (patch_height, patch_width) = model.img_size, model.patch_size
    return height // patch_height, width // patch_width


def _fit_pos_embed(
    own_tensors: StateDict, weights: StateDict, report: WeightsReport, new_grid: Grid, grid: Grid | None
) -> StateDict:
    """Resample patch positions; add the position of a prefix token to the token if the model has no such position."""
    pos, own = weights["pos_embed"], own_tensors["pos_embed"]
    if pos.shape[-1] != own.shape[-1]:
        raise _another_architecture(report.source, "pos_embed", pos.shape, own.shape)
    old_prefix, old_grid = _old_layout(pos.shape[1], weights, new_grid, grid, report.source)
    new_prefix = own.shape[1] - new_grid[0] * new_grid[1]
    prefix = own[:, :new_prefix].clone()
    shared = min(old_prefix, new_prefix)
    prefix[:, :shared] = pos[:, :shared]
    if not old_prefix:
        prefix.zero_()  # These tokens had no position embedding.
    patches = resample_positions(pos[:, old_prefix:], old_grid, new_grid)
    fitted = {"pos_embed": torch.cat([prefix, patches.to(prefix.dtype)], dim=1)}
    if old_prefix and not new_prefix:
        folded = _fold_into_tokens(pos[:, :old_prefix], weights)
        fitted |= {name: token for name, token in folded.items() if name in own_tensors}
        report.resized |= {name: "its position embedding is now part of it" for name in fitted if name != "pos_embed"}
    return fitted


def _fold_into_tokens(prefix_1PD: Tensor, weights: StateDict) -> StateDict:
    folded, start = {}, 0
    for name in (token for token in _TOKENS if token in weights):
        length = weights[name].shape[1]
        folded[name] = weights[name] + prefix_1PD[:, start : start + length]
        start += length
    return folded


def _old_layout(length: int, weights: StateDict, new: Grid, grid: Grid | None, source: str) -> tuple[int, Grid]:
    """Return how many prefix tokens have a position (all or none), and the grid of the others."""
    tokens = sum(weights[name].shape[1] for name in _TOKENS if name in weights)
    for prefix in (tokens, 0):
        patches = length - prefix
        if grid is not None and grid[0] * grid[1] == patches:
            return prefix, grid
        found = new if patches == new[0] * new[1] else source_grid(patches, new)
        if grid is None and found is not None:
            return prefix, found
    raise UserError(
        f"model.weights = {source}: cannot determine the patch grid from {length} position embeddings; "
        "pass `grid=(rows, columns)` to load_weights."
    )
