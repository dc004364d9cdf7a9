"""Read weights from a file, a run's folder or timm's hub, under timm's names.

Files are data: safetensors, or torch's format through `weights_only=True`. A pickle that would run code is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vit_scale.checkpoints.run_weights import find_run_weights
from vit_scale.errors import UserError
from vit_scale.hub import is_hub_reachable, offline
from vit_scale.models.composite import BACKBONE
from vit_scale.models.variants import TIMM_PREFIX, check_model_name

StateDict = dict[str, Tensor]

_TORCH_SUFFIXES = (".pth", ".pt", ".bin", ".tar")
_OTHER_LAYERS = "composite."
# Trainers nest the weights; EMA weights come first, as in a run directory.
_NESTS = ("model_ema", "state_dict_ema", "model", "state_dict", "module")


def is_hub_name(source: str | Path) -> bool:
    """Return whether this is `timm/<name>` on the Hub, not a directory of that name."""
    return str(source).startswith(TIMM_PREFIX) and not Path(source).exists()


def read_weights(source: str | Path) -> StateDict:
    """Read tensors from a safetensors or torch file, a run or checkpoint directory, or `timm/<name>` on the Hub."""
    if is_hub_name(source):
        return read_hub(str(source))
    path = Path(source)
    if path.is_dir():
        return _without_backbone_prefix(find_run_weights(path).read())
    if not path.is_file():
        raise UserError(f"model.weights = {source}: file or directory not found.")
    weights = _read_torch(path) if path.suffix in _TORCH_SUFFIXES else _read_safetensors(path)
    return _without_backbone_prefix(_rename(weights))


def read_hub(source: str, **options: Any) -> StateDict:
    """Return timm's pretrained weights by name; with options of timm's model, timm fits them."""
    check_model_name(source)
    import timm

    try:
        with contextlib.nullcontext() if is_hub_reachable() else offline():
            return timm.create_model(source.removeprefix(TIMM_PREFIX), pretrained=True, **options).state_dict()
    except Exception as error:
        # timm, huggingface_hub, the HTTP library and the file system raise different errors with the same remedy.
        reason = next(iter(str(error).splitlines()), "")[:150]
        raise UserError(
            f"model.weights = {source}: download from the Hub failed ({type(error).__name__}: {reason}).\n"
            "Go online, or download model.safetensors of that model elsewhere and pass its path."
        ) from error


def _read_safetensors(path: Path) -> StateDict:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"model.weights = {path}: not a complete safetensors file ({error}).") from error


def _read_torch(path: Path) -> StateDict:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch's own message recommends loading the file anyway, which would run its code.
        raise UserError(
            f"model.weights = {path}: torch cannot read it as plain tensors, so it is corrupt or would run code. "
            "Convert it to safetensors where it was created."
        ) from error
    while isinstance(content, dict) and not any(isinstance(value, Tensor) for value in content.values()):
        inner = next((content[key] for key in _NESTS if key in content), None)
        if inner is None:
            break
        content = inner
    if not isinstance(content, dict) or not any(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"model.weights = {path}: it contains no named tensors.")
    return {name: value for name, value in content.items() if isinstance(value, Tensor)}


def backbone_weights(weights: StateDict) -> StateDict:
    """Return only the weights of the image model, under timm's names, of a composite or of an image model."""
    named = _without_backbone_prefix(weights)
    return {name: tensor for name, tensor in named.items() if not name.startswith(_OTHER_LAYERS)}


def _without_backbone_prefix(weights: StateDict) -> StateDict:
    """Return a composite's backbone under timm's names; other weights unchanged.

    The composite's other layers are marked, because one that is called `head` is not the head of the backbone.
    """
    if not any(name.startswith(BACKBONE) for name in weights):
        return weights
    return {
        name.removeprefix(BACKBONE) if name.startswith(BACKBONE) else _OTHER_LAYERS + name: tensor
        for name, tensor in weights.items()
    }


def _rename(weights: Mapping[str, Tensor]) -> StateDict:
    """Remove the prefixes of wrappers (DDP, torch.compile), and rename DeiT III's LayerScale."""
    renamed = {}
    for name, tensor in weights.items():
        for prefix in ("module.", "_orig_mod.", "model."):
            name = name.removeprefix(prefix)
        name = name.replace("._orig_mod.", ".").replace(".gamma_1", ".ls1.gamma").replace(".gamma_2", ".ls2.gamma")
        renamed[name] = tensor
    return renamed
