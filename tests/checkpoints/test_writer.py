"""A checkpoint is complete or absent, contains everything needed to resume, and is data, never code."""

from __future__ import annotations

import json
import os
import pickle
import runpy
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from vit_scale.checkpoints.checked_files import checksum
from vit_scale.checkpoints.find import (
    checkpoint_error,
    find_checkpoint,
    latest_valid_checkpoint,
    list_checkpoints,
    read_meta,
)
from vit_scale.checkpoints.reader import Checkpoint
from vit_scale.checkpoints.writer import CheckpointFolder
from vit_scale.errors import UserError
from vit_scale.recipe import load_recipe
from vit_scale.strategies.ema import Ema
from vit_scale.strategies.replicated import PlainEngine
from vit_scale.train import loop
from vit_scale.train.open_run import differing_options, may_change
from vit_scale.train.run_recipe import run_recipe
from vit_scale.train.state import TrainState

RECIPE = "recipes/debug.yaml"
TINY = ["data.source=synthetic", "data.synthetic_images=64", "data.synthetic_size=8", "data.synthetic_classes=4"]
QUICK = [*TINY, "track.wandb=disabled", "data.workers=0", "schedule.steps=8", "run.save_every=2", "run.eval_every=100"]
INTERRUPTED = 138


@pytest.fixture(autouse=True)
def _in_the_repository(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)


def train(folder: Path, *options: str, stop_after: int | None = None) -> int:
    """Train in this process; with `stop_after`, as if it received SIGUSR1 during that step."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    update = loop.update

    def interrupted(task, state, batches, **options):  # type: ignore[no-untyped-def]
        if state.step + 1 == stop_after:
            os.kill(os.getpid(), signal.SIGUSR1)
        return update(task, state, batches, **options)

    loop.update = interrupted
    try:
        return run_recipe(load_recipe(RECIPE, [*QUICK, f"run.dir={folder}", *options]), RECIPE)
    finally:
        loop.update = update
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


@pytest.fixture(scope="module")
def runs(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`complete`: a run never interrupted. `stopped`: the same, stopped after step 6, with checkpoints 4 and 6."""
    top = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert train(top / "complete") == 0
        assert train(top / "stopped", stop_after=6) == INTERRUPTED
    return top


@pytest.fixture
def stopped(runs: Path, tmp_path: Path) -> Path:
    """A copy of the stopped run, to be corrupted."""
    return Path(shutil.copytree(runs / "stopped", tmp_path / "run"))


def assert_same_weights(ours: Path, theirs: Path) -> None:
    for name in ("model.safetensors", "model_ema.safetensors"):
        torch.testing.assert_close(load_file(ours / name), load_file(theirs / name), rtol=0, atol=0)


# -------------------------------------------------------------------------------------------------------- corruption


def truncate(checkpoint: Path) -> None:
    os.truncate(checkpoint / "shard-00000.safetensors", 1000)


def flip_a_byte(checkpoint: Path) -> None:
    content = bytearray((checkpoint / "model.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoint / "model.safetensors").write_bytes(content)


def lose_a_file(checkpoint: Path) -> None:
    (checkpoint / "shard-00000.safetensors").unlink()


def empty_the_directory(checkpoint: Path) -> None:
    for path in checkpoint.iterdir():
        path.unlink()


def garble_the_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_bytes(b"\x00\xff{]")


def list_no_files(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text('{"files": []}')


CORRUPTION = {
    truncate: "shard-00000.safetensors has 1,000 bytes instead of",
    flip_a_byte: "model.safetensors does not match its checksum",
    lose_a_file: "shard-00000.safetensors is missing",
    empty_the_directory: "no readable manifest",
    garble_the_manifest: "no readable manifest",
    list_no_files: "no readable manifest",
}


@pytest.mark.parametrize("corrupt", CORRUPTION, ids=lambda corrupt: corrupt.__name__)
def test_corrupt_checkpoint_is_skipped_for_the_one_before(stopped: Path, corrupt: Callable[[Path], None]) -> None:
    corrupt(stopped / "checkpoints" / "step-00000006")
    found, messages = latest_valid_checkpoint(stopped)
    assert found == stopped / "checkpoints" / "step-00000004"
    assert CORRUPTION[corrupt] in messages[0]
    assert messages[1] == "Steps 5-6 will be rerun."


def test_run_without_valid_checkpoint_restarts_with_a_message(stopped: Path) -> None:
    for checkpoint in list_checkpoints(stopped / "checkpoints"):
        truncate(checkpoint)
    found, messages = latest_valid_checkpoint(stopped)
    assert found is None
    assert messages[-1] == "Steps 1-6 will be rerun."


def test_resume_after_corruption_ends_with_the_same_weights(
    runs: Path, stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_a_byte(stopped / "checkpoints" / "step-00000006")
    (stopped / "checkpoints" / ".partial-00000007-0badcafe").mkdir()
    assert train(stopped, "run.log_every=1", "run.keep=5") == 0, "options that may change"
    output = capsys.readouterr().out
    assert "Skipping invalid checkpoint step-00000006: model.safetensors does not match its checksum." in output
    assert "(step 4/8)" in output
    assert_same_weights(stopped, runs / "complete")
    names = {path.name for path in (stopped / "checkpoints").iterdir()}
    assert names == {"step-00000004", "step-00000006", "step-00000008", "unused-step-00000006"}
    assert checkpoint_error(stopped / "checkpoints" / "step-00000006") is None


def test_run_killed_before_its_final_weights_writes_them(runs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs / "complete", tmp_path / "run"))
    for name in ("model.safetensors", "model_ema.safetensors"):
        (folder / name).unlink()
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"finished": False}))
    assert train(folder) == 0
    assert_same_weights(folder, runs / "complete")
    assert json.loads((folder / "summary.json").read_text())["finished"]


