"""A run that is stopped anywhere, also during an evaluation, resumes to the result of an uninterrupted run."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from vit_scale.checkpoints.find import EVALUATION, list_checkpoints, read_meta
from vit_scale.errors import UserError
from vit_scale.recipe import load_recipe
from vit_scale.record.progress import OutputConsole
from vit_scale.train import loop, signals
from vit_scale.train.run_recipe import run_recipe

RECIPE = "recipes/debug.yaml"
TINY = ["data.source=synthetic", "data.synthetic_images=64", "data.synthetic_size=8", "data.synthetic_classes=4"]
QUICK = [
    *TINY,
    "track.wandb=disabled",
    "data.workers=0",
    "schedule.steps=6",
    "data.val_fraction=0.5",
    "batch.eval=4",
    "run.log_every=1",
    "run.eval_every=2",
    "run.save_every=100",
]
BATCHES = 8
"""Evaluation batches per kind of weights."""
LINES = ("step", "epoch", "train/loss", "val/loss", "val/top1", "val_ema/top1")


@pytest.fixture(autouse=True)
def _in_the_repository(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)


def train(folder: Path, *options: str) -> int:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    try:
        return run_recipe(load_recipe(RECIPE, [*QUICK, f"run.dir={folder}", *options]), RECIPE)
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


@contextmanager
def before_batch(number: int, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` before the evaluation batch with this number, counted from 0 over all evaluations."""
    evaluate, seen = loop.evaluate, iter(range(10_000))

    def counted(task: Any, model: Any, batches: Any, **options: Any) -> Any:
        def each() -> Iterator[Any]:
            for batch in batches:
                if next(seen) == number:
                    act()
                yield batch

        return evaluate(task, model, each(), **options)

    loop.evaluate = counted  # type: ignore[assignment]
    try:
        yield
    finally:
        loop.evaluate = evaluate


