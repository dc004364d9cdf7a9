"""Versions that do not fit are found."""

from __future__ import annotations

import importlib
import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from vit_scale.doctor.check import Setup
from vit_scale.doctor.checks import versions


def other_version(monkeypatch: pytest.MonkeyPatch, name: str, version: str | None) -> None:
    real = importlib.metadata.version

    def changed(asked: str) -> str:
        if asked != name:
            return real(asked)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(asked)
        return version

    monkeypatch.setattr(importlib.metadata, "version", changed)


def test_installed_packages_satisfy_setup(setup: Setup) -> None:
    assert versions.required_versions(setup).status == "works"


def test_old_package_is_broken_and_the_command_installs_another(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    other_version(monkeypatch, "torch", "1.13.0+cpu")
    found = versions.required_versions(setup)
    assert (found.status, found.required) == ("broken", True)
    assert "torch 1.13.0+cpu does not satisfy >=2" in found.value
    assert found.advice.startswith("pip install 'torch>=2")


def test_missing_package_is_broken(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    other_version(monkeypatch, "timm", None)
    assert versions.required_versions(setup).value == "timm is not installed"


def test_package_without_metadata_is_skipped(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert versions.required_versions(setup).status == "skipped"


def test_other_versions_than_tested_are_listed(monkeypatch: pytest.MonkeyPatch, setup: Setup, tmp_path: Path) -> None:
    pins = tmp_path / "constraints.txt"
    installed = importlib.metadata.version("pyyaml")
    pins.write_text(f'# comment\ntorch==1.2.3 ; python_version >= "3.11"\nPyYAML=={installed}\n')
    monkeypatch.setattr(versions, "CONSTRAINTS", pins)
    found = versions.tested_versions(setup)
    assert found.status == "works"
    assert found.value.startswith("1 of 2 differ: torch ")
    assert "(tested: 1.2.3)" in found.value
    assert "constraints.txt" in found.advice
    monkeypatch.setattr(versions, "CONSTRAINTS", tmp_path / "none.txt")
    assert versions.tested_versions(setup).status == "skipped"


def test_local_versions_count_as_the_same() -> None:
    assert versions._same("2.15.0+cu130", "2.15.0")
    assert not versions._same("2.15.1", "2.15.0")


@pytest.mark.parametrize(("package", "required"), [("torchvision", True), ("deepspeed", False)])
def test_package_that_cannot_load_beside_the_others_is_broken(
    monkeypatch: pytest.MonkeyPatch, setup: Setup, package: str, required: bool
) -> None:
    def failing(name: str) -> None:
        if name == package:
            raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(versions.importlib, "import_module", failing)
    found = versions.imports(setup)
    assert (found.status, found.required) == ("broken", required)
    assert found.value == f"{package}: RuntimeError: operator torchvision::nms does not exist"
    assert package in found.advice
