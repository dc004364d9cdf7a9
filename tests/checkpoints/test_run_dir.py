"""Which folder a run lives in, and what is kept of one that is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vit_scale.checkpoints.run_dir import choose_folder, set_aside, write_config
from vit_scale.recipe import build_config


def config(**sections: dict):  # type: ignore[no-untyped-def]
    return build_config({"schedule": {"steps": 1}, **sections})


def make_run(folder: Path, finished: bool) -> None:
    write_config(folder, config())
    (folder / "summary.json").write_text(json.dumps({"finished": finished}))


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_default_folder_is_named_after_the_recipe() -> None:
    assert choose_folder(config(), "recipes/digits.yaml") == Path("runs/digits")


def test_unfinished_run_is_gone_on_with_and_finished_ones_are_kept() -> None:
    make_run(Path("runs/digits"), finished=True)
    assert choose_folder(config(), "recipes/digits.yaml") == Path("runs/digits-2")
    make_run(Path("runs/digits-2"), finished=False)
    assert choose_folder(config(), "recipes/digits.yaml") == Path("runs/digits-2")
    assert choose_folder(config(run={"resume": "never"}), "recipes/digits.yaml") == Path("runs/digits-3")


def test_given_folder_is_taken() -> None:
    assert choose_folder(config(run={"dir": "here"}), "recipes/digits.yaml") == Path("here")


def test_set_aside_never_overwrites() -> None:
    for expected in ("run.old-1", "run.old-2"):
        make_run(Path("run"), finished=True)
        assert set_aside(Path("run")) == Path(expected)
    assert not Path("run").exists()
