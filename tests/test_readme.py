"""The README is true: its commands run, its links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", TEXT, flags=re.DOTALL)
    lines = [line.split("   #")[0].split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def test_train_and_test_commands_stand_within_the_first_30_lines() -> None:
    first = "\n".join(TEXT.splitlines()[:30])
    assert "make train" in first
    assert "make test" in first


def test_make_targets_exist_and_bare_make_lists_them() -> None:
    listed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = {line.split()[1] for line in commands() if line.startswith("make ")}
    assert named == {"train", "test"}
    assert all(f"make {target}" in listed for target in [*named, "lint", "bench", "clean"])


@pytest.mark.parametrize("command", [c for c in commands() if not c.startswith("make")])
def test_command_runs(command: str, tmp_path: Path) -> None:
    """For real where it takes seconds; long trainings and launchers are parsed to the end instead."""
    words = shlex.split(command)
    script = next(i for i, word in enumerate(words) if word.startswith("launch/"))
    arguments = words[script:]
    if words[script] == "launch/train.py" and "--help" not in words and "--dry-run" not in words:
        quick = words[:1] == ["python"] and "recipes/debug.yaml" in words
        arguments += [f"run.dir={tmp_path}/run", "track.wandb=disabled"] if quick else ["--print-config"]
    if "--out" in arguments:
        arguments[arguments.index("--out") + 1] = str(tmp_path / "batch.png")
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_python_example_runs() -> None:
    code = re.search(r"```python\n(.*?)```", TEXT, flags=re.DOTALL).group(1)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_links_and_named_files_exist() -> None:
    targets = re.findall(r"\]\((?!http)([^)#]+)\)", TEXT)
    targets += re.findall(r"`((?:tests|benchmarks|recipes)/[\w/.]+)`", TEXT)
    missing = [target for target in targets if not (ROOT / target).exists()]
    assert targets
    assert not missing
