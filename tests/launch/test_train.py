"""`launch/train.py` end to end: help, invalid input, a first run, Ctrl-C and resuming."""

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

import pytest
import yaml

Launch = Callable[..., subprocess.CompletedProcess]
SCRIPT = "launch/train.py"
QUICK = ["track.wandb=disabled", "data.workers=0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipes/digits.yaml", "optim.lrr=1"], "optim.lr?"),
        (["recipes/digits.yaml", "schedule.steps=5", "schedule.epochs=2"], "are both set"),
        (["recipes/nothing.yaml"], "recipe not found"),
        ([], "no recipe given"),
        (["optim.lr=1"], "the recipe must come first"),
    ],
)
def test_invalid_input_exits_with_code_2_without_traceback(launch: Launch, arguments: list[str], message: str) -> None:
    done = launch(SCRIPT, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["optim.name=adamww"], "adamw"),
        (["optim.name=lamb", "parallel.strategy=zero1"], "needs whole layers"),
        (["data.source=no/such/folder"], "data.source"),
        (["run.resume=no/such/checkpoint"], "no/such/checkpoint"),
        (["model.num_classes=3"], "the data has 10 classes"),
        (["model.weights=no/such/file.safetensors"], "model.weights"),
        (["augment.rand_augment=rand-x9"], "augment.rand_augment"),
        (["model.kernel=cudnn"], "model.kernel"),
        (["parallel.precision=fp16"], "parallel.precision"),
    ],
)
def test_invalid_input_found_later_still_writes_nothing(
    root: Path, tmp_path: Path, fresh_accelerate: None, options: list[str], message: str
) -> None:
    from vit_scale.errors import UserError
    from vit_scale.recipe import load_recipe
    from vit_scale.train.run_recipe import run_recipe

    recipe = str(root / "recipes/debug.yaml")
    config = load_recipe(recipe, [*QUICK, f"run.dir={tmp_path / 'run'}", *options])
    with pytest.raises(UserError, match=re.escape(message)):
        run_recipe(config, recipe)
    assert not (tmp_path / "run").exists()


def test_help_lists_every_option_without_torch(launch: Launch) -> None:
    from vit_scale.recipe import all_options

    done = launch(SCRIPT, "--help")
    assert done.returncode == 0
    assert all(f"{key}=" in done.stdout for key in all_options())
    code = f"import sys; sys.argv = ['x', '--help']; import runpy\ntry: runpy.run_path({SCRIPT!r}, run_name='__main__')"
    code += "\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    assert launch("-c", code).returncode == 0


def test_print_config_prints_the_merged_recipe_and_stops(launch: Launch, tmp_path: Path) -> None:
    done = launch(SCRIPT, "recipes/digits.yaml", "--print-config", "--optim.lr=1e-4", f"run.dir={tmp_path}/run")
    assert done.returncode == 0
    printed = yaml.safe_load(done.stdout)
    assert printed["optim"]["lr"] == 1e-4
    assert printed["data"]["source"] == "embedded:digits"
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def digits(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A complete first run with W&B offline."""
    folder = tmp_path_factory.mktemp("digits") / "run"
    command = [sys.executable, SCRIPT, "recipes/digits.yaml", f"run.dir={folder}", "track.wandb=offline"]
    environment = dict(os.environ)
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stderr == "", "no warnings"
    return folder, done.stdout


def test_digits_reaches_97_percent(digits: tuple[Path, str]) -> None:
    summary = json.loads((digits[0] / "summary.json").read_text())
    assert summary["finished"]
    assert summary["val/top1"] >= 0.97
    assert summary["best/val/top1"] >= summary["val/top1"]


def test_run_directory_has_the_contract_files_and_metrics(digits: tuple[Path, str]) -> None:
    folder = digits[0]
    for name in ("config.yaml", "summary.json", "metrics.jsonl", "model.safetensors", "model_ema.safetensors"):
        assert (folder / name).stat().st_size > 0
    assert list((folder / "checkpoints").glob("step-*/manifest.json"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    keys = {key for line in lines for key in line}
    expected = [
        "step",
        "epoch",
        "train/loss",
        "train/lr",
        "train/grad_norm",
        "speed/images_per_second",
        "speed/mfu",
        "speed/data_wait",
        "val/loss",
        "val/top1",
        "val/top5",
        "val_ema/loss",
        "val_ema/top1",
        "val_ema/top5",
    ]
    assert set(expected) <= keys
    summary = json.loads((folder / "summary.json").read_text())
    assert set(expected) | {"versions", "git_commit", "wandb_id", "best/val/top1"} <= set(summary)
    assert list(folder.glob("wandb/offline-run-*/*.wandb"))


def test_final_weights_load_into_timm(digits: tuple[Path, str]) -> None:
    from safetensors.torch import load_file
    from timm.models.vision_transformer import VisionTransformer

    options = yaml.safe_load((digits[0] / "config.yaml").read_text())["model"]
    reference = VisionTransformer(
        img_size=options["img_size"],
        patch_size=options["patch_size"],
        in_chans=1,
        num_classes=10,
        embed_dim=options["embed_dim"],
        depth=options["depth"],
        num_heads=options["num_heads"],
        global_pool="avg",
    )
    for name in ("model", "model_ema"):
        loaded = reference.load_state_dict(load_file(digits[0] / f"{name}.safetensors"))
        assert (loaded.missing_keys, loaded.unexpected_keys) == ([], [])


def test_output_describes_the_run_and_next_steps(digits: tuple[Path, str]) -> None:
    output = digits[1]
    for part in (
        "parameters",
        "MMACs",
        "training images, ",
        "split       20% of each class of train held out for validation",
        "classes     ",
        "accumulation step",
        "epochs",
        "fp32",
        "single process",
        "timm",
    ):
        assert part in output, part
    assert "top-1" in output.split("Finished")[1]
    assert "wandb sync" in output.split("Next")[1]
    assert all(len(line) <= 160 for line in output.splitlines())
    assert "\x1b" not in output, "no terminal codes in a log file"


def test_run_stopped_by_ctrl_c_resumes_with_the_same_command(root: Path, launch: Launch, tmp_path: Path) -> None:
    arguments = ["recipes/debug.yaml", f"run.dir={tmp_path}/run", *QUICK, "schedule.steps=400", "run.eval_every=400"]
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *arguments], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "Rerun the same command to resume." in out
    stopped = int(re.search(r"after step ([\d,]+)", out).group(1).replace(",", ""))
    again = launch(SCRIPT, *arguments, f"schedule.steps={stopped + 3}", "run.eval_every=100000")
    assert again.returncode == 0, again.stderr
    assert re.search(rf"step {stopped:,}( of |/){stopped + 3:,}", again.stdout)
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == sorted(steps)


def test_finished_run_is_left_untouched(launch: Launch, digits: tuple[Path, str]) -> None:
    before = (digits[0] / "summary.json").read_text()
    again = launch(SCRIPT, "recipes/digits.yaml", f"run.dir={digits[0]}", "track.wandb=offline")
    assert again.returncode == 0
    assert "is finished (step" in again.stdout
    assert (digits[0] / "summary.json").read_text() == before


def test_different_options_in_the_same_directory_are_rejected_by_name(launch: Launch, digits: tuple[Path, str]) -> None:
    again = launch(SCRIPT, "recipes/digits.yaml", f"run.dir={digits[0]}", "optim.lr=1e-4")
    assert again.returncode == 2
    assert "optim.lr" in again.stderr
    assert "0.0001" in again.stderr
