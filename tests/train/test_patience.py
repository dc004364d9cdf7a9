"""Early stopping: counted from the checkpointed state, ends the run as finished, and continues with more patience."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState

from vit_scale.recipe import build_config, load_recipe
from vit_scale.schedule import make_plan
from vit_scale.tasks.classify.evaluator import ClassificationEvaluator
from vit_scale.train.run_recipe import run_recipe

OPTIONS = ["track.wandb=disabled", "data.workers=0", "ema.decay=0", "schedule.steps=12", "run.eval_images=20"]
OPTIONS += ["run.eval_every=2", "run.save_every=100", "run.keep=1"]
RESULTS = [0.2, 0.5, 0.4, 0.5, 0.3, 0.6]
"""Top-1 of the evaluations after steps 2 to 12."""


@pytest.mark.parametrize(
    ("step", "best_step", "expected"),
    [(2, 2, False), (5, 2, False), (6, 2, True), (8, 2, True), (4, 0, True), (7, 5, False), (8, 5, True)],
)
def test_evaluations_since_the_best_are_counted(step: int, best_step: int, expected: bool) -> None:
    config = build_config({"schedule": {"steps": 9}, "run": {"eval_every": 2, "patience": 2}})
    plan = make_plan(config, train_images=100, processes=1, device="cpu")
    assert plan.is_out_of_patience(config.run.patience, step, best_step) is expected
    assert not plan.is_out_of_patience(None, 10**6, 0)


@pytest.fixture
def train(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_accelerate: None):  # type: ignore[no-untyped-def]
    """Train the debug recipe with given results; returns the exit status."""
    steps: list[int] = []

    def metrics(self: ClassificationEvaluator) -> dict[str, float]:
        steps.append(1)
        return {"top1": RESULTS[len(steps) - 1], "top5": 1.0, "loss": 1.0}

    def run(patience: object, *options: str, evaluated: int = 0) -> int:
        steps[:] = [1] * evaluated
        recipe = str(root / "recipes/debug.yaml")
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        monkeypatch.setattr(ClassificationEvaluator, "metrics", metrics)
        options = (*OPTIONS, f"run.dir={tmp_path / 'run'}", f"run.patience={patience}", *options)
        return run_recipe(load_recipe(recipe, options), recipe)

    return run


def summary(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "run/summary.json").read_text())


def test_run_stops_early_is_finished_and_continues_with_more_patience(
    train, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    # Killed after the last step, before the final weights are written.
    def killed(*_: object, **__: object) -> None:
        raise SystemExit("killed")

    with monkeypatch.context() as context:
        context.setattr("vit_scale.train.finish.write_final_weights", killed)
        with pytest.raises(SystemExit):
            train(2)
    assert not summary(tmp_path)["finished"]
    assert train(2, evaluated=6) == 0, "it only writes the weights"
    found = summary(tmp_path)
    assert (found["finished"], found["stopped_early"], found["step"]) == (True, True, 8)
    assert (found["best/step"], found["best/val/top1"]) == (4, 0.5)
    assert (tmp_path / "run/model.safetensors").exists()
    assert (tmp_path / "run/pictures/mistakes.png").exists(), "the last evaluation is shown"
    best = tmp_path / "run/checkpoints/step-00000004"
    assert best.is_dir()
    text = capsys.readouterr().out
    assert "evaluation  at most 20 validation images (run.eval_images)" in text
    assert "early stop  after 2 evaluations without improvement (run.patience)" in text
    assert "Stopped early at step 8/12: no better top-1 than 50.00% at step 4 in 2 evaluations (run.patience)." in text
    assert f"Best checkpoint: {best}." in text.replace("\n", "")

    assert train(2, evaluated=6) == 0
    text = capsys.readouterr().out
    assert "is finished (step 8/12, stopped early by run.patience = 2)" in text
    assert "larger run.patience" in text
    assert train("null", evaluated=4) == 0
    found = summary(tmp_path)
    assert (found["finished"], found["stopped_early"], found["step"]) == (True, False, 12)
    assert found["best/step"] == 12
