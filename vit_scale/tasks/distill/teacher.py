"""A frozen teacher on the device of each rank: it belongs to no optimizer, EMA, checkpoint or shard."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_scale import gpu
from vit_scale.config import Config
from vit_scale.data.normalize import Values
from vit_scale.errors import UserError
from vit_scale.models.create import construct_model
from vit_scale.models.weights.load import WeightsReport, fit_weights, load_weights
from vit_scale.models.weights.read import ADDED, is_hub_name, read_weights
from vit_scale.tasks.distill.features import logits_and_tokens
from vit_scale.tasks.distill.source import TeacherSource


class TeacherOutput(NamedTuple):
    """What the teacher says about a micro-batch."""

    logits: Tensor
    """fp32 [B, C]."""
    tokens: list[Tensor]
    """Patch tokens [B, G, D] after each requested block."""


class Teacher:
    """A teacher in evaluation mode. Not an `nn.Module`, so that no model takes it for one of its layers."""

    def __init__(self, model: nn.Module, source: TeacherSource, student: tuple[Values, Values]) -> None:
        """`student`: mean and standard deviation per channel with which the student's images are normalized."""
        self.model: Any = model.eval().requires_grad_(False)
        self.source, self.sha256 = source, checksum(model.state_dict())
        self._scale, self._shift = renormalization(student, source.normalization)

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the weights to the device, in `dtype`."""
        self.model.to(device, dtype)
        self._scale, self._shift = self._scale.to(device), self._shift.to(device)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return next(self.model.parameters()).dtype

    @torch.no_grad()
    def __call__(self, images_BCHW: Tensor, blocks: Sequence[int] = ()) -> TeacherOutput:
        """Return logits, and the patch tokens after `blocks`, for images as the student sees them, in fp32.

        They are normalized for the teacher, repeated to its channels if they are gray, and resized to its image size.
        """
        images = images_BCHW * self._scale + self._shift
        if images.shape[-2:] != self.model.img_size:
            images = F.interpolate(images, self.model.img_size, mode="bicubic", antialias=True)
        logits, tokens = logits_and_tokens(self.model, images.to(self.dtype), blocks)
        return TeacherOutput(logits.float(), tokens)


def renormalization(student: tuple[Values, Values], teacher: tuple[Values, Values]) -> tuple[Tensor, Tensor]:
    """Return scale and shift [C, 1, 1] from images normalized for the student to those normalized for the teacher.

    A student with one channel is broadcast to the teacher's.
    """
    (mean, std), (teacher_mean, teacher_std) = ([torch.tensor(v).double() for v in pair] for pair in (student, teacher))
    scale, shift = std / teacher_std, (mean - teacher_mean) / teacher_std
    return scale.float()[:, None, None], shift.float()[:, None, None]


def load_teacher(source: TeacherSource, student: tuple[Values, Values]) -> Teacher:
    """Read the weights of a teacher; raises `UserError` if they are missing or do not fit."""
    try:
        model, report = _load(source)
    except UserError as error:
        text = str(error).replace("model.weights = ", "distill.teacher = ")
        hint = "use the model.name that they were trained with", "set distill.teacher_model, or use their run directory"
        raise UserError(text.replace(*hint)) from error
    unused = {name: why for name, why in report.skipped.items() if not name.startswith(ADDED)}
    if problems := report.initialized | report.resized | unused:
        name, reason = next(iter(problems.items()))
        raise UserError(f"distill.teacher = {source.source}: not the weights of {source.model.name}: {name}: {reason}")
    return Teacher(model, source, student)


def _load(source: TeacherSource) -> tuple[nn.Module, WeightsReport]:
    if is_hub_name(source.source):
        model = construct_model(source.model)
        return model, load_weights(model, source.source)
    weights, options = read_weights(source.source), source.model
    if source.is_own and not any(name.startswith("head_dist") for name in weights):
        options = dataclasses.replace(options, distilled=False if options.distilled else options.distilled)
    model = construct_model(options)
    return model, fit_weights(model, weights, source=source.source)


def half_precision(config: Config, device: torch.device) -> torch.dtype:
    """Return the dtype of a teacher: half precision on GPUs, unless the run is in fp32."""
    precision = config.parallel.precision
    if not gpu.is_gpu(device) or precision == "fp32":
        return torch.float32
    has_bf16 = precision == "bf16" or torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if precision != "fp16" and has_bf16 else torch.float16


def checksum(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, shapes and values, whatever file they came from."""
    state = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        state.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        state.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()
