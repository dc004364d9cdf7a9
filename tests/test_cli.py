"""The `vit-scale` command: one subcommand per script in launch/, with no heavy imports before dispatch."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vit_scale.cli import COMMANDS, command_line, dispatch, main
from vit_scale.errors import UserError

Launch = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(autouse=True)
def _keep_argv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["vit-scale"])


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]], ids=str)
def test_help_has_a_line_for_each_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, command in COMMANDS.items():
        assert sum(line.split() == [name, *command.summary.split()] for line in lines) == 1


def test_contract_commands_exist() -> None:
    assert {"init", "train", "eval", "predict", "export", "report", "sweep", "plan", "show"} <= COMMANDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_command_and_launch_script_call_the_same_function(name: str, root: Path) -> None:
    module = COMMANDS[name].module
    assert callable(importlib.import_module(module).main)
    script = root / "launch" / f"{module.split('.')[-1]}.py"
    assert f"from {module} import main" in script.read_text()


@pytest.mark.parametrize("name", COMMANDS)
def test_usage_starts_with_the_typed_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        dispatch([name, "--help"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: vit-scale {name} ")


@pytest.mark.parametrize("script", ["init", "eval", "predict", "export", "report", "train", "show_batch"])
def test_launch_script_usage_starts_with_its_name(script: str, launch: Launch) -> None:
    done = launch(f"launch/{script}.py", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: {script}.py ")


@pytest.mark.parametrize(
    "argv", [["--help"], ["init", "--help"], ["eval", "--help"], ["predict", "--help"], ["export", "--help"]], ids=str
)
def test_help_imports_nothing_heavy(argv: list[str], launch: Launch) -> None:
    done = launch("-Ximporttime", "-m", "vit_scale", *argv)
    assert done.returncode == 0
    assert "vit_scale.cli" in done.stderr
    assert not re.search(r"\|\s+(torch|timm|numpy|accelerate)$", done.stderr, flags=re.MULTILINE)


def test_unknown_command_error_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match="trian: unknown command; did you mean train"):
        dispatch(["trian"])
    with pytest.raises(UserError, match="available: init, train, plan"):
        dispatch(["xyzzy"])


def test_printed_commands_work_in_the_working_directory(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = ("accelerate", "launch")
    monkeypatch.chdir(root)
    assert command_line("show", "runs/my cat") == "python launch/show_run.py 'runs/my cat'"
    assert command_line("train", "a.yaml", launcher=launcher) == "accelerate launch launch/train.py a.yaml"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    assert command_line("show", "runs/a") == "vit-scale show runs/a"
    assert command_line("train", "a.yaml", launcher=launcher) == "accelerate launch -m vit_scale train a.yaml"
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert command_line("show", "runs/a") == "python -m vit_scale show runs/a"


def test_plan_is_a_dry_run(capsys: pytest.CaptureFixture[str], root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert dispatch(["plan", str(root / "recipes/digits.yaml"), f"run.dir={folder}"]) == 0
    assert "nothing is trained or written" in capsys.readouterr().out
    assert not folder.exists()


def test_user_error_exits_with_code_2_and_version_is_the_package_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import vit_scale

    monkeypatch.setattr(sys, "argv", ["vit-scale", "eval", "no/such/run"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "error: no/such/run: " in capsys.readouterr().err
    assert dispatch(["--version"]) == 0
    assert capsys.readouterr().out == f"vit_scale {vit_scale.__version__}\n"


def test_setup_installs_the_command(root: Path) -> None:
    assert '"vit-scale = vit_scale.cli:main"' in (root / "setup.py").read_text()
