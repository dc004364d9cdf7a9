"""`launch/train.py RECIPE --dry-run` as a user meets it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from vit_scale.commands.train import main
from vit_scale.errors import UserError

Launch = Callable[..., subprocess.CompletedProcess]
LARGE = "recipes/vit_large.yaml"


@pytest.fixture(autouse=True)
def at_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it.


def test_plan_is_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([LARGE, "--dry-run", "--gpus", "64", "--gpu", "H100"]) == 0
    said = capsys.readouterr().out
    for figure in (
        "on 64 x H100 (nothing is read or written)",
        "304,375,784 parameters, 61.55 GMACs",
        "equal to timm's VisionTransformer",
        "1,281,167 training images",
        "4,096 (64 processes x 1 accumulation step x 64 images)",
        "62,557 updates = 200 epochs, 6,256 updates of warm-up",
        "1.60e-03 at the peak",
        "> ZeRO-2  12.4 GiB",
        "2 (N-1)/N 4P: an all-reduce",
        "0.40, assumed for a large model on H100 and later",
        "58.4 GPU-hours",
        "stage 2, micro batch 64, accumulation 1",
    ):
        assert figure in said
    assert max(map(len, said.splitlines())) <= 130
    assert len(said.splitlines()) < 45


def test_answer_shown_in_the_docs_is_what_is_printed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = re.findall(r"```text\n(.*?)```", (root / "docs" / "scaling.md").read_text(), flags=re.DOTALL)
    assert main([LARGE, "--dry-run", "--gpus", "64", "--gpu", "H100"]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    missing = [line for line in shown.splitlines() if line not in printed and "─" not in line]
    assert not missing


def test_json_has_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([LARGE, "--dry-run", "--gpus", "1024", "--gpu", "A100", "--mfu", "0.5", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (
        plan["machine"]["devices"] * plan["batch"]["accumulation"] * plan["batch"]["micro"] == plan["batch"]["global"]
    )
    assert plan["cost"]["mfu"] == 0.5
    assert plan["cost"]["seconds"] == pytest.approx(plan["cost"]["flops"] / (1024 * 312e12 * 0.5))
    ddp = plan["strategies"]["ddp"]
    assert ddp["memory_bytes_peak"] == sum(ddp["memory_bytes"].values()) - ddp["memory_bytes_never_at_once"]
    assert plan["deepspeed"]["zero_optimization"]["stage"] == 2


def test_nothing_is_read_or_written(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the data nor the weights that the recipe names are there."""
    monkeypatch.chdir(tmp_path)
    recipe = str(root / "recipes" / "imagenet" / "finetune_21k_to_1k.yaml")
    assert main([recipe, "--dry-run", "model.weights=no/such/file", "data.source=no/such/data"]) == 0
    assert "no/such/file (not looked at here)" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", "H1O0"], "did you mean 'H100'?"),
        (["--gpus", "0"], "--gpus 0: must be at least 1"),
        (["--gpus", "some"], "--gpus"),
        (["--mfu", "40"], "--mfu 40: must be greater than 0 and at most 1"),
        (["--images", "0"], "--images 0: must be at least 1"),
        (["--gpus", "48"], "does not divide over 48 processes"),
        (["data.source=no/such/data"], "--images N"),
        (["optim.name=lamb"], "looks at whole layers"),
        (["parallel.strategy=ddp", "parallel.offload=optimizer"], "parallel.offload"),
    ],
)
def test_mistake_is_told_in_three_lines(arguments: list[str], said: str) -> None:
    with pytest.raises(UserError) as error:
        main([LARGE, "--dry-run", *arguments])
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) <= 3


@pytest.mark.parametrize("flag", [["--gpus", "8"], ["--gpu", "H100"], ["--mfu", "0.4"], ["--json"]])
def test_flag_of_planning_without_dry_run_is_refused(flag: list[str]) -> None:
    with pytest.raises(UserError, match=f"{flag[0]} goes with --dry-run"):
        main([LARGE, *flag])


def test_terminal_without_blocks_gets_plain_characters(launch: Launch) -> None:
    done = launch("launch/train.py", "recipes/digits.yaml", "--dry-run", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "#####" in done.stdout
    assert done.stdout.isascii()
