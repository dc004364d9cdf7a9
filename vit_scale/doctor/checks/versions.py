"""Versions of the packages: as setup.py requires, as tested, and importable together."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from vit_scale.doctor.check import ROOT, Check, Setup, broken, skipped, works
from vit_scale.errors import first_line

CONSTRAINTS = ROOT / "constraints.txt"
IMPORTED = (
    *("torch", "torchvision", "timm", "accelerate", "transformers", "deepspeed", "datasets"),
    *("simplejpeg", "safetensors", "wandb"),
)
"""Packages with compiled parts, or that import each other; torchvision fails beside another torch than its own."""
OPTIONAL = ("deepspeed", "transformers", "wandb")
"""Packages without which DDP still trains."""


def required_versions(setup: Setup) -> Check:
    """Check that every required package is installed in a supported version."""
    requirements = _requirements()
    if not requirements:
        return skipped("packages", "vit_scale is not installed, so its requirements are unknown", "pip install -e .")
    wrong = [problem for requirement in requirements if (problem := _problem(requirement))]
    if wrong:
        packages = " ".join(f"'{requirement}'" for requirement, _ in wrong)
        return broken("packages", "; ".join(text for _, text in wrong), f"pip install {packages}")
    python = f"Python {platform.python_version()}"
    return works("packages", f"{len(requirements)} packages in supported versions, {python}", **_main_versions())


def tested_versions(setup: Setup) -> Check:
    """Compare the installed versions with those that the tests ran with."""
    if not CONSTRAINTS.exists():
        return skipped("tested versions", "constraints.txt comes only with the repository")
    pinned = _pinned(CONSTRAINTS)
    needed = [requirement.name for requirement in _requirements()]
    installed = {name: version for name in needed if (version := _version(name)) and _plain(name) in pinned}
    other = {name: version for name, version in installed.items() if not _same(version, pinned[_plain(name)])}
    if not other:
        return works("tested versions", f"all {len(installed)} as in constraints.txt")
    listed = ", ".join(f"{name} {version} (tested: {pinned[_plain(name)]})" for name, version in other.items())
    advice = "if something else here is broken: pip install -c constraints.txt -e ."
    return works("tested versions", f"{len(other)} of {len(installed)} differ: {listed}", advice=advice)


def imports(setup: Setup) -> Check:
    """Import everything that training uses, in one process."""
    failed = {}
    for name in IMPORTED:
        setup.stage(f"importing {name}")
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 -- compiled packages raise anything
            failed[name] = f"{name}: {type(error).__name__}: {first_line(error)}"
    if not failed:
        return works("imports", f"{len(IMPORTED)} packages load together")
    both = "pip install --force-reinstall torch torchvision" if "torchvision" in failed else ""
    advice = both or f"pip install --force-reinstall {' '.join(failed)}"
    return broken("imports", "; ".join(failed.values()), advice, required=not set(failed) <= set(OPTIONAL))


def _requirements() -> list[Requirement]:
    """Return the packages that vit_scale needs on this platform, without extras."""
    try:
        listed = importlib.metadata.requires("vit_scale") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    parsed = [Requirement(text) for text in listed]
    return [each for each in parsed if each.marker is None or each.marker.evaluate({"extra": ""})]


def _problem(requirement: Requirement) -> tuple[str, str] | None:
    """Return what to install, and what is wrong with it now."""
    wanted, version = f"{requirement.name}{requirement.specifier}", _version(requirement.name)
    if version is None:
        return wanted, f"{requirement.name} is not installed"
    if not requirement.specifier.contains(version, prereleases=True):
        return wanted, f"{requirement.name} {version} does not satisfy {requirement.specifier}"
    return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _main_versions() -> dict[str, str]:
    from vit_scale.record.versions import versions

    return versions()


def _pinned(path: Path) -> dict[str, str]:
    """Return {package: version} of a constraints file."""
    lines = [line.split(";")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    pairs = [line.split("==") for line in lines if "==" in line]
    return {_plain(name): version for name, version in pairs}


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def _same(installed: str, tested: str) -> bool:
    """Compare without the local part: 2.15.0+cu130 is 2.15.0."""
    return Version(installed).public == Version(tested).public
