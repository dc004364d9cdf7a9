"""Output and errors of `launch/train.py RECIPE --dry-run`."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from vit_scale.commands.train import main
from vit_scale.errors import UserError

Launch = Callable[..., subprocess.CompletedProcess]
LARGE = "recipes/vit_large.yaml"


@pytest.fixture(autouse=True)
def at_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it


def test_complete_plan_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([LARGE, "--dry-run", "--gpus", "64", "--gpu", "H100"]) == 0
    output = capsys.readouterr().out
    for text in (
        "on 64 x H100 (dry run: nothing is trained or written)",
        "304,375,784 parameters, 61.55 GMACs",
        "match timm's VisionTransformer",
        "1,281,167 training images, 50,000 validation images, 1,000 classes; from the dataset card",
        "4,096 (64 processes x 1 accumulation step x 64 images)",
        "62,557 steps (200 epochs), 6,256 warmup steps",
        "peak 1.60e-03",
        "> ZeRO-2  13.3 GiB",
        "2 (N-1)/N 4P: 1 all-reduce",
        "0.40 (assumed for a large model on H100 and later",
        "58.4 GPU-hours",
        "stage 2, micro-batch 64, accumulation steps 1",
    ):
        assert text in output
    assert max(map(len, output.splitlines())) <= 130
    assert len(output.splitlines()) < 45


def test_plan_says_what_a_kind_of_attention_saves(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["model.attention=window", "model.window=2"]
    assert main([LARGE, "--dry-run", "--gpus", "64", "--gpu", "H100", *options]) == 0
    output = capsys.readouterr().out
    assert re.search(r"attention +window at 197 tokens: \S+ GMACs per image vs. 61.55 with full attention", output)
    assert "no timm counterpart: timm's VisionTransformer does not support model.attention = 'window'" in output


def test_output_in_the_docs_matches_the_printed_plan(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = re.findall(r"```text\n(.*?)```", (root / "docs" / "scaling.md").read_text(), flags=re.DOTALL)
    assert main([LARGE, "--dry-run", "--gpus", "64", "--gpu", "H100"]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    missing = [line for line in shown.splitlines() if line not in printed and "─" not in line]
    assert not missing


def test_json_has_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([LARGE, "--dry-run", "--gpus", "1024", "--gpu", "A100", "--mfu", "0.5", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (
        plan["machine"]["devices"] * plan["batch"]["accumulation"] * plan["batch"]["micro"] == plan["batch"]["global"]
    )
    assert plan["cost"]["mfu"] == 0.5
    assert plan["cost"]["seconds"] == pytest.approx(plan["cost"]["flops"] / (1024 * 312e12 * 0.5))
    ddp = plan["strategies"]["ddp"]
    assert ddp["memory_bytes_peak"] == sum(ddp["memory_bytes"].values()) - ddp["memory_bytes_overlap"]
    assert plan["deepspeed"]["zero_optimization"]["stage"] == 2


def test_missing_data_and_weights_are_not_needed_and_nothing_is_written(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The data and the weights named by the recipe do not exist."""
    monkeypatch.chdir(tmp_path)
    recipe = str(root / "recipes" / "imagenet" / "finetune_21k_to_1k.yaml")
    assert main([recipe, "--dry-run", "model.weights=no/such/file", "data.source=no/such/data"]) == 0
    assert "no/such/file (not read in a dry run)" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "H1O0"], "did you mean 'H100'?"),
        (["--gpus", "0"], "--gpus 0: must be at least 1"),
        (["--gpus", "some"], "--gpus"),
        (["--mfu", "40"], "--mfu 40: must be greater than 0 and at most 1"),
        (["--images", "0"], "--images 0: must be at least 1"),
        (["--gpus", "48"], "not divisible by 48 processes"),
        (["data.source=no/such/data"], "--images N"),
        (["data.source=recipes"], "no images"),
        (["--gpu-memory", "48"], "--gpu-tflops is missing"),
        (["--gpu", "W7900", "--gpu-tflops", "122"], "--gpu-memory is missing"),
        (["--gpu-memory", "48", "--gpu-tflops", "0"], "--gpu-tflops 0: must be greater than 0"),
        (["optim.name=lamb"], "optim.name = 'lamb'"),
        (["parallel.strategy=ddp", "parallel.offload=optimizer"], "parallel.offload"),
    ],
)
def test_invalid_input_is_reported_in_three_lines(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        main([LARGE, "--dry-run", *arguments])
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) <= 3


@pytest.mark.parametrize(
    "flag", [["--gpus", "8"], ["--gpu", "H100"], ["--mfu", "0.4"], ["--json"], ["--gpu-memory", "48"]]
)
def test_planning_flag_without_dry_run_is_rejected(flag: list[str]) -> None:
    with pytest.raises(UserError, match=f"{flag[0]} requires --dry-run"):
        main([LARGE, *flag])


def test_gpu_that_is_not_in_the_table_is_described_by_memory_and_speed(capsys: pytest.CaptureFixture[str]) -> None:
    described = ["--gpu", "W7900", "--gpu-memory", "48", "--gpu-tflops", "122"]
    assert main([LARGE, "--dry-run", "--gpus", "8", *described, "--json"]) == 0
    machine = json.loads(capsys.readouterr().out)["machine"]
    assert (machine["kind"], machine["devices"], machine["memory"]) == ("W7900", 8, 48 * 10**9)
    assert (machine["peak_flops"], machine["half"]) == (122e12, "bf16")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """20 images in two classes."""
    for number in range(20):
        path = tmp_path / "photos" / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40), (12 * number, 0, 0)).save(path)
    return tmp_path / "photos"


def test_local_images_are_counted(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [f"data.source={photos}", "data.val_fraction=0.2", "batch.global=16"]
    assert main([LARGE, "--dry-run", *options, "--gpu", "H100"]) == 0
    output = capsys.readouterr().out
    assert "16 training images, 4 validation images, 2 classes, about " in output
    assert "; counted)" in output
    assert "200 steps (200 epochs)" in output


@pytest.mark.parametrize("kind", ["save_to_disk", "parquet"])
def test_local_tables_are_counted(kind: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import datasets

    table = datasets.load_dataset("imagefolder", data_dir=str(photos), split="train")
    folder = tmp_path / "table"
    if kind == "parquet":
        folder.mkdir()
        table.to_parquet(folder / "train.parquet")
    else:
        table.save_to_disk(folder)
    assert main([LARGE, "--dry-run", f"data.source={folder}", "batch.global=6", "--gpu", "H100", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["data"]
    assert (data["images"], data["val_images"], data["classes"], data["found"]) == (18, 2, 2, "counted")


def test_terminal_without_block_characters_gets_ascii(launch: Launch) -> None:
    done = launch("launch/train.py", "recipes/digits.yaml", "--dry-run", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "#####" in done.stdout
    assert done.stdout.isascii()
