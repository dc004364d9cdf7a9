"""A setup for checks that are called in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from vit_scale.doctor.check import Setup


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    """A machine without GPUs."""
    return Setup(str(tmp_path), run_dir=str(tmp_path), quick=True)
