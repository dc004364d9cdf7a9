"""The table of checks, choosing from it, and the arguments of the command."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

from vit_scale.commands.doctor import main, parse
from vit_scale.cost.strategy_names import STRATEGIES
from vit_scale.doctor.check import GROUPS
from vit_scale.doctor.isolation import Probe
from vit_scale.doctor.run import all_probes, check_names, select
from vit_scale.errors import UserError


def names(probes: list[Probe]) -> list[str]:
    return [probe.name for probe in probes]


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_every_check_exists_takes_its_arguments_and_has_advice(gpus: int) -> None:
    for probe in all_probes(gpus):
        module, function = probe.function.split(":")
        found = getattr(importlib.import_module(module), function)
        inspect.signature(found).bind(None, **probe.arguments)
        assert probe.group in GROUPS
        assert probe.advice
    assert len(set(names(all_probes(gpus)))) == len(all_probes(gpus))


def test_every_file_of_checks_has_a_group_and_tests(root: Path) -> None:
    files = {path.stem for path in (root / "vit_scale/doctor/checks").glob("*.py")} - {"__init__"}
    used = {probe.function.split(":")[0].rpartition(".")[2] for probe in all_probes(0)}
    assert files == used
    assert {probe.group for probe in all_probes(0)} == GROUPS.keys()
    assert {path.stem for path in (root / "tests/doctor/checks").glob("*.py")} == {f"test_{file}" for file in files}


def test_every_strategy_is_trained_in_every_precision_of_the_machine() -> None:
    on_cpu = names(all_probes(0))
    for strategy in STRATEGIES:
        assert f"train {strategy} fp32" in on_cpu
        assert f"train {strategy} bf16" in on_cpu
        assert f"train {strategy} fp16" in names(all_probes(8))
    assert "train single fp32" in names(all_probes(1)), "the GPU is compared with the CPU"
    assert "train single fp32" not in on_cpu, "it is the reference"


def test_quick_trains_fp32_only() -> None:
    trained = [probe.name for probe in all_probes(0, quick=True) if probe.group == "training"]
    assert trained == ["train CPU fp32", "train ddp fp32"]


def test_processes_are_started_twice_only() -> None:
    kinds = [probe.processes == "all" for probe in all_probes(0)]
    assert sum(a != b for a, b in zip(kinds, kinds[1:], strict=False)) == 1


def test_groups_and_names_choose_checks() -> None:
    probes = all_probes(0)
    assert select(probes, []) == probes
    assert names(select(probes, ["disk", "bf16"])) == [
        *("bf16", "checkpoint disk", "free disk", "run lock", "shared memory")
    ]
    assert names(select(probes, ["train zero2 bf16"])) == ["train CPU fp32", "train zero2 bf16"], "with its reference"


def test_unknown_check_is_rejected_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match="--only comunication: unknown check; did you mean communication"):
        check_names(["comunication"])
    with pytest.raises(UserError, match="groups: versions, devices"):
        main(["--only", "xyzzy"])
    check_names(["train single fp16"])  # on a machine with GPUs
    with pytest.raises(UserError, match="not checked on this machine"):
        select(all_probes(0), ["train single fp16"])


def test_invalid_arguments_are_rejected_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="no such directory"):
        main(["--dir", str(tmp_path / "none")])
    with pytest.raises(UserError, match="does not exist"):
        main(["--json", str(tmp_path / "none" / "report.json")])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="without a launcher"):
        main([])


def test_help_lists_the_groups_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = capsys.readouterr().out
    assert all(f"  {name}" in text for name in GROUPS)
    assert "exit code: 0 if training can be trusted" in text
