"""Short runs give the losses that were recorded before: bit for bit on the machine that recorded them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_record", HERE / "record.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


record = load_script()
GOLDEN = json.loads((HERE / "losses.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    return record.train_all(tmp_path_factory.mktemp("golden"))


def test_every_case_is_recorded() -> None:
    assert set(GOLDEN["runs"]) == {f"{case}/{strategy}" for case in record.CASES for strategy in record.STRATEGIES}


@pytest.mark.parametrize("name", GOLDEN["runs"])
def test_losses_are_unchanged(runs: dict[str, dict], name: str) -> None:
    golden, found = GOLDEN["runs"][name], runs[name]
    if GOLDEN["machine"] == record.this_machine():
        assert found == golden
    for key in record.KEYS:
        assert found[key] == pytest.approx(golden[key], rel=1e-6, abs=1e-6), key
