"""The documentation names tests and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_tests_exist(page: Path) -> None:
    """`path/test_x.py::test_y`, and `::test_z` for another test of the file named last."""
    file, missing = "", []
    for path, test in re.findall(r"`((?:[\w/]+\.py)?)(?:::(test_\w+))?`", page.read_text()):
        file = path or file
        if not test:
            continue
        found = [each for each in (ROOT / "tests").rglob(Path(file).name) if str(each).endswith(file)]
        if not any(f"def {test}(" in each.read_text() for each in found):
            missing.append(f"{file}::{test}")
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"`((?:tests|benchmarks|recipes|launch|docs|vit_scale)/[\w/.]+\.\w+)`", text)
    links = [str((page.parent / link).relative_to(ROOT)) for link in re.findall(r"\]\((?!http)([^)#]+)", text)]
    assert [name for name in {*named, *links} if not (ROOT / name).exists()] == []
