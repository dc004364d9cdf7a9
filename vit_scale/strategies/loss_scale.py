"""The scale that keeps fp16 gradients from vanishing, as numbers that a checkpoint can hold.

torch's scaler (DDP) and DeepSpeed's (ZeRO) both halve the scale after an overflow and double it after some good steps,
so that one can go on from what the other has left.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class LossScale(Protocol):
    """A loss scale that changes as training goes."""

    def numbers(self) -> dict[str, float]:
        """The scale, the steps since it last changed, and what else its next change depends on."""

    def restore(self, numbers: dict[str, float]) -> None:
        """Go on from such numbers."""


class TorchLossScale:
    """That of a torch.amp.GradScaler."""

    def __init__(self, scaler: torch.amp.GradScaler):
        self._scaler = scaler

    def numbers(self) -> dict[str, float]:
        state = self._scaler.state_dict()
        return {"scale": state["scale"], "good_steps": state["_growth_tracker"]}

    def restore(self, numbers: dict[str, float]) -> None:
        changed = {"scale": numbers["scale"], "_growth_tracker": int(numbers["good_steps"])}
        self._scaler.load_state_dict(self._scaler.state_dict() | changed)


class DeepSpeedLossScale:
    """That of DeepSpeed's DynamicLossScaler."""

    def __init__(self, scaler: Any):
        self._scaler = scaler

    def numbers(self) -> dict[str, float]:
        good_steps = self._scaler.cur_iter - self._scaler.last_overflow_iter - 1
        return {"scale": self._scaler.cur_scale, "good_steps": good_steps, "patience": self._scaler.cur_hysteresis}

    def restore(self, numbers: dict[str, float]) -> None:
        self._scaler.cur_scale = numbers["scale"]
        self._scaler.cur_iter, self._scaler.last_overflow_iter = int(numbers["good_steps"]), -1
        self._scaler.cur_hysteresis = int(numbers.get("patience", self._scaler.cur_hysteresis))


def find_loss_scale(scaler: torch.amp.GradScaler | None, optimizer: Any) -> LossScale | None:
    """The loss scale of accelerate's `scaler` or of DeepSpeed's `optimizer`; None where losses are not scaled."""
    if scaler is not None and scaler.is_enabled():
        return TorchLossScale(scaler)
    deepspeeds = getattr(optimizer, "loss_scaler", None)
    return DeepSpeedLossScale(deepspeeds) if getattr(deepspeeds, "dynamic", False) else None
