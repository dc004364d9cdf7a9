"""Weights in and out of timm's format: read them safely, resample what depends on the image, say what happened.

Files are data: safetensors, or torch's format through `weights_only=True`; a pickle that would run code is refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from vit_scale.errors import UserError
from vit_scale.models.resample import resample_channels, resample_patch_kernel, resample_pos_embed, resample_relative_bias
from vit_scale.models.variants import TIMM_PREFIX, check_model_name

StateDict = dict[str, Tensor]
RUN_FILES = ("model_ema.safetensors", "model.safetensors")
TORCH_SUFFIXES = (".pth", ".pt", ".bin")


@dataclasses.dataclass
class WeightsReport:
    """What became of each tensor: names, with a word of explanation where one is due."""

    source: str
    kept: list[str] = dataclasses.field(default_factory=list)
    resized: dict[str, str] = dataclasses.field(default_factory=dict)
    """In the model at another size: name to what was done."""
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    """In the file but not used: name to the reason."""
    initialised: dict[str, str] = dataclasses.field(default_factory=dict)
    """In the model but not taken from the file, so left as initialised: name to the reason."""

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


def load_weights(model: nn.Module, source: str | Path, *, grid: tuple[int, int] | None = None) -> WeightsReport:
    """Load weights into a model and say what was kept, resized, skipped and left as initialised.

    `source`: a safetensors file, a torch file, a run's folder (the average if it has one), or `timm/<name>` from the
    hub. Weights of another resolution, patch size, number of channels or number of classes are fitted; weights of
    another width or depth are a UserError. `grid`: rows and columns of patches that the weights were trained on, for
    the case that it is neither square nor of the model's proportions.
    """
    loaded = read_weights(source)
    report = WeightsReport(source=str(source))
    fitted = _fit(model, loaded, report, grid)
    if not report.kept:
        raise UserError(f"model.weights = {source}: not one tensor fits this model; were they made by another one?")
    model.load_state_dict(fitted, strict=False)
    return report


def read_weights(source: str | Path) -> StateDict:
    """The tensors of a file, a run's folder or timm's hub, under timm's names."""
    text = str(source)
    if text.startswith(TIMM_PREFIX) and not Path(text).exists():
        return _read_hub(text)
    path = Path(source)
    if path.is_dir():
        path = _file_of_run(path)
    if not path.is_file():
        raise UserError(f"model.weights = {source}: there is no such file or folder.")
    if path.suffix in TORCH_SUFFIXES:
        return _rename(_read_torch(path))
    try:
        return _rename(load_file(path))
    except SafetensorError as error:
        raise UserError(f"model.weights = {source}: not a whole safetensors file ({error}).") from error


def _file_of_run(folder: Path) -> Path:
    for name in RUN_FILES:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"model.weights = {folder}: the folder has neither {' nor '.join(RUN_FILES)}; has the run finished?")


def _read_torch(path: Path) -> Mapping[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch names the forbidden object in a long text of advice; the advice (trust the file) is not ours.
        raise UserError(
            f"model.weights = {path}: torch refuses to read it as plain tensors, so it is damaged or would run code. "
            "Convert it to safetensors where it was made."
        ) from error
    # Trainers nest the weights; the average comes first, as in a run's folder.
    while isinstance(content, dict) and not any(isinstance(value, Tensor) for value in content.values()):
        nested = [content[key] for key in ("model_ema", "state_dict_ema", "model", "state_dict") if key in content]
        if not nested:
            break
        content = nested[0]
    if not isinstance(content, dict) or not content:
        raise UserError(f"model.weights = {path}: there are no named tensors in it.")
    return {name: value for name, value in content.items() if isinstance(value, Tensor)}


def _read_hub(source: str) -> StateDict:
    check_model_name(source)
    import timm

    timm_name = source.removeprefix(TIMM_PREFIX)
    try:
        return timm.create_model(timm_name, pretrained=True).state_dict()
    except Exception as error:
        # Whatever timm, huggingface_hub, httpx or the file system raise, the remedy is the same.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"model.weights = {source}: could not get them from the hub ({type(error).__name__}: {reason[:150]}).\n"
            "Go online, or download model.safetensors of that model elsewhere and give its path."
        ) from error


def _rename(weights: Mapping[str, Tensor]) -> StateDict:
    """Take off what wrappers put in front of names (DDP, torch.compile, EMA), and DeiT III's own names for LayerScale."""
    renamed = {}
    for name, tensor in weights.items():
        for prefix in ("module.", "_orig_mod.", "model."):
            name = name.removeprefix(prefix)
        name = name.replace("._orig_mod.", ".").replace(".gamma_1", ".ls1.gamma").replace(".gamma_2", ".ls2.gamma")
        renamed[name] = tensor
    return renamed


def _fit(model: nn.Module, loaded: StateDict, report: WeightsReport, grid: Grid | None) -> StateDict:
    """The tensors that go into the model; every other one is accounted for in the report."""
    own = model.state_dict()
    fitted = {}
    for name, tensor in _fit_to_image(model, loaded, report, grid).items():
        if name not in own:
            report.skipped[name] = "the model has no such tensor"
        elif tensor.shape == own[name].shape:
            fitted[name] = tensor
            if name not in report.resized:
                report.kept.append(name)
        elif name.startswith(_heads(model)):
            report.initialised[name] = f"the weights have {len(tensor)} classes, the model {len(own[name])}"
        else:
            raise UserError(
                f"model.weights = {report.source}: {name} is {list(tensor.shape)}, in the model {list(own[name].shape)}. "
                "These are weights of another architecture; choose the model.name they were made with."
            )
    for name in own.keys() - loaded.keys():
        report.initialised[name] = "not among the weights"
    return fitted


def _heads(model: nn.Module) -> tuple[str, ...]:
    """How the names of classifier tensors begin."""
    published: dict[str, Any] = getattr(model, "pretrained_cfg", {})
    names = published.get("classifier", ("head", "head_dist"))
    return tuple(f"{name}." for name in ((names,) if isinstance(names, str) else names))


def _fit_to_image(model: nn.Module, loaded: StateDict, report: WeightsReport, grid: Grid | None) -> StateDict:
    """Fit what depends on the image: position embeddings and the patch convolution."""
    own = model.state_dict()
    loaded = _fit_pos_embed(model, loaded, report, grid)
    for name, tensor in loaded.items():
        if name not in own or tensor.shape == own[name].shape:
            continue
        shape = own[name].shape
        if name == _first_conv(model):
            loaded[name] = _fit_patch_kernel(tensor, shape)
        elif name in ("pos_embed.row", "pos_embed.column"):
            loaded[name] = resample_line(tensor, shape[1])
        elif name.endswith("rel_pos.relative_position_bias_table"):
            loaded[name] = _fit_relative_bias(tensor, model_grid(model), len(shape) and shape[0], grid)
        else:
            continue
        report.resized[name] = f"{list(tensor.shape)} to {list(shape)}"
    return loaded


def _fit_patch_kernel(kernel: Tensor, shape: torch.Size) -> Tensor:
    if kernel.shape[1] != shape[1]:
        kernel = resample_channels(kernel, shape[1])
    return kernel if kernel.shape[2:] == shape[2:] else resample_patch_kernel(kernel, (shape[2], shape[3]))
