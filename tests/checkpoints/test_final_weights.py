"""Final weights: if memory runs out on one rank, no other rank waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from vit_scale.checkpoints import host_copies
from vit_scale.checkpoints.final_weights import write_final_weights
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
