"""Which precision a device can train in."""

from __future__ import annotations

import pytest
import torch

from vit_scale.errors import UserError
from vit_scale.strategies import precision

CPU = torch.device("cpu")


def test_auto_precision_on_a_cpu_is_fp32() -> None:
    assert precision.resolve_precision("auto", CPU) == "fp32"


def test_fp16_on_a_cpu_is_rejected() -> None:
    with pytest.raises(UserError, match="not supported on a CPU"):
        precision.resolve_precision("fp16", CPU)


def test_bf16_that_would_crash_the_process_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_cpu_supports_bf16", lambda: False)
    with pytest.raises(UserError, match="illegal instruction"):
        precision.resolve_precision("bf16", CPU)


def test_bf16_is_tried_in_a_child_process() -> None:
    """Whatever this CPU does with it, this process survives and has an answer."""
    assert precision._cpu_supports_bf16() in (True, False)
