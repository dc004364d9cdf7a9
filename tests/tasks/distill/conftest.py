"""A teacher for all tests of distillation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tasks.distill.students import make_teacher


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory, not to be changed: a gray ViT of 12x12 pixels and 9 patches with statistics of its own."""
    return make_teacher(tmp_path_factory.mktemp("teachers") / "gray")