# ---------------------------------------------------------------------------------------------------------- content


def test_checkpoint_contains_named_weights_and_their_origin(runs: Path) -> None:
    checkpoint = runs / "complete" / "checkpoints" / "step-00000008"
    held, final = (load_file(folder / "model.safetensors") for folder in (checkpoint, runs / "complete"))
    torch.testing.assert_close(held, final, rtol=0, atol=0)
    meta = read_meta(checkpoint)
    assert meta["step"] == 8
    assert meta["config"]["schedule"]["steps"] == 8
    assert {"torch", "timm"} <= meta["versions"].keys()
    assert {"git_commit", "wandb_id", "plan", "best"} <= meta.keys()


def small_state(rank: int = 0, world: int = 1) -> TrainState:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return TrainState(PlainEngine(model, optimizer, rank, world))


def folder_of(path: Path, rank: int = 0, world: int = 1, **options: object) -> CheckpointFolder:
    return CheckpointFolder(path, keep=2, rank=rank, world=world, session="now", **options)  # type: ignore[arg-type]


def save_at(folder: CheckpointFolder, state: TrainState, *steps: int) -> None:
    for step in steps:
        state.step = step
        folder.save(state, {"plan": {}})
    folder.wait()


def steps_in(path: Path) -> list[int]:
    return [int(checkpoint.name.removeprefix("step-")) for checkpoint in list_checkpoints(path / "checkpoints")]


def test_latest_and_best_checkpoints_are_kept(tmp_path: Path) -> None:
    folder, state = folder_of(tmp_path), small_state()
    save_at(folder, state, 1)
    state.best_step = 2
    save_at(folder, state, 2, 3, 4, 5)
    assert steps_in(tmp_path) == [2, 4, 5]


def test_last_checkpoint_before_skipped_steps_is_kept(tmp_path: Path) -> None:
    folder, state = folder_of(tmp_path), small_state()
    save_at(folder, state, 1, 2)
    state.consecutive_skipped_steps.fill_(1)
    save_at(folder, state, 3, 4, 5)
    assert steps_in(tmp_path) == [2, 4, 5]
    assert folder.good == tmp_path / "checkpoints" / "step-00000002"


def test_corrupt_later_checkpoints_do_not_displace_new_ones(tmp_path: Path) -> None:
    save_at(folder_of(tmp_path), small_state(), 7, 8, 9)
    save_at(folder_of(tmp_path, step=4), small_state(), 5, 6)
    assert steps_in(tmp_path) == [5, 6]
    assert {path.name for path in (tmp_path / "checkpoints").glob("unused-*")} == {
        "unused-step-00000008",
        "unused-step-00000009",
    }


def test_later_changes_do_not_reach_a_checkpoint(tmp_path: Path) -> None:
    folder, state = folder_of(tmp_path), small_state()
    before = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    state.step = 1
    folder.save(state, {"plan": {}})
    with torch.no_grad():
        for p in state.model.parameters():
            p.add_(1.0)
    folder.close()
    torch.testing.assert_close(load_file(tmp_path / "checkpoints/step-00000001/model.safetensors"), before)


