"""Two runs never train in the same folder at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vit_scale.checkpoints.run_dir import choose_folder, write_config
from vit_scale.checkpoints.run_lock import hold, is_in_use, release
from vit_scale.config import Config
from vit_scale.errors import UserError
from vit_scale.recipe import build_config

HOLDER = """
import sys, time
from pathlib import Path
from vit_scale.recipe import build_config
from vit_scale.checkpoints.run_dir import write_config

write_config(Path(sys.argv[1]), build_config({"schedule": {"steps": 1}}))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def config() -> Config:
    return build_config({"schedule": {"steps": 1}})


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen]:
    """Another process that trains in runs/recipe."""
    monkeypatch.chdir(tmp_path)
    with subprocess.Popen([sys.executable, "-c", HOLDER, "runs/recipe"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_folder_in_use_is_refused_with_the_process_that_has_it(other: subprocess.Popen, config: Config) -> None:
    with pytest.raises(UserError, match=f"runs/recipe is in use: process {other.pid} trains there"):
        write_config(Path("runs/recipe"), config)


def test_without_run_dir_the_next_free_folder_is_taken(other: subprocess.Popen, config: Config) -> None:
    assert choose_folder(config, "recipe.yaml") == Path("runs/recipe-2")


def test_a_killed_process_leaves_nothing_locked(other: subprocess.Popen, config: Config) -> None:
    other.kill()
    other.wait()
    assert choose_folder(config, "recipe.yaml") == Path("runs/recipe")
    write_config(Path("runs/recipe"), config)
    release(Path("runs/recipe"))


def test_a_process_may_hold_and_release_again(tmp_path: Path) -> None:
    for _ in range(2):
        hold(tmp_path)
        hold(tmp_path)
        assert not is_in_use(tmp_path)
        release(tmp_path)
