"""Checkpoints of earlier versions are still read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vit_scale.checkpoints.checked_files import checksum
from vit_scale.checkpoints.find import checkpoint_error, latest_valid_checkpoint, read_meta
from vit_scale.checkpoints.reader import Checkpoint
from vit_scale.checkpoints.writer import CheckpointFolder
from vit_scale.strategies.ema import Ema
from vit_scale.strategies.replicated import PlainEngine
from vit_scale.train.state import TrainState

OLD_NAMES = {"best": "best_top1", "skipped_steps": "bad_steps", "consecutive_skipped_steps": "bad_in_a_row"}


def new_state(seed: int) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    engine = PlainEngine(model, torch.optim.AdamW(model.parameters()))
    return TrainState(engine, Ema(engine.shards, 0.9, warmup=True))


def train(state: TrainState, steps: int) -> None:
    for _ in range(steps):
        torch.manual_seed(state.step)
        state.engine(torch.randn(4, 3)).square().sum().backward()
        state.count_skipped(state.engine.step(clip_norm=1.0))
        assert state.ema is not None
        state.ema.update(state.step)
        state.step += 1


def write_old_layout(run_dir: Path, state: TrainState, **changes: Any) -> Path:
    """Save `state` with the keys that meta.json had before `best`."""
    folder = CheckpointFolder(run_dir, keep=1, rank=0, world=1, session="now")
    folder.save(state, {"plan": {"processes": 1, "micro_batch": 4}})
    folder.close()
    checkpoint = run_dir / "checkpoints" / f"step-{state.step:08d}"
    meta = json.loads((checkpoint / "meta.json").read_text())
    write_meta(checkpoint, {OLD_NAMES.get(key, key): value for key, value in meta.items()} | changes)
    return checkpoint


def write_meta(checkpoint: Path, meta: dict[str, Any]) -> None:
    """Replace meta.json and its manifest entry."""
    path, manifest = checkpoint / "meta.json", json.loads((checkpoint / "manifest.json").read_text())
    path.write_text(json.dumps(meta))
    manifest["files"]["meta.json"] = {"bytes": path.stat().st_size, "crc32": checksum(path)}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def test_resume_from_the_old_layout_is_bit_identical(tmp_path: Path) -> None:
    state, resumed = new_state(0), new_state(1)
    train(state, steps=3)
    state.skipped_steps.fill_(2)
    checkpoint = write_old_layout(tmp_path, state, best_top1=0.75)
    assert latest_valid_checkpoint(tmp_path) == (checkpoint, [])
    resumed.restore(Checkpoint(checkpoint))
    assert (resumed.step, resumed.best, resumed.skipped_steps.item()) == (3, 0.75, 2)
    for each in (state, resumed):
        train(each, steps=2)
    torch.testing.assert_close(dict(resumed.model.state_dict()), dict(state.model.state_dict()), rtol=0, atol=0)
    assert resumed.ema is not None
    assert state.ema is not None
    for name, piece in state.ema.pieces().items():
        torch.testing.assert_close(resumed.ema.pieces()[name].tensor, piece.tensor, rtol=0, atol=0)


@pytest.mark.parametrize(("old", "best"), [(-1.0, None), (0.0, 0.0), (0.5, 0.5)])
def test_best_of_a_run_that_was_not_evaluated_is_none(tmp_path: Path, old: float, best: float | None) -> None:
    checkpoint = write_old_layout(tmp_path, new_state(0), best_top1=old)
    assert read_meta(checkpoint)["best"] == best


def test_meta_without_a_required_key_is_invalid(tmp_path: Path) -> None:
    checkpoint = write_old_layout(tmp_path, new_state(0))
    assert checkpoint_error(checkpoint) is None
    meta = json.loads((checkpoint / "meta.json").read_text())
    del meta["plan"]
    write_meta(checkpoint, meta)
    assert checkpoint_error(checkpoint) == "its meta.json does not describe a checkpoint"