def test_failure_of_another_rank_is_reported_and_leaves_no_partial_checkpoint(tmp_path: Path) -> None:
    main, other = folder_of(tmp_path, 0, 2), folder_of(tmp_path, 1, 2)
    main.save(small_state(0, 2), {"plan": {}})
    other._writer.submit(other._fail, 0, OSError("disk failure"), {})
    main.wait()
    problem = main.problem() or ""
    assert "rank 1: disk failure" in problem
    assert "Earlier checkpoints are intact" in problem
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_shard_of_a_failed_rank_is_not_awaited(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 0, 2, timeout_seconds=1e6)
    folder.save(small_state(0, 2), {"plan": {}})
    folder.abandon()
    folder.close()
    assert "rank 1 did not write its shard" in (folder.problem() or "")
    assert steps_in(tmp_path) == []


# --------------------------------------------------------------------------------------------------- foreign files


class Malice:
    """A pickle that creates a file when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple:
        return Path.touch, (self.proof,)


@pytest.fixture
def malice(tmp_path: Path) -> tuple[bytes, Path]:
    """A malicious pickle, and the file that it creates if it is executed."""
    content = pickle.dumps(Malice(tmp_path / "executed"))
    pickle.loads(content)
    (tmp_path / "executed").unlink()
    return content, tmp_path / "executed"


def exit_status(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["launch/train.py", RECIPE, *QUICK, *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path("launch/train.py", run_name="__main__")
    return end.value.code  # type: ignore[return-value]


@pytest.mark.parametrize("option", ["run.resume", "model.weights"])
@pytest.mark.parametrize("name", ["x.pth", "x.safetensors"])
def test_malicious_pickle_is_rejected_without_being_executed(
    malice: tuple[bytes, Path],
    option: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fresh_accelerate: None,
) -> None:
    (tmp_path / name).write_bytes(malice[0])
    assert exit_status(monkeypatch, f"run.dir={tmp_path}/run", f"{option}={tmp_path / name}") == 2
    assert option in capsys.readouterr().err
    assert not malice[1].exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "shard-00000.safetensors"])
def test_malicious_pickle_within_a_checkpoint_is_rejected_without_being_executed(
    malice: tuple[bytes, Path],
    stopped: Path,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fresh_accelerate: None,
) -> None:
    checkpoint = stopped / "checkpoints" / "step-00000006"
    (checkpoint / name).write_bytes(malice[0])
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(malice[0]), "crc32": checksum(checkpoint / name)}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint_error(checkpoint) is None, "it comes with a manifest that fits"
    assert exit_status(monkeypatch, f"run.dir={tmp_path}/new", f"run.resume={checkpoint}") == 2
    assert "not the files of a checkpoint" in capsys.readouterr().err
    assert not malice[1].exists()


def test_checkpoint_of_another_model_is_rejected(stopped: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="different model: .* has shape .*, expected"):
        train(tmp_path / "new", "model.embed_dim=64", f"run.resume={stopped}")
    assert not (tmp_path / "new").exists()


def test_foreign_meta_is_rejected(stopped: Path) -> None:
    checkpoint = stopped / "checkpoints" / "step-00000006"
    (checkpoint / "meta.json").write_text("[]")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["meta.json"] = {"bytes": 2, "crc32": checksum(checkpoint / "meta.json")}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="invalid checkpoint: its meta.json"):
        find_checkpoint(str(checkpoint), stopped)


def test_ema_of_a_run_that_had_none_starts_from_the_weights(tmp_path: Path) -> None:
    state = small_state()
    save_at(folder_of(tmp_path), state, 1)
    fresh = small_state()
    with torch.no_grad():
        fresh.model.weight.zero_()  # type: ignore[union-attr,operator]
    fresh.ema = Ema(fresh.engine.shards, 0.9, warmup=True)
    fresh.restore(Checkpoint(tmp_path / "checkpoints" / "step-00000001"))
    average = fresh.ema.pieces()["weight"].tensor
    torch.testing.assert_close(average, state.model.weight.detach().flatten(), rtol=0, atol=0)  # type: ignore[union-attr,operator]


# ----------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    "change", ["optim.lr=0.1", "run.seed=1", "batch.global=64", "augment.mixup=0.1", "model.depth=1", "data.name=x"]
)
def test_different_options_are_rejected_by_name(stopped: Path, change: str) -> None:
    key, value = change.split("=")
    with pytest.raises(UserError, match=rf"different options: {key} = .* \(existing\), '?{value}'? \(requested\)"):
        train(stopped, change)
    assert steps_in(stopped) == [4, 6]


@pytest.mark.parametrize(
    "change",
    ["schedule.steps=9", "run.log_every=7", "run.eval_every=7", "parallel.strategy=ddp", "batch.micro=8", "run.keep=9"],
)
def test_options_that_may_change_are_accepted(stopped: Path, change: str) -> None:
    assert may_change(change.split("=")[0])
    assert differing_options(stopped, load_recipe(RECIPE, [*QUICK, change])) == {}
