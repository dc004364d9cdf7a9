"""Export to timm: timm model name, arguments that reproduce our model, and weights under timm's names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vit_scale.errors import UserError
from vit_scale.export.verify import Exported, largest_difference, staged
from vit_scale.inference.loaded_run import LoadedRun
from vit_scale.models.layers.pos_embed import RowColumnEmbedding
from vit_scale.models.timm_models import TimmModel, counterpart_options
from vit_scale.models.variants import VARIANTS, PosEmbed, Variant

# timm models that accept the options of any of our variants; layer classes cannot be stored as JSON.
_PLAIN, _DISTILLED, _SWIGLU = (
    "vit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "vit_giant_patch14_reg4_dinov2",
)
_NOT_JSON = ("mlp_layer", "act_layer")
_ONLY_IN_TRAINING = ("drop", "rate")


@dataclass(frozen=True)
class TimmForm:
    """A model as timm creates it."""

    architecture: str
    """Model name for `timm.create_model`."""
    options: dict[str, Any]
    """Keyword arguments that differ from the architecture's defaults, without `num_classes`."""
    state: dict[str, torch.Tensor]

    def call(self, *first: str, num_classes: int) -> str:
        """Return the call that creates the model, as code."""
        options = [f"{name}={value!r}" for name, value in {"num_classes": num_classes, **self.options}.items()]
        return f"timm.create_model({', '.join([repr(self.architecture), *first, *options])})"


def to_timm(run: LoadedRun) -> TimmForm:
    """Convert the model of a run to timm; raises `UserError` if timm's VisionTransformer does not support it."""
    model: Any = run.model
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if isinstance(model, TimmModel):
        options = {name: value for name, value in model.timm_options.items() if _matters(name)}
        return TimmForm(model.timm_name.split(".")[0], options, state)
    variant: Variant = model.variant
    unsupported = {"pos_embed": variant.pos_embed in ("rope", "relative"), "attention": variant.attention != "full"}
    if option := next((name for name, found in unsupported.items() if found), None):
        raise UserError(
            f"model.{option} = {getattr(variant, option)}: not supported by timm's VisionTransformer; "
            "use --to onnx or --to torch-export"
        )
    if isinstance(model.pos_embed, RowColumnEmbedding):
        state = _with_full_pos_embed(model, state)
    architecture = _architecture(variant)
    defaults, options = _options(VARIANTS[architecture]), _options(variant)
    if defaults["init_values"] and not options["init_values"]:
        # timm treats None as "not given", so LayerScale cannot be disabled; with a value of 1 it has no effect.
        state |= _layer_scale_of_ones(variant)
    changed = {name: value for name, value in options.items() if value != defaults[name] and value is not None}
    return TimmForm(architecture, changed, state)


def _layer_scale_of_ones(variant: Variant) -> dict[str, torch.Tensor]:
    names = [f"blocks.{block}.{scale}.gamma" for block in range(variant.depth) for scale in ("ls1", "ls2")]
    return {name: torch.ones(variant.embed_dim) for name in names}


def _architecture(variant: Variant) -> str:
    if variant.timm_name is not None:
        return variant.timm_name
    return _DISTILLED if variant.distilled else _SWIGLU if variant.mlp == "swiglu" else _PLAIN


def _options(variant: Variant) -> dict[str, Any]:
    # Other position embeddings, once computed, are a table like the learned ones.
    positions: PosEmbed = "none" if variant.pos_embed == "none" else "learned"
    options = counterpart_options(replace(variant, pos_embed=positions))
    return {name: value for name, value in options.items() if _matters(name)}


def _matters(option: str) -> bool:
    return option != "num_classes" and option not in _NOT_JSON and not all(w in option for w in _ONLY_IN_TRAINING)


def _with_full_pos_embed(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add up row and column embeddings to a full table, with zeros for prefix tokens, which have no position."""
    table_1GD = model.pos_embed().detach()
    prefix = model.num_prefix_tokens if model.variant.embed_prefix else 0
    kept = {name: tensor for name, tensor in state.items() if not name.startswith("pos_embed.")}
    return kept | {"pos_embed": torch.nn.functional.pad(table_1GD, (0, 0, prefix, 0)).contiguous()}


def save_state(state: dict[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file that is readable by all users."""
    save_file(state, path, {"format": "pt"})
    path.chmod(0o644)


def export_timm(run: LoadedRun, out: Path) -> Exported:
    """Write a safetensors file for `timm.create_model(..., checkpoint_path=...)` and verify it."""
    import timm

    form = to_timm(run)
    classes = run.model.num_classes
    with staged(out) as path:
        save_state(form.state, path)
        loaded = timm.create_model(
            form.architecture, checkpoint_path=str(path), num_classes=classes, **form.options
        ).eval()
        difference = largest_difference(run, loaded)
    usage = "import timm\n\nmodel = " + form.call(f"checkpoint_path={str(out)!r}", num_classes=classes)
    return Exported(out, "loaded by timm.create_model with checkpoint_path", difference, usage)
