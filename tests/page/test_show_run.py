"""`launch/show_run.py` and `make train` from the command line."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Launch = Callable[..., subprocess.CompletedProcess]
SCRIPT = "launch/show_run.py"


def test_page_of_one_run_is_in_its_directory(launch: Launch, make_run) -> None:
    folder = make_run()
    done = launch(SCRIPT, folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"Wrote {folder}/page.html. Open it in a browser.\n"
    assert (folder / "page.html").read_text().startswith("<!doctype html>")


def test_page_is_small_and_links_nothing(launch: Launch, make_run, tmp_path: Path) -> None:
    done = launch(SCRIPT, make_run("a"), make_run("b"), "--out", tmp_path / "both.html")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "both.html").read_text()
    assert len(page) < 300_000
    assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=[\"'](?!data:)", page.split("<script>")[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "RUN"),
        (["optim.lr=1"], "no run given"),
        (["recipes"], "recipes: not a run directory"),
        (["no/such/run"], "no/such/run: run not found"),
        (["recipes/none.yaml"], "recipes/none.yaml: recipe not found"),
        (["{run}", "--out", "no/folder/page.html"], "--out no/folder/page.html: directory no/folder does not exist"),
        (["{run}", "--out", "recipes"], "--out recipes: is a directory"),
        (["{run}", "--nonsense"], "--nonsense"),
    ],
)
def test_invalid_input_exits_2_and_writes_nothing(launch: Launch, make_run, arguments: list[str], message: str) -> None:
    run = make_run()
    done = launch(SCRIPT, *(str(run) if argument == "{run}" else argument for argument in arguments))
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3
    assert not list(run.glob("*.html"))


def test_write_error_is_reported_and_preserves_the_old_page(make_run, monkeypatch) -> None:
    from vit_scale.errors import UserError
    from vit_scale.page.page import write_page
    from vit_scale.page.runs import read_runs

    folder = make_run()
    (folder / "page.html").write_text("old")
    full = OSError(28, "No space left on device")

    def fail(self: Path, text: str, encoding: str) -> None:
        raise full

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(UserError, match=r"page.html: cannot be written: No space left on device"):
        write_page(read_runs([folder]), folder / "page.html")
    assert (folder / "page.html").read_text() == "old"


def test_help_imports_no_heavy_libraries(launch: Launch) -> None:
    done = launch("-Ximporttime", SCRIPT, "--help")
    assert done.returncode == 0
    assert "examples:" in done.stdout
    assert not re.search(r"\|\s+(torch|jinja2|PIL)\b", done.stderr)


def test_page_of_a_trained_run_is_below_2_mb(trained: Path) -> None:
    from vit_scale.page.page import render_page
    from vit_scale.page.runs import read_runs

    assert len(render_page(read_runs([trained])).encode()) < 2_000_000


def test_page_imports_no_torch(launch: Launch, make_run) -> None:
    done = launch("-Ximporttime", SCRIPT, make_run())
    assert done.returncode == 0
    assert not re.search(r"\|\s+torch\b", done.stderr)


@pytest.fixture
def make_train(root: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Run `make train` with a Python that only prints its arguments, and exits with a status in training."""
    if not shutil.which("make"):
        pytest.skip("no make is installed")
    for name in ("Makefile", "setup.py", "constraints.txt"):
        shutil.copy(root / name, tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\necho "$@"\ncase $1 in *train.py) exit $STATUS;; esac\n')
    python.chmod(0o755)
    (tmp_path / "ready.mk").write_text("include Makefile\nready:\n\t@touch $(READY)\n")
    subprocess.run(["make", "-f", "ready.mk", "ready"], cwd=tmp_path, check=True, capture_output=True)

    def run(*arguments: str, status: int = 0) -> subprocess.CompletedProcess:
        env = {"STATUS": str(status), "PATH": "/usr/bin:/bin"}
        return subprocess.run(["make", "train", *arguments], cwd=tmp_path, env=env, capture_output=True, text=True)

    return run


def test_make_train_writes_the_page(make_train: Callable) -> None:
    done = make_train()
    assert done.returncode == 0, done.stderr
    assert done.stdout == "launch/train.py recipes/digits.yaml\nlaunch/show_run.py recipes/digits.yaml\n"


def test_make_train_passes_recipe_and_options_to_both(make_train: Callable) -> None:
    done = make_train("RECIPE=my.yaml run.dir=there")
    assert done.stdout == "launch/train.py my.yaml run.dir=there\nlaunch/show_run.py my.yaml run.dir=there\n"


def test_make_train_fails_with_training_and_writes_no_page(make_train: Callable) -> None:
    done = make_train(status=130)
    assert done.returncode != 0
    assert "130" in done.stderr
    assert "show_run" not in done.stdout
