"""Choosing a run directory, and preserving an existing run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vit_scale.checkpoints.run_dir import rename_run_dir
from vit_scale.recipe import build_config
from vit_scale.train.open_run import choose_run_dir, write_config


def config(**sections: dict):  # type: ignore[no-untyped-def]
    return build_config({"schedule": {"steps": 1}, **sections})


def make_run(folder: Path, finished: bool) -> None:
    write_config(folder, config())
    (folder / "summary.json").write_text(json.dumps({"finished": finished}))


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_default_directory_is_named_after_the_recipe() -> None:
    assert choose_run_dir(config(), "recipes/digits.yaml") == Path("runs/digits")


def test_unfinished_run_is_resumed_and_finished_runs_are_preserved() -> None:
    make_run(Path("runs/digits"), finished=True)
    assert choose_run_dir(config(), "recipes/digits.yaml") == Path("runs/digits-2")
    make_run(Path("runs/digits-2"), finished=False)
    assert choose_run_dir(config(), "recipes/digits.yaml") == Path("runs/digits-2")
    assert choose_run_dir(config(run={"resume": "never"}), "recipes/digits.yaml") == Path("runs/digits-3")


def test_given_directory_is_used() -> None:
    assert choose_run_dir(config(run={"dir": "here"}), "recipes/digits.yaml") == Path("here")


def test_rename_run_dir_never_overwrites() -> None:
    for expected in ("run.old-1", "run.old-2"):
        make_run(Path("run"), finished=True)
        assert rename_run_dir(Path("run")) == Path(expected)
    assert not Path("run").exists()
