"""Disks that are slow, full, read-only or without locks are found."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from vit_scale.doctor.check import Setup
from vit_scale.doctor.checks import disk


def test_disk_is_measured_and_left_as_it_was(setup: Setup, tmp_path: Path) -> None:
    found = disk.checkpoints(setup)
    assert found.status in ("works", "slow")
    assert found.numbers["bytes_per_second"] > 0
    assert disk.locks(setup).status == "works"
    assert list(tmp_path.iterdir()) == []


def test_slow_disk_is_slow(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    monkeypatch.setattr(disk, "SLOW_BYTES_PER_SECOND", 1e18)
    assert disk.checkpoints(setup).status == "slow"


def test_full_disk_and_missing_directory_are_broken(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    missing = disk.checkpoints(dataclasses.replace(setup, run_dir=f"{setup.run_dir}/none"))
    assert (missing.status, missing.value) == (
        "broken",
        "cannot write to the run directory: No such file or directory",
    )

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    found = disk.checkpoints(setup)
    assert (found.status, found.value) == ("broken", "cannot write to the run directory: No space left on device")


def test_disk_that_returns_other_contents_is_broken(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    def corrupt(file: int) -> None:
        os.pwrite(file, b"\0" * 64, 100)

    monkeypatch.setattr(os, "fsync", corrupt)
    found = disk.checkpoints(setup)
    assert (found.status, found.value) == ("broken", "a file is read back with other contents")


@pytest.mark.parametrize(("free", "status"), [(1e12, "works"), (5e9, "slow"), (5e8, "broken")])
def test_little_space_for_checkpoints_is_found(
    monkeypatch: pytest.MonkeyPatch, setup: Setup, free: float, status: str
) -> None:
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=int(free)))
    assert disk.free_space(setup).status == status


@pytest.mark.parametrize(("free", "status"), [(2**34, "works"), (2**30, "slow"), (2**26, "broken")])
def test_little_shared_memory_is_found(
    monkeypatch: pytest.MonkeyPatch, setup: Setup, tmp_path: Path, free: int, status: str
) -> None:
    monkeypatch.setattr(disk, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    found = disk.shared_memory(setup)
    assert found.status == status
    assert ("--shm-size" in found.advice) == (status != "works")
    monkeypatch.setattr(disk, "SHARED_MEMORY", tmp_path / "none")
    assert disk.shared_memory(setup).status == "skipped"


def test_file_system_without_locks_is_broken_but_trains(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    monkeypatch.setattr(disk.run_lock, "acquire", lambda folder: None)
    found = disk.locks(setup)
    assert (found.status, found.required) == ("broken", False)
