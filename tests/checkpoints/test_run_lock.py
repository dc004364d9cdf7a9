"""Two runs never train in the same directory simultaneously."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vit_scale.checkpoints.run_lock import acquire, is_in_use, release
from vit_scale.config import Config
from vit_scale.errors import UserError
from vit_scale.recipe import build_config
from vit_scale.train.open_run import choose_run_dir, write_config

HOLDER = """
import sys, time
from pathlib import Path
from vit_scale.recipe import build_config
from vit_scale.train.open_run import write_config

write_config(Path(sys.argv[1]), build_config({"schedule": {"steps": 1}}))
print("locked", flush=True)
time.sleep(600)
"""


@pytest.fixture
def config() -> Config:
    return build_config({"schedule": {"steps": 1}})


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen]:
    """Start another process that trains in runs/recipe."""
    monkeypatch.chdir(tmp_path)
    with subprocess.Popen([sys.executable, "-c", HOLDER, "runs/recipe"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_directory_in_use_is_rejected_with_its_process_id(other: subprocess.Popen, config: Config) -> None:
    with pytest.raises(UserError, match=f"runs/recipe is in use by process {other.pid}"):
        write_config(Path("runs/recipe"), config)


def test_next_free_directory_is_used_without_run_dir(other: subprocess.Popen, config: Config) -> None:
    assert choose_run_dir(config, "recipe.yaml") == Path("runs/recipe-2")


def test_killed_process_leaves_no_lock(other: subprocess.Popen, config: Config) -> None:
    other.kill()
    other.wait()
    assert choose_run_dir(config, "recipe.yaml") == Path("runs/recipe")
    write_config(Path("runs/recipe"), config)
    release(Path("runs/recipe"))


def test_lock_can_be_acquired_again_after_release(tmp_path: Path) -> None:
    for _ in range(2):
        acquire(tmp_path)
        acquire(tmp_path)
        assert not is_in_use(tmp_path)
        release(tmp_path)
