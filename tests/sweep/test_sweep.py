"""`launch/sweep.py` end to end; most tests use a stub instead of real training runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from vit_scale.recipe import flatten, load_recipe

STUB = Path(__file__).with_name("stub_training.py")
Done = subprocess.CompletedProcess


class Workplace:
    """A directory with a sweep file `try.yaml`, and the commands run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sweep = folder / "runs/sweeps/try"

    def write(self, **changes: Any) -> None:
        tree = {
            "method": "random",
            "metric": {"name": "val/top1", "goal": "maximize"},
            "parameters": {"optim.lr": {"distribution": "log_uniform_values", "min": 1.0e-5, "max": 0.1}},
            "command": ["${env}", "${interpreter}", str(STUB), "recipes/digits.yaml", "${args}"],
        }
        given = {key: value for key, value in (tree | changes).items() if value is not None}
        (self.folder / "try.yaml").write_text(yaml.safe_dump(given))

    def command(self, *args: object) -> list[str]:
        return [sys.executable, "launch/sweep.py", "try.yaml", *map(str, args)]

    def run(self, *args: object, timeout: float = 300, **env: str) -> Done:
        return subprocess.run(
            self.command(*args),
            cwd=self.folder,
            env=os.environ | env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def trials(self) -> list[str]:
        return sorted(path.name for path in self.sweep.glob("trial-*"))

    def metrics(self, trial: str) -> list[dict[str, float]]:
        path = self.sweep / trial / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def learning_rate(self, trial: str) -> float:
        return float(json.loads((self.sweep / trial / "config.yaml").read_text())["optim.lr"])

    def interrupt(self, when: Callable[[], bool], *args: object, **env: str) -> tuple[int, str, str]:
        """Start the sweep and send Ctrl-C once `when()` is true; returns exit code, stdout and stderr."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(self.command(*args), cwd=self.folder, env=os.environ | env, **pipes)
        try:
            deadline = time.monotonic() + 200
            while not when() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
        return process.returncode, out, err


@pytest.fixture
def place(tmp_path: Path, make_checkout: Callable[[Path], Path]) -> Workplace:
    place = Workplace(make_checkout(tmp_path))
    place.write()
    return place


def assert_user_error(done: Done, message: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3


# --------------------------------------------------------------------------------------------------- real training runs


def test_real_sweep_writes_a_recipe_that_reproduces_the_best_trial(
    place: Workplace, tiny: dict[str, object], root: Path
) -> None:
    command = ["${env}", "${interpreter}", "launch/train.py", "recipes/digits.yaml", "${args}"]
    place.write(command=command, method="grid", parameters={"optim.lr": {"values": [1.0e-5, 1.0e-2]}})
    done = place.run(*(f"{key}={value}" for key, value in tiny.items()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert place.trials() == ["trial-000", "trial-001"]
    ends = {trial: place.metrics(trial)[-1]["val/top1"] for trial in place.trials()}
    winner = max(ends, key=ends.get)  # type: ignore[arg-type]
    best = load_recipe(place.sweep / "best.yaml")
    ran = load_recipe(place.sweep / winner / "config.yaml")
    free = ("run.dir", "track.wandb")
    assert {k: v for k, v in flatten(best).items() if k not in free} == {
        k: v for k, v in flatten(ran).items() if k not in free
    }
    assert ran.track.wandb == "disabled"
    assert "optim.lr" in (place.sweep / "plot.html").read_text()
    printed = subprocess.run(
        [sys.executable, "launch/train.py", str(place.sweep / "best.yaml"), "--print-config"],
        cwd=place.folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert yaml.safe_load(printed.stdout)["optim"]["lr"] == best.optim.lr


def test_ctrl_c_saves_the_trial_and_the_same_command_resumes_it(place: Workplace, tiny: dict[str, object]) -> None:
    place.write(command=["${env}", "${interpreter}", "launch/train.py", "recipes/digits.yaml", "${args}"])
    options = [f"{key}={value}" for key, value in (tiny | {"schedule.epochs": 3, "run.eval_every": 60}).items()]
    status, out, err = place.interrupt(lambda: bool(place.metrics("trial-000")), "--count", 1, *options)
    assert status == 130, out + err
    assert "Rerun the same command to resume." in out
    assert "Traceback" not in err
    stopped = max(line["step"] for line in place.metrics("trial-000"))
    assert list((place.sweep / "trial-000/checkpoints").glob("step-*"))
    again = place.run("--count", 1, *options)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "trial 0 resumes" in again.stdout
    assert "Resuming from" in (place.sweep / "trial-000/output.log").read_text()
    steps = [line["step"] for line in place.metrics("trial-000")]
    assert steps == sorted(steps)
    assert steps[-1] > stopped
    assert place.trials() == ["trial-000"]


# --------------------------------------------------------------------------------------------------------------- search


def test_resumed_bayesian_search_draws_new_values_and_ranks_all(place: Workplace) -> None:
    place.write(method="bayes", run_cap=6)
    first = place.run("--count", 3)
    assert first.returncode == 0, first.stderr
    done = place.run()
    assert done.returncode == 0, done.stderr
    rates = [place.learning_rate(trial) for trial in place.trials()]
    assert len(rates) == len(set(rates)) == 6
    ranks = [line.split()[1:3] for line in done.stdout.splitlines() if re.match(r"\s+\d+\s+\d+\s+0\.\d{4} ", line)]
    values = [float(value) for _, value in ranks]
    assert len(values) == 6
    assert values == sorted(values, reverse=True)
    best = load_recipe(place.sweep / "best.yaml")
    assert best.optim.lr == place.learning_rate(f"trial-{int(ranks[0][0]):03d}")


def test_finished_sweep_only_prints_its_table_again(place: Workplace) -> None:
    first = place.run("--count", 2)
    again = place.run("--count", 2)
    assert again.returncode == 0
    assert "starts" in first.stdout
    assert "starts" not in again.stdout
    assert again.stdout.strip() in first.stdout


def test_hyperband_stops_weak_trials_and_never_ranks_them_best(place: Workplace) -> None:
    early = {"type": "hyperband", "min_iter": 1, "eta": 2}
    rates = [1.0e-3, 1.0e-5, 0.1]
    place.write(method="grid", early_terminate=early, parameters={"optim.lr": {"values": rates}})
    done = place.run(STUB_HANG_AFTER="2")
    assert done.returncode == 0, done.stderr
    assert [len(place.metrics(trial)) for trial in place.trials()] == [4, 2, 2]
    assert done.stdout.count("stopped early") == 4, "one line and one table row per trial"
    assert load_recipe(place.sweep / "best.yaml").optim.lr == 1e-3


def test_target_ends_the_search(place: Workplace) -> None:
    metric = {"name": "val/top1", "goal": "maximize", "target": 0.5}
    place.write(method="grid", metric=metric, parameters={"optim.lr": {"values": [1.0e-3, 2.0e-3, 3.0e-3]}})
    done = place.run()
    assert place.trials() == ["trial-000"]
    assert "Target met: val/top1" in done.stdout


def test_interrupted_grid_resumes_the_same_trial_and_skips_none(place: Workplace) -> None:
    place.write(method="grid", parameters={"optim.lr": {"values": [1.0e-3, 2.0e-3, 3.0e-3]}})
    status, out, _ = place.interrupt(lambda: bool(place.metrics("trial-001")), STUB_HANG_AFTER="1")
    assert status == 130
    assert "Interrupted during trial 1" in out
    again = place.run()
    assert again.returncode == 0, again.stderr
    assert "trial 1 resumes" in again.stdout
    assert [place.learning_rate(trial) for trial in place.trials()] == [1e-3, 2e-3, 3e-3]
    assert all(len(place.metrics(trial)) == 4 for trial in place.trials())


# ------------------------------------------------------------------------------------------------------------- failures


def test_second_sweep_in_a_directory_is_rejected_while_a_trial_runs(place: Workplace) -> None:
    rejected: list[Done] = []

    def second_was_rejected() -> bool:
        if place.metrics("trial-000"):
            rejected.append(place.run("--count", 1))
        return bool(rejected)

    status, _, _ = place.interrupt(second_was_rejected, "--count", 1, STUB_HANG_AFTER="1")
    assert status == 130
    assert_user_error(rejected[0], "trial-000 is in use by process")


def test_failed_trial_is_reported_and_the_sweep_continues(place: Workplace) -> None:
    place.write(method="grid", parameters={"optim.lr": {"values": [1.0e-5, 1.0e-3, 2.0e-3]}})
    done = place.run(STUB_FAIL_BELOW="1e-4")
    assert done.returncode == 0, done.stderr
    assert "trial 0 failed" in done.stdout
    assert "the learning rate is too low (exit code 2)" in done.stdout
    assert "1 failed: trial 0" in done.stdout
    assert load_recipe(place.sweep / "best.yaml").optim.lr == 1e-3
    rerun = place.run()
    assert rerun.returncode == 0
    assert place.learning_rate("trial-003") == 1e-5, "retried after the cause is fixed"


def test_three_consecutive_failures_end_the_sweep(place: Workplace) -> None:
    done = place.run("--count", 9, STUB_FAIL_BELOW="1")
    assert_user_error(done, "3 consecutive trials failed")
    assert "output.log" in done.stderr
    assert len(place.trials()) == 3


def test_failures_at_the_end_do_not_hide_earlier_results(place: Workplace) -> None:
    place.write(method="grid", parameters={"optim.lr": {"values": [1.0e-3, 1.0e-5, 2.0e-5, 3.0e-5, 2.0e-3]}})
    done = place.run(STUB_FAIL_BELOW="1e-4")
    assert_user_error(done, "3 consecutive trials failed")
    assert "3 failed: trial 1, trial 2, trial 3" in done.stdout
    assert load_recipe(place.sweep / "best.yaml").optim.lr == 1e-3


def test_sweep_with_only_failed_trials_fails(place: Workplace) -> None:
    assert_user_error(place.run("--count", 2, STUB_FAIL_BELOW="1"), "no trial has finished")


def test_missing_metric_ends_the_sweep_after_one_trial(place: Workplace) -> None:
    done = place.run("--count", 9, STUB_METRIC="val/top5")
    assert_user_error(done, "never logged val/top1; did you mean val/top5?")
    assert len(place.trials()) == 1


def test_different_sweep_in_the_same_directory_is_rejected(place: Workplace) -> None:
    assert place.run("--count", 1).returncode == 0
    place.write(method="bayes")
    assert_user_error(place.run("--count", 2), "contains a sweep with a different method")
    place.write()
    assert_user_error(place.run("--count", 2, "schedule.epochs=5"), "contains a sweep with a different options")


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"method": "baies"}, [], "must be one of grid, random, bayes; did you mean bayes?"),
        ({"metric": "val/top1"}, [], "metric = 'val/top1': must be a mapping"),
        ({"parametres": {}}, [], "did you mean parameters?"),
        ({"parameters": {"optim.lrr": {"value": 1}}}, [], "optim.lr?"),
        ({"command": ["${env}", str(STUB), "recipes/digit.yaml"]}, [], "Did you mean recipes/digits.yaml"),
        ({"command": ["${env}", str(STUB)]}, [], "command contains no recipe"),
        ({"command": ["${args_yaml}", str(STUB), "recipes/digits.yaml"]}, ["--count", 1], "${args_yaml}"),
        ({"early_terminate": {"type": "envelope"}}, [], "only {type: hyperband, min_iter: N} is supported"),
        ({}, [], "needs a number of trials: set --count N"),
        ({}, ["--count", 0], "--count 0: must be at least 1"),
        ({}, ["optim.lr=1"], "optim.lr is a parameter of try.yaml"),
    ],
)
def test_invalid_input_is_reported_before_anything_is_written(
    place: Workplace,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    arguments: list[object],
    message: str,
) -> None:
    from vit_scale.commands.sweep import main
    from vit_scale.errors import UserError

    place.write(**changes)
    monkeypatch.chdir(place.folder)
    with pytest.raises(UserError) as error:
        main(["try.yaml", *map(str, arguments)])
    assert message in str(error.value)
    assert not (place.folder / "runs").exists()


def test_missing_sweep_file_exits_with_code_2_and_suggests_the_nearest(launch: Callable[..., Done]) -> None:
    assert_user_error(launch("launch/sweep.py", "recipes/sweeps/lrs.yaml"), "Did you mean recipes/sweeps/lr.yaml?")


def test_help_has_examples_and_imports_neither_torch_nor_optuna(launch: Callable[..., Done]) -> None:
    done = launch("launch/sweep.py", "--help")
    assert done.returncode == 0
    assert "python launch/sweep.py recipes/sweeps/lr.yaml --count 8" in done.stdout
    code = "import runpy, sys; sys.argv = ['x', '--help']\n"
    code += "try: runpy.run_path('launch/sweep.py', run_name='__main__')\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'optuna', 'jinja2'} & set(sys.modules)"
    assert launch("-c", code).returncode == 0
