"""The loss scale of fp16, as numbers that fit in a checkpoint.

torch's scaler (DDP) and DeepSpeed's (ZeRO) both halve the scale after an overflow and double it after some good steps,
so one can resume from the numbers of the other.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class LossScale(Protocol):
    """A loss scale that changes during training."""

    def numbers(self) -> dict[str, float]:
        """Return the scale, the steps since it last changed, and everything else its next change depends on."""

    def restore(self, numbers: dict[str, float]) -> None:
        """Resume from such numbers."""


class TorchLossScale:
    """The loss scale of a torch.amp.GradScaler."""

    def __init__(self, scaler: torch.amp.GradScaler):
        self._scaler = scaler

    def numbers(self) -> dict[str, float]:
        """Return the scale and the steps since it last changed."""
        state = self._scaler.state_dict()
        return {"scale": state["scale"], "good_steps": state["_growth_tracker"]}

    def restore(self, numbers: dict[str, float]) -> None:
        """Resume from such numbers."""
        changed = {"scale": numbers["scale"], "_growth_tracker": int(numbers["good_steps"])}
        self._scaler.load_state_dict(self._scaler.state_dict() | changed)


class DeepSpeedLossScale:
    """The loss scale of DeepSpeed's DynamicLossScaler."""

    def __init__(self, scaler: Any):
        self._scaler = scaler

    def numbers(self) -> dict[str, float]:
        """Return the scale, the steps since it last changed, and the overflows that it still tolerates."""
        good_steps = self._scaler.cur_iter - self._scaler.last_overflow_iter - 1
        return {"scale": self._scaler.cur_scale, "good_steps": good_steps, "patience": self._scaler.cur_hysteresis}

    def restore(self, numbers: dict[str, float]) -> None:
        """Resume from such numbers."""
        self._scaler.cur_scale = numbers["scale"]
        self._scaler.cur_iter, self._scaler.last_overflow_iter = int(numbers["good_steps"]), -1
        self._scaler.cur_hysteresis = int(numbers.get("patience", self._scaler.cur_hysteresis))


def torch_loss_scale(scaler: torch.amp.GradScaler | None) -> LossScale | None:
    """Return the loss scale of accelerate's `scaler`; None if losses are not scaled."""
    return TorchLossScale(scaler) if scaler is not None and scaler.is_enabled() else None


def deepspeed_loss_scale(optimizer: Any) -> LossScale | None:
    """Return the loss scale of DeepSpeed's `optimizer`; None if losses are not scaled."""
    scaler = getattr(optimizer, "loss_scaler", None)
    return DeepSpeedLossScale(scaler) if getattr(scaler, "dynamic", False) else None


def scale_loss(optimizer: Any) -> None:
    """Let DeepSpeed's fp32 `optimizer` scale the loss by torch's rule: a step with an overflow halves the scale."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    optimizer.loss_scaler = DynamicLossScaler(
        init_scale=2.0**16,
        scale_window=2000,
        min_scale=2.0**-24,
        delayed_shift=1,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=False,  # run.max_skipped_steps ends a run that has diverged
    )
    optimizer.dynamic_loss_scale = True
