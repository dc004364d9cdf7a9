"""Check by hand that the lowest versions that setup.py allows have every name that vit_scale uses:

    python tests/floors.py

Downloads them without dependencies (250 MB, a minute) and searches their sources; nothing is installed. It finds
missing functions and classes, not different arguments or behavior.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMPORTED_AS = {"pillow": "PIL", "PyYAML": "yaml", "scikit-learn": "sklearn"}
COMPILED = {"onnxruntime"}
"""Packages whose names are defined by compiled code only."""
# The sources are the same on every system; for this one the wheel is the smallest.
SMALL_WHEELS = ["--only-binary=:all:", "--platform", "macosx_11_0_arm64", "--python-version", "3.11"]


def floors() -> dict[str, str]:
    """Return the lowest allowed version of each requirement."""
    found = re.findall(r'"([A-Za-z0-9_-]+)>=([\d.]+)', (ROOT / "setup.py").read_text())
    return dict(found)


def used_names(package: str) -> set[str]:
    """Return every dotted name of `package` in the library."""
    return {
        name for path in (ROOT / "vit_scale").rglob("*.py") for name in _names(ast.parse(path.read_text()), package)
    }


def _names(tree: ast.AST, package: str) -> Iterator[str]:
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.split(".")[0] == package:
                    aliases[each.asname or package] = each.name if each.asname else package
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            for each in node.names:
                aliases[each.asname or each.name] = f"{node.module}.{each.name}"
    yield from aliases.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := _dotted(node, aliases)):
            yield name


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str | None:
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, aliases)
        return owner and f"{owner}.{node.attr}"
    return aliases.get(node.id) if isinstance(node, ast.Name) else None


def words_in(archive: Path) -> set[str]:
    """Return every identifier in the Python sources of a wheel or source distribution."""
    texts: list[bytes] = []
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            texts = [wheel.read(name) for name in wheel.namelist() if name.endswith((".py", ".pyi"))]
    else:
        with tarfile.open(archive) as source:
            members = [member for member in source.getmembers() if member.name.endswith((".py", ".pyi"))]
            texts = [file.read() for member in members if (file := source.extractfile(member))]
    return {word for text in texts for word in re.findall(r"[A-Za-z_]\w+", text.decode(errors="ignore"))}


def missing_names(name: str, version: str, folder: Path) -> list[str]:
    """Download a version and return the names in use that it does not have."""
    module = IMPORTED_AS.get(name, name)
    if module in COMPILED or not (used := used_names(module)):
        return []
    options = SMALL_WHEELS if name.startswith("torch") else []
    target = folder / name
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(target), *options]
    subprocess.run([*command, f"{name}=={version}"], check=True)
    (archive,) = target.iterdir()
    words = words_in(archive)
    return sorted(each for each in used if not words.issuperset(each.split(".")[1:]))


def main() -> int:
    """Print what is missing; returns 1 if anything is."""
    missing: dict[str, list[str]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for name, version in floors().items():
            full = version + ".0" * (2 - version.count("."))
            if names := missing_names(name, full, Path(folder)):
                missing[f"{name} {full}"] = names
    for requirement, names in missing.items():
        print(f"{requirement} has no {', '.join(names)}")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
