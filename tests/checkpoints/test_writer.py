"""A checkpoint is whole or not there, holds all that resuming needs, and is data, never code."""

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
from vit_scale.checkpoints.reader import find_checkpoint, newest_whole, read_meta, restore, what_is_wrong
from vit_scale.checkpoints.run_dir import differing_options, may_change
from vit_scale.checkpoints.writer import CheckpointFolder, list_checkpoints
from vit_scale.errors import UserError
from vit_scale.recipe import load_recipe
from vit_scale.strategies.shards import Replicated
from vit_scale.train import loop
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

    def interrupted(run, batches):  # type: ignore[no-untyped-def]
        if run.state.step + 1 == stop_after:
            os.kill(os.getpid(), signal.SIGUSR1)
        return update(run, batches)

    loop.update = interrupted
    try:
        return run_recipe(load_recipe(RECIPE, [*QUICK, f"run.dir={folder}", *options]), RECIPE)
    finally:
        loop.update = update
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


@pytest.fixture(scope="module")
def runs(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`whole`: a run never interrupted. `stopped`: the same, stopped after step 6, with checkpoints of 4 and 6."""
    top = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert train(top / "whole") == 0
        assert train(top / "stopped", stop_after=6) == INTERRUPTED
    return top


@pytest.fixture
def stopped(runs: Path, tmp_path: Path) -> Path:
    """A copy of the stopped run, to be damaged."""
    return Path(shutil.copytree(runs / "stopped", tmp_path / "run"))


def assert_same_weights(ours: Path, theirs: Path) -> None:
    for name in ("model.safetensors", "model_ema.safetensors"):
        torch.testing.assert_close(load_file(ours / name), load_file(theirs / name), rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------------------ damage


def truncate(checkpoint: Path) -> None:
    os.truncate(checkpoint / "shard-00000.safetensors", 1000)


def flip_a_byte(checkpoint: Path) -> None:
    content = bytearray((checkpoint / "model.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoint / "model.safetensors").write_bytes(content)


def lose_a_file(checkpoint: Path) -> None:
    (checkpoint / "shard-00000.safetensors").unlink()


def empty_the_folder(checkpoint: Path) -> None:
    for path in checkpoint.iterdir():
        path.unlink()


def garble_the_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_bytes(b"\x00\xff{]")


def list_no_files(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text('{"files": []}')


DAMAGE = {
    truncate: "shard-00000.safetensors has 1,000 bytes instead of",
    flip_a_byte: "model.safetensors does not match its checksum",
    lose_a_file: "shard-00000.safetensors is missing",
    empty_the_folder: "it has no readable manifest",
    garble_the_manifest: "it has no readable manifest",
    list_no_files: "it has no readable manifest",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damaged_checkpoint_gives_way_to_the_one_before(stopped: Path, damage: Callable[[Path], None]) -> None:
    damage(stopped / "checkpoints" / "step-00000006")
    found, said = newest_whole(stopped)
    assert found == stopped / "checkpoints" / "step-00000004"
    assert DAMAGE[damage] in said[0]
    assert said[1] == "Steps 5 to 6 are done again."


def test_nothing_whole_means_starting_anew_and_saying_so(stopped: Path) -> None:
    for checkpoint in list_checkpoints(stopped / "checkpoints"):
        truncate(checkpoint)
    found, said = newest_whole(stopped)
    assert found is None
    assert said[-1] == "Steps 1 to 6 are done again."


def test_going_on_after_damage_ends_with_the_same_weights(
    runs: Path, stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_a_byte(stopped / "checkpoints" / "step-00000006")
    (stopped / "checkpoints" / ".partial-00000007-0badcafe").mkdir()
    assert train(stopped, "run.log_every=1", "run.keep=5") == 0, "options that may change"
    said = capsys.readouterr().out
    assert "step-00000006 is not used: model.safetensors does not match its checksum." in said
    assert "after step 4 of 8" in said
    assert_same_weights(stopped, runs / "whole")
    names = {path.name for path in (stopped / "checkpoints").iterdir()}
    assert names == {"step-00000004", "step-00000006", "step-00000008", "unused-step-00000006"}
    assert what_is_wrong(stopped / "checkpoints" / "step-00000006") is None


def test_run_killed_before_its_final_weights_writes_them(runs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs / "whole", tmp_path / "run"))
    for name in ("model.safetensors", "model_ema.safetensors"):
        (folder / name).unlink()
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"finished": False}))
    assert train(folder) == 0
    assert_same_weights(folder, runs / "whole")
    assert json.loads((folder / "summary.json").read_text())["finished"]


# ----------------------------------------------------------------------------------------------------------- holding


def test_checkpoint_holds_weights_under_their_names_and_what_made_them(runs: Path) -> None:
    checkpoint = runs / "whole" / "checkpoints" / "step-00000008"
    held, final = (load_file(folder / "model.safetensors") for folder in (checkpoint, runs / "whole"))
    torch.testing.assert_close(held, final, rtol=0, atol=0)
    meta = read_meta(checkpoint)
    assert meta["step"] == 8
    assert meta["config"]["schedule"]["steps"] == 8
    assert {"torch", "timm"} <= meta["versions"].keys()
    assert {"git_commit", "wandb_id", "plan", "best_top1"} <= meta.keys()


def small_state(rank: int = 0, world: int = 1) -> TrainState:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return TrainState(model, model, optimizer, Replicated(model, optimizer, rank, world))  # type: ignore[arg-type]


def folder_of(path: Path, rank: int = 0, world: int = 1, **options: object) -> CheckpointFolder:
    return CheckpointFolder(path, keep=2, rank=rank, world=world, session="now", **options)  # type: ignore[arg-type]


def save_at(folder: CheckpointFolder, state: TrainState, *steps: int) -> None:
    for step in steps:
        state.step = step
        folder.save(state, {"plan": {}})
    folder.wait()


def steps_in(path: Path) -> list[int]:
    return [int(checkpoint.name.removeprefix("step-")) for checkpoint in list_checkpoints(path / "checkpoints")]


def test_newest_and_best_are_kept(tmp_path: Path) -> None:
    folder, state = folder_of(tmp_path), small_state()
    save_at(folder, state, 1)
    state.best_step = 2
    save_at(folder, state, 2, 3, 4, 5)
    assert steps_in(tmp_path) == [2, 4, 5]


def test_last_checkpoint_before_skipped_updates_is_kept(tmp_path: Path) -> None:
    folder, state = folder_of(tmp_path), small_state()
    save_at(folder, state, 1, 2)
    state.bad_in_a_row.fill_(1)
    save_at(folder, state, 3, 4, 5)
    assert steps_in(tmp_path) == [2, 4, 5]
    assert folder.good == tmp_path / "checkpoints" / "step-00000002"


def test_damaged_newer_checkpoints_do_not_displace_what_is_saved_next(tmp_path: Path) -> None:
    save_at(folder_of(tmp_path), small_state(), 7, 8, 9)
    save_at(folder_of(tmp_path, step=4), small_state(), 5, 6)
    assert steps_in(tmp_path) == [5, 6]
    assert {path.name for path in (tmp_path / "checkpoints").glob("unused-*")} == {
        "unused-step-00000008",
        "unused-step-00000009",
    }


def test_what_is_saved_is_a_copy_of_the_moment(tmp_path: Path) -> None:
    folder, state = folder_of(tmp_path), small_state()
    before = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    state.step = 1
    folder.save(state, {"plan": {}})
    with torch.no_grad():
        for p in state.model.parameters():
            p.add_(1.0)
    folder.close()
    torch.testing.assert_close(load_file(tmp_path / "checkpoints/step-00000001/model.safetensors"), before)


def test_failure_of_another_process_is_told_and_leaves_no_half(tmp_path: Path) -> None:
    main, other = folder_of(tmp_path, 0, 2), folder_of(tmp_path, 1, 2)
    main.save(small_state(0, 2), {"plan": {}})
    other._writer.submit(other._fail, 0, OSError("its disk is broken"), {})
    main.wait()
    problem = main.problem() or ""
    assert "process 1: its disk is broken" in problem
    assert "Earlier checkpoints are whole" in problem
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_shard_of_a_lost_process_is_not_waited_for(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 0, 2, seconds_to_wait=1e6)
    folder.save(small_state(0, 2), {"plan": {}})
    folder.abandon()
    folder.close()
    assert "process 1 did not write its part" in (folder.problem() or "")
    assert steps_in(tmp_path) == []


# ------------------------------------------------------------------------------------------------ what is not ours


class Malice:
    """A pickle that makes a file when it is read the careless way."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple:
        return Path.touch, (self.proof,)


@pytest.fixture
def malice(tmp_path: Path) -> tuple[bytes, Path]:
    """A malicious pickle, and the file that it makes where it is executed."""
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
def test_malicious_pickle_is_refused_without_being_executed(
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
def test_malicious_pickle_within_a_checkpoint_is_refused_without_being_executed(
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
    assert what_is_wrong(checkpoint) is None, "it comes with a manifest that fits"
    assert exit_status(monkeypatch, f"run.dir={tmp_path}/new", f"run.resume={checkpoint}") == 2
    assert "not those of a checkpoint" in capsys.readouterr().err
    assert not malice[1].exists()


def test_checkpoint_of_another_model_is_refused(stopped: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="another model: .* is .* there and .* here"):
        train(tmp_path / "new", "model.embed_dim=64", f"run.resume={stopped}")
    assert not (tmp_path / "new").exists()


def test_meta_of_something_else_is_refused(stopped: Path) -> None:
    checkpoint = stopped / "checkpoints" / "step-00000006"
    (checkpoint / "meta.json").write_text("[]")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["meta.json"] = {"bytes": 2, "crc32": checksum(checkpoint / "meta.json")}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="not a whole checkpoint: its meta.json"):
        find_checkpoint(str(checkpoint), stopped)


def test_average_starts_from_the_weights_of_a_run_that_kept_none(tmp_path: Path) -> None:
    from vit_scale.strategies.ema import Ema

    state = small_state()
    save_at(folder_of(tmp_path), state, 1)
    fresh = small_state()
    with torch.no_grad():
        fresh.model.weight.zero_()  # type: ignore[union-attr,operator]
    fresh.ema = Ema(fresh.shards, 0.9, warmup=True)
    restore(fresh, tmp_path / "checkpoints" / "step-00000001")
    average = fresh.ema.pieces()["weight"].tensor
    torch.testing.assert_close(average, state.model.weight.detach().flatten(), rtol=0, atol=0)  # type: ignore[union-attr,operator]


# ----------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    "change", ["optim.lr=0.1", "run.seed=1", "batch.global=64", "augment.mixup=0.1", "model.depth=1", "data.name=x"]
)
def test_other_options_are_refused_by_name(stopped: Path, change: str) -> None:
    key, value = change.split("=")
    with pytest.raises(UserError, match=rf"other options: {key} = .* there, '?{value}'? here"):
        train(stopped, change)
    assert steps_in(stopped) == [4, 6]


@pytest.mark.parametrize(
    "change",
    ["schedule.steps=9", "run.log_every=7", "run.eval_every=7", "parallel.strategy=ddp", "batch.micro=8", "run.keep=9"],
)
def test_options_that_may_change_are_accepted(stopped: Path, change: str) -> None:
    assert may_change(change.split("=")[0])
    assert differing_options(stopped, load_recipe(RECIPE, [*QUICK, change])) == {}