@contextmanager
def after_step(step: int, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` during the step."""
    update = loop.update

    def acting(task: Any, state: Any, batches: Any, **options: Any) -> Any:
        if state.step + 1 == step:
            act()
        return update(task, state, batches, **options)

    loop.update = acting
    try:
        yield
    finally:
        loop.update = update


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def crash() -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def complete(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run never interrupted."""
    folder = tmp_path_factory.mktemp("complete") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert train(folder) == 0
    return folder


def lines(folder: Path) -> list[dict[str, Any]]:
    recorded = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in LINES if key in line} for line in recorded]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def assert_same_run(ours: Path, theirs: Path) -> None:
    for name in ("model.safetensors", "model_ema.safetensors"):
        torch.testing.assert_close(load_file(ours / name), load_file(theirs / name), rtol=0, atol=0)
    assert lines(ours) == lines(theirs)
    assert [path.name for path in list_checkpoints(ours / "checkpoints")] == [
        path.name for path in list_checkpoints(theirs / "checkpoints")
    ]
    for key in ("finished", "step", "best/step", "best/val/top1", "val/top1", "val_ema/loss"):
        assert summary(ours)[key] == summary(theirs)[key], key


@pytest.mark.parametrize("evaluation", [0, 1, 2], ids=["first", "second", "last"])
@pytest.mark.parametrize("batch", [3, BATCHES + 3], ids=["raw", "ema"])
def test_evaluation_stops_at_a_signal_and_is_repeated_on_resume(
    complete: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], evaluation: int, batch: int
) -> None:
    folder, step = tmp_path / "run", 2 * (evaluation + 1)
    seen: list[int] = []
    with before_batch(evaluation * 2 * BATCHES + batch, terminate):
        assert train(folder) == 143
    assert f"stopped after step {step}, before its evaluation." in capsys.readouterr().out
    checkpoint = list_checkpoints(folder / "checkpoints")[-1]
    assert read_meta(checkpoint)["step"] == step
    assert not read_meta(checkpoint)["evaluated"]
    with after_step(step + 1, lambda: seen.append(len(lines(folder)))):
        assert train(folder) == 0
    assert seen in ([], [step + step // 2]), "the evaluation comes before the next step"
    assert_same_run(folder, complete)


def test_crash_between_an_evaluation_and_its_mark_repeats_it_once(complete: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with after_step(5, crash), pytest.raises(KeyboardInterrupt):
        train(folder)
    (folder / "checkpoints/step-00000004" / EVALUATION).unlink()
    assert train(folder) == 0
    assert_same_run(folder, complete)


def test_evaluation_that_is_done_is_not_repeated(complete: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with after_step(5, crash), pytest.raises(KeyboardInterrupt):
        train(folder)
    batches: list[int] = []
    with before_batch(2 * BATCHES, lambda: batches.append(1)):
        assert train(folder) == 0
    assert batches == [], "only the last evaluation was left"
    assert_same_run(folder, complete)


def test_checkpoint_of_an_earlier_version_counts_as_evaluated(complete: Path) -> None:
    checkpoint = complete / "checkpoints" / "step-00000006"
    meta = json.loads((checkpoint / "meta.json").read_text())
    assert meta.pop("evaluated") is False
    other = Path(shutil.copytree(checkpoint, complete.parent / "step-00000006"))
    (other / "meta.json").write_text(json.dumps(meta))
    (other / EVALUATION).unlink()
    assert read_meta(other)["evaluated"]


def test_each_evaluation_costs_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    save = loop.save
    monkeypatch.setattr(loop, "save", lambda run: saved.append(run.state.step) or save(run))  # type: ignore[func-returns-value]
    assert train(tmp_path / "run", "run.save_every=3") == 0
    assert saved == [2, 3, 4, 6]


def test_clock_saves_between_evaluations_and_numbers_switch_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    save = loop.save
    monkeypatch.setattr(loop, "save", lambda run: saved.append(run.state.step) or save(run))  # type: ignore[func-returns-value]
    now = [0.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    update = loop.update

    def slow(*args: Any, **options: Any) -> Any:
        now[0] += 250.0
        return update(*args, **options)

    monkeypatch.setattr(loop, "update", slow)
    assert train(tmp_path / "auto", "run.save_every=auto", "run.eval_every=100", "schedule.steps=8") == 0
    assert saved == [3, 6, 8]
    saved.clear()
    assert train(tmp_path / "number", "run.eval_every=100", "schedule.steps=8") == 0
    assert saved == [8]


def test_what_auto_chose_is_recorded_and_kept_on_resume(tmp_path: Path) -> None:
    folder, auto = tmp_path / "run", [f"run.{name}=auto" for name in ("log_every", "eval_every", "save_every")]
    with after_step(3, terminate):
        assert train(folder, *auto, "schedule.steps=12") == 143
    before = load_recipe(folder / "config.yaml").run
    assert (before.log_every, before.eval_every, before.save_every) == (1, 2, 2)
    assert train(folder, *auto, "schedule.steps=12") == 0
    assert load_recipe(folder / "config.yaml").run == before
    assert [line["step"] for line in lines(folder) if "train/loss" in line] == list(range(1, 13))
    assert [line["step"] for line in lines(folder) if "val/top1" in line] == [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize("where", ["start", "step 3"])
def test_closed_output_saves_and_stops_like_a_signal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    folder = tmp_path / "run"

    def leave() -> None:
        monkeypatch.setattr(OutputConsole, "is_closed", True)

    if where == "start":
        leave()
    with after_step(3, leave):
        assert train(folder) == 141
    assert f"stopped after step {1 if where == 'start' else 3}." in capsys.readouterr().err
    assert names(folder)[-1] == f"step-0000000{1 if where == 'start' else 3}"


# ---------------------------------------------------------------------------------------------------------- rollback


@pytest.fixture
def finished(complete: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, to be rolled back."""
    return Path(shutil.copytree(complete, tmp_path / "run"))


def test_finished_run_is_rolled_back_by_name_and_keeps_what_came_after(complete: Path, finished: Path) -> None:
    with after_step(6, terminate):
        assert train(finished, "run.resume=step-4") == 143
    assert not summary(finished)["finished"]
    assert {"unused-step-00000006", "step-00000004", "step-00000006"} <= set(names(finished))
    for name in ("unused-model.safetensors", "unused-model_ema.safetensors"):
        assert (finished / name).exists()
    assert not (finished / "model.safetensors").exists()
    unused = [json.loads(line) for line in (finished / "unused-metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in unused] == [5, 6, 6]
    assert train(finished) == 0
    assert_same_run(finished, complete)


def test_rolling_back_again_keeps_earlier_unused_checkpoints(finished: Path) -> None:
    assert train(finished, "run.resume=step-00000004") == 0
    assert train(finished, f"run.resume={finished}/checkpoints/step-00000004") == 0
    unused = [name for name in names(finished) if name.startswith("unused-")]
    assert unused == ["unused-step-00000006", "unused-step-00000006-2"]
    assert (finished / "unused-metrics-2.jsonl").exists()


def test_same_command_rolls_back_once(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "run.resume=step-00000004"
    with after_step(5, terminate):
        assert train(finished, command) == 143
    steps: list[int] = []
    with after_step(5, lambda: steps.append(5)), after_step(6, lambda: steps.append(6)):
        assert train(finished, command) == 0
    assert steps == [6], "resumed after a preemption instead of rolled back again"
    assert "Already rolled back to step-00000004" in capsys.readouterr().out
    assert train(finished, command) == 0
    assert "is finished" in capsys.readouterr().out


def test_unknown_checkpoint_error_lists_those_there_are(finished: Path) -> None:
    before = names(finished)
    with pytest.raises(
        UserError, match="'step-00000005': not found in .*available: step-00000002, step-00000004, step-00000006"
    ):
        train(finished, "run.resume=step-00000005")
    with pytest.raises(UserError, match="'5': checkpoint or run not found; .*step-00000002, step-00000004"):
        train(finished, "run.resume=5")
    assert names(finished) == before


def test_name_without_run_dir_means_the_latest_run(
    complete: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    from vit_scale.train.open_run import choose_run_dir

    for name in ("debug", "debug-2"):
        shutil.copytree(complete, tmp_path / "runs" / name)
    monkeypatch.chdir(tmp_path)
    os.utime("runs/debug/config.yaml", (1, 1))
    config = load_recipe(root / RECIPE, ["run.resume=step-00000004"])
    assert choose_run_dir(config, RECIPE) == Path("runs/debug-2")
    assert choose_run_dir(load_recipe(root / RECIPE), RECIPE) == Path("runs/debug-3")
