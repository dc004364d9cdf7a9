"""The README is correct: its commands run and its links resolve."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.photographs import write_photographs

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", TEXT, flags=re.DOTALL)
    lines = [line.split("   #")[0].split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def test_train_and_test_commands_are_in_the_first_30_lines() -> None:
    first = "\n".join(TEXT.splitlines()[:30])
    assert "make train" in first
    assert "make test" in first


def test_output_of_a_run_is_shown() -> None:
    assert "step 1,348/1,348  loss" in TEXT
    assert "timm check  passed" in TEXT


def test_make_targets_exist_and_bare_make_lists_them() -> None:
    listed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = {line.split()[1] for line in commands() if line.startswith("make ")}
    assert named == {"train", "test"}
    assert all(f"make {target}" in listed for target in [*named, "lint", "bench", "clean"])


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A writable working directory laid out like the repository, with trained runs and images."""
    desk = tmp_path_factory.mktemp("desk")
    for name in ("launch", "tests", "accelerate_config.yaml"):
        (desk / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "recipes", desk / "recipes")
    Image.new("L", (20, 20), 128).save(desk / "seven.png")
    write_photographs(desk / "photos", per_class=4)
    for folder in ("runs/digits", "runs/try"):
        train(desk, ["launch/train.py", "recipes/debug.yaml", f"run.dir={folder}", "track.wandb=disabled"])
    for folder in ("runs/photos", "runs/mae"):  # any run can be evaluated and probed
        shutil.copytree(desk / "runs/digits", desk / folder)
    return desk


def train(desk: Path, arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, *arguments], cwd=desk, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [c for c in commands() if not c.startswith("make")])
def test_command_runs(command: str, desk: Path) -> None:
    """Run it if it takes seconds; for long training runs and launchers, only parse the arguments."""
    words = shlex.split(command)
    if words[0] == "wandb":
        assert (ROOT / words[-1]).exists() or "ID" in words
        return
    script = next(i for i, word in enumerate(words) if word.startswith("launch/"))
    arguments = words[script:]
    if words[script] == "launch/train.py" and not {"--help", "--dry-run", "--list-checkpoints"} & set(words):
        quick = words[:1] == ["python"] and "recipes/debug.yaml" in words
        arguments += ["run.dir=runs/quick", "track.wandb=disabled"] if quick else ["--print-config"]
    if words[script] == "launch/probe.py":
        arguments += ["--images", "40"]
    if words[script] == "launch/sweep.py":
        arguments += ["schedule.epochs=null", "schedule.warmup_epochs=null", "schedule.steps=2", "--count", "1"]
    done = subprocess.run(
        [sys.executable, *arguments], cwd=desk, env=os.environ, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_python_examples_run(desk: Path) -> None:
    for code in re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL):
        subprocess.run([sys.executable, "-c", code], cwd=desk, check=True, timeout=120)


def test_links_and_named_files_exist() -> None:
    targets = re.findall(r"\]\((?!http)([^)#]+)\)", TEXT)
    targets += re.findall(r"`((?:tests|benchmarks|recipes)/[\w/.]+)`", TEXT)
    missing = [target for target in targets if not (ROOT / target).exists()]
    assert targets
    assert not missing
