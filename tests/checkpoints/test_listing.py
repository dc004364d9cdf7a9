"""`--list-checkpoints`: every checkpoint that is kept, whether the run is finished, in progress or corrupt."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from vit_scale.checkpoints.find import EVALUATION
from vit_scale.checkpoints.listing import kept_checkpoints
from vit_scale.commands.train import main
from vit_scale.errors import UserError


@pytest.fixture
def run(trained_run: Path, tmp_path: Path) -> Path:
    """A finished run with an unused checkpoint."""
    folder = Path(shutil.copytree(trained_run, tmp_path / "run"))
    checkpoints = folder / "checkpoints"
    shutil.copytree(checkpoints / "step-00000012", checkpoints / "unused-step-00000012")
    return folder


def test_checkpoints_have_their_step_metrics_size_and_marks(run: Path) -> None:
    kept = {each.name: each for each in kept_checkpoints(run)}
    latest = kept["step-00000012"]
    assert latest.step == 12
    assert latest.epoch == pytest.approx(12 * 32 / 1617)
    assert latest.metrics is not None
    assert 0 <= latest.metrics["val/top1"] <= 1
    assert latest.size > 100_000
    assert latest.age >= 0
    assert "latest" in latest.marks
    assert kept["unused-step-00000012"].marks == ("unused",)
    assert sum("best" in each.marks for each in kept.values()) == 1


def test_pending_and_invalid_checkpoints_are_marked(run: Path) -> None:
    (run / "checkpoints/step-00000012" / EVALUATION).unlink()
    (run / "checkpoints/unused-step-00000012/model.safetensors").unlink()
    marks = {each.name: each.marks for each in kept_checkpoints(run)}
    assert "evaluation pending" in marks["step-00000012"]
    assert marks["unused-step-00000012"] == ("unused", "invalid: model.safetensors is missing")


def test_command_prints_the_checkpoints_of_a_recipe_or_a_run_directory(
    run: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(root / "recipes/debug.yaml"), f"run.dir={run}", "--list-checkpoints"]) == 0
    of_recipe = capsys.readouterr().out
    assert main([str(run), "--list-checkpoints"]) == 0
    assert capsys.readouterr().out.split("─")[-1] == of_recipe.split("─")[-1]
    for text in ("step-00000012", "top-1", "EMA top-1", "KiB", "latest", "unused", "run.resume=step-"):
        assert text in of_recipe, text


def test_run_without_checkpoints_and_missing_run_are_reported(
    run: Path, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "checkpoints")
    assert main([str(run), "--list-checkpoints"]) == 0
    assert "no checkpoints yet" in capsys.readouterr().out
    with pytest.raises(UserError, match="no run in"):
        main([str(root / "recipes/debug.yaml"), f"run.dir={tmp_path}/none", "--list-checkpoints"])
