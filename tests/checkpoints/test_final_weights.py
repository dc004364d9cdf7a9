"""Final weights: if memory runs out on one rank, no other rank waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from vit_scale.checkpoints import host_copies
from vit_scale.checkpoints.final_weights import rename_final_weights, write_final_weights
from vit_scale.checkpoints.run_weights import find_run_weights
from vit_scale.errors import UserError


class Recorded:
    """A snapshot of two tensors that records which iterators were exhausted."""

    def __init__(self) -> None:
        self.exhausted: list[str] = []

    def _tensors(self, kind: str, value: float) -> Iterator[tuple[str, torch.Tensor | None]]:
        yield "a", torch.full((2,), value)
        yield "b", torch.full((3,), value)
        self.exhausted.append(kind)

    def whole(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        return self._tensors("raw", 1.0)

    def whole_ema(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        return self._tensors("ema", 2.0)


def test_both_files_are_written(tmp_path: Path) -> None:
    raw, ema = write_final_weights(Recorded(), tmp_path, is_main=True)  # type: ignore[arg-type]
    assert load_file(raw)["a"].tolist() == [1.0, 1.0]
    assert load_file(ema)["b"].tolist() == [2.0, 2.0, 2.0]


class Composite(Recorded):
    """A snapshot of a backbone and a decoder, of which the EMA averages a part."""

    def whole(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        yield from (("backbone.head", torch.ones(2)), ("backbone.blocks", torch.ones(2)), ("head", torch.ones(3)))

    def whole_ema(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        yield from (("backbone.head", torch.zeros(2)), ("head", torch.zeros(3)))


def test_layers_added_to_a_backbone_have_files_of_their_own(tmp_path: Path) -> None:
    snapshot = Composite()
    paths = write_final_weights(snapshot, tmp_path, is_main=True)  # type: ignore[arg-type]
    assert [path.stem for path in paths] == ["model", "rest", "model_ema", "rest_ema"]
    assert {path.stem: sorted(load_file(path)) for path in paths} == {
        "model": ["blocks", "head"],
        "rest": ["head"],
        "model_ema": ["blocks", "head"],
        "rest_ema": ["head"],
    }
    for kind, expected in (("raw", snapshot.whole()), ("ema", snapshot.whole())):
        read = find_run_weights(tmp_path, kind).read()  # type: ignore[arg-type]
        assert read.keys() == dict(expected).keys()
    assert read["head"].tolist() == [0, 0, 0]
    rename_final_weights(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"unused-{path.name}" for path in paths}


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_all_tensors_are_collected_before_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    calls = SimpleNamespace(count=0)

    def allocate(tensor: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
        calls.count += 1
        if calls.count > failing:
            raise MemoryError("no memory left")
        return torch.empty_like(tensor)

    monkeypatch.setattr(host_copies, "_buffer_for", allocate)
    snapshot = Recorded()
    with pytest.raises(UserError, match=r"not enough host memory .*no memory left.*\nTraining is complete\."):
        write_final_weights(snapshot, tmp_path, is_main=True)  # type: ignore[arg-type]
    assert snapshot.exhausted == ["raw", "ema"]
    assert list(tmp_path.iterdir()) == []
