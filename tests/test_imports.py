"""Imports go one way: a package imports only packages below it, also in functions and under TYPE_CHECKING."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ORDER = [
    ["errors", "config", "launcher", "gpu", "hub", "format", "files", "schedule", "cli"],
    ["checkpoints"],
    ["kernels"],
    ["models"],
    ["recipe"],
    ["data"],
    ["cost"],
    ["tasks"],
    ["strategies", "record", "probe", "attention_report"],
    ["train"],
    ["report", "inference", "charts"],
    ["plan", "doctor", "export", "sweep", "page"],
    ["trial"],
    ["commands", "api"],
    ["__init__", "__main__"],
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}


def files(root: Path) -> list[Path]:
    return sorted((root / "vit_scale").rglob("*.py"))


def part_of(module: str) -> str:
    """The package or top-level module below vit_scale that `module` belongs to."""
    return module.split(".")[1] if "." in module else "__init__"


def imports(tree: ast.AST) -> Iterator[str]:
    """Each module of vit_scale that is imported anywhere in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "vit_scale":
            names = [f"vit_scale.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "vit_scale")


def name_of(path: Path, root: Path) -> str:
    return path.relative_to(root / "vit_scale").with_suffix("").parts[0]


def test_every_package_has_a_rank(root: Path) -> None:
    assert {name_of(path, root) for path in files(root)} == set(RANK)


def test_imports_go_one_way(root: Path) -> None:
    upwards = []
    for path in files(root):
        here = name_of(path, root)
        for module in imports(ast.parse(path.read_text())):
            there = part_of(module)
            # A top-level module such as cli may import another of its rank; packages of one rank stay apart.
            if there != here and (RANK[there] > RANK[here] or (RANK[there] == RANK[here] > 0)):
                upwards.append(f"{path.relative_to(root)} imports {module}")
    assert upwards == []


@pytest.mark.parametrize("limit", [15])
def test_packages_stay_small(root: Path, limit: int) -> None:
    sizes = {package: len(list(package.glob("*.py"))) for package in {path.parent for path in files(root)}}
    assert {str(package): size for package, size in sizes.items() if size > limit} == {}


def test_functions_fit_on_a_screen(root: Path) -> None:
    long = [
        f"{path.relative_to(root)} {node.name}"
        for path in files(root)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 60
    ]
    assert not long
