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
from vit_scale.hub import hub_answers, offline
from vit_scale.models.variants import TIMM_PREFIX, check_model_name

StateDict = dict[str, Tensor]

_TORCH_SUFFIXES = (".pth", ".pt", ".bin", ".tar")
# Trainers nest the weights; the average comes first, as in a run's folder.
_NESTS = ("model_ema", "state_dict_ema", "model", "state_dict", "module")


def is_hub_name(source: str | Path) -> bool:
    """Whether these are `timm/<name>` on the hub, and not a folder of that name."""
    return str(source).startswith(TIMM_PREFIX) and not Path(source).exists()


def read_weights(source: str | Path) -> StateDict:
    """Named tensors of a safetensors or torch file, of a run or a checkpoint, or of `timm/<name>` on the hub."""
    if is_hub_name(source):
        return read_hub(str(source))
    path = Path(source)
    if path.is_dir():
        return find_run_weights(path).read()
    if not path.is_file():
        raise UserError(f"model.weights = {source}: there is no such file or folder.")
    return _rename(_read_torch(path) if path.suffix in _TORCH_SUFFIXES else _read_safetensors(path))


def read_hub(source: str, **options: Any) -> StateDict:
    """timm's pretrained weights by name; with options of timm's model, fitted to them by timm."""
    check_model_name(source)
    import timm

    try:
        with contextlib.nullcontext() if hub_answers() else offline():
            return timm.create_model(source.removeprefix(TIMM_PREFIX), pretrained=True, **options).state_dict()
    except Exception as error:
        # timm, huggingface_hub, the HTTP library and the file system each have errors of their own; one remedy.
        reason = next(iter(str(error).splitlines()), "")[:150]
        raise UserError(
            f"model.weights = {source}: could not get them from the hub ({type(error).__name__}: {reason}).\n"
            "Go online, or download model.safetensors of that model elsewhere and give its path."
        ) from error


def _read_safetensors(path: Path) -> StateDict:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"model.weights = {path}: this is not a whole safetensors file ({error}).") from error


def _read_torch(path: Path) -> StateDict:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch's own message advises to load the file anyhow; that advice is not ours.
        raise UserError(
            f"model.weights = {path}: torch cannot read it as plain tensors, so it is damaged or would run code. "
            "Convert it to safetensors where it was made."
        ) from error
    while isinstance(content, dict) and not any(isinstance(value, Tensor) for value in content.values()):
        inner = next((content[key] for key in _NESTS if key in content), None)
        if inner is None:
            break
        content = inner
    if not isinstance(content, dict) or not any(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"model.weights = {path}: there are no named tensors in it.")
    return {name: value for name, value in content.items() if isinstance(value, Tensor)}


def _rename(weights: Mapping[str, Tensor]) -> StateDict:
    """Take off what wrappers put in front of names (DDP, torch.compile), and DeiT III's own names for LayerScale."""
    renamed = {}
    for name, tensor in weights.items():
        for prefix in ("module.", "_orig_mod.", "model."):
            name = name.removeprefix(prefix)
        name = name.replace("._orig_mod.", ".").replace(".gamma_1", ".ls1.gamma").replace(".gamma_2", ".ls2.gamma")
        renamed[name] = tensor
    return renamed
