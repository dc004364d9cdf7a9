"""Load weights into a model of another resolution, patch size or number of classes, and say what became of them."""

from __future__ import annotations

import dataclasses
import json
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
from vit_scale.models.weights.read import StateDict, is_hub_name, read_hub, read_weights
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
_RELATIVE = "rel_pos.relative_position_bias_table"


@dataclasses.dataclass
class WeightsReport:
    """What became of each tensor: names, with a word of explanation where one is due."""

    source: str
    kept: list[str] = dataclasses.field(default_factory=list)
    """Taken as they are."""
    resized: dict[str, str] = dataclasses.field(default_factory=dict)
    """Taken, but fitted: name to what was done."""
    initialised: dict[str, str] = dataclasses.field(default_factory=dict)
    """In the model but not taken from the weights: name to the reason."""
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    """Among the weights but not in the model: name to the reason."""

    def summary(self) -> str:
        """The account for a person to read."""
        lines = [f"Weights from {self.source}: {len(self.kept)} tensors kept as they are."]
        for title, tensors in (
            ("resized", self.resized),
            ("left as initialised", self.initialised),
            ("skipped", self.skipped),
        ):
            lines += [f"  {title}: {name} ({why})" for name, why in tensors.items()]
        return "\n".join(lines)


def load_weights(
    model: nn.Module, source: str | Path, *, grid: Grid | None = None, editing: Editing = nullcontext
) -> WeightsReport:
    """Load weights into a model and say what was kept, resized, skipped and left as initialised.

    `source`: a safetensors or torch file, the folder of a run (finished or not) or of a checkpoint (the average if it
    has one), or `timm/<name>` from the hub, such as `timm/vit_base_patch16_224.augreg_in21k`.
    Weights of another resolution, patch size, number of channels or number of classes are fitted; those of another
    width or depth are a UserError. `grid`: rows and columns of patches that the weights were made for, needed only
    for a lone file where it is neither square nor of the model's proportions.
    """
    weights = _read_own_hub_weights(model, source) if _is_own_hub_name(model, source) else read_weights(source)
    grid = grid or _grid_of_run(Path(source))
    return fit_weights(model, weights, source=str(source), grid=grid, editing=editing)


def fit_weights(
    model: nn.Module, weights: StateDict, *, source: str, grid: Grid | None = None, editing: Editing = nullcontext
) -> WeightsReport:
    """`load_weights` for tensors that are already in memory."""
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
            report.initialised[name] = f"the weights have {len(tensor)} classes, the model {len(own[name])}"
        else:
            raise _another_architecture(source, name, tensor.shape, own[name].shape)
    report.initialised |= {name: "not among the weights" for name in own if name not in weights}
    if not report.kept:
        raise UserError(f"model.weights = {source}: not one tensor fits the model; they were made by another one.")
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
    """Whether these are timm's own weights for this very timm model; a tag after a dot picks among several."""
    name = str(source).removeprefix(TIMM_PREFIX)
    return is_hub_name(source) and isinstance(model, TimmModel) and name.split(".")[0] == model.timm_name.split(".")[0]


def _read_own_hub_weights(model: Any, source: str | Path) -> StateDict:
    """timm knows best how to fit each family's weights to the options of the model; a head it made anew is left out."""
    from timm.models import get_pretrained_cfg

    weights = read_hub(str(source), **model.timm_options)
    # Weights with another tag than the model's may have other classes, such as ImageNet-21k's.
    published = get_pretrained_cfg(str(source).removeprefix(TIMM_PREFIX))
    if published is not None and model.num_classes == published.num_classes:
        return weights
    return {name: tensor for name, tensor in weights.items() if not name.startswith(_heads(model))}


def _grid_of_run(folder: Path) -> Grid | None:
    """The grid that a run's own options tell, if the source is a run (or a checkpoint) of one of our models."""
    try:
        if (folder / "meta.json").is_file():
            options = json.loads((folder / "meta.json").read_text())["config"]["model"]
        else:
            options = yaml.safe_load((folder / "config.yaml").read_text())["model"]
        return grid_of(ModelConfig(**with_current_names({"model": options})["model"]))
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return None  # The options of a run only help; weights are read without them too.


def grid_of(config: ModelConfig) -> Grid | None:
    """Rows and columns of patches of one of our models; None for timm's."""
    try:
        return resolve_variant(config).grid
    except UserError:
        return None


def _another_architecture(source: str, name: str, found: torch.Size, own: torch.Size) -> UserError:
    return UserError(
        f"model.weights = {source}: {name} is {list(found)}, but {list(own)} in the model. These are weights of "
        "another architecture; choose the model.name that they were made with."
    )


def _heads(model: nn.Module) -> tuple[str, ...]:
    """How the names of classifier tensors begin."""
    published: dict[str, Any] = getattr(model, "pretrained_cfg", {})
    names = published.get("classifier", ("head", "head_dist"))
    return tuple(f"{name}." for name in ((names,) if isinstance(names, str) else names))


def _first_convolution(model: nn.Module) -> str:
    published: dict[str, Any] = getattr(model, "pretrained_cfg", {})
    return f"{published.get('first_conv', 'patch_embed.proj')}.weight"


def _fit_to_image(
    model: nn.Module, own: StateDict, weights: StateDict, report: WeightsReport, grid: Grid | None
) -> StateDict:
    """The weights with positions and patch convolution fitted to the model's images."""
    new_grid = _grid(model)
    fitted = dict(weights)
    for name, tensor in ((name, tensor) for name, tensor in weights.items() if name in own):
        shape = own[name].shape
        same = tensor.shape == shape
        # As many patches may lie on another grid, where we are told which.
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
    """Rows and columns of patches, of models that cut images into patches."""
    if model.patch_size is None:
        return None
    (height, width), (patch_height, patch_width) = model.img_size, model.patch_size
    return height // patch_height, width // patch_width


def _fit_pos_embed(
    own_tensors: StateDict, weights: StateDict, report: WeightsReport, new_grid: Grid, grid: Grid | None
) -> StateDict:
    """Patch positions resampled, those of prefix tokens kept apart; a token whose position has no place takes it in."""
    pos, own = weights["pos_embed"], own_tensors["pos_embed"]
    if pos.shape[-1] != own.shape[-1]:
        raise _another_architecture(report.source, "pos_embed", pos.shape, own.shape)
    old_prefix, old_grid = _old_layout(pos.shape[1], weights, new_grid, grid, report.source)
    new_prefix = own.shape[1] - new_grid[0] * new_grid[1]
    prefix = own[:, :new_prefix].clone()
    shared = min(old_prefix, new_prefix)
    prefix[:, :shared] = pos[:, :shared]
    if not old_prefix:
        prefix.zero_()  # These tokens had none, and go on as they were.
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
    """How many prefix tokens have a position (all or none), and the grid of the others."""
    tokens = sum(weights[name].shape[1] for name in _TOKENS if name in weights)
    for prefix in (tokens, 0):
        patches = length - prefix
        if grid is not None and grid[0] * grid[1] == patches:
            return prefix, grid
        found = new if patches == new[0] * new[1] else source_grid(patches, new)
        if grid is None and found is not None:
            return prefix, found
    raise UserError(
        f"model.weights = {source}: cannot tell the grid of patches from {length} position embeddings; "
        "pass `grid=(rows, columns)` to load_weights."
    )
