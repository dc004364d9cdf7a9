"""Every recipe has a complete and correct card, can be planned, and trains."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from tests.tasks.distill.students import make_teacher
from vit_scale.plan.machine import find_machine
from vit_scale.plan.run_plan import make_run_plan
from vit_scale.recipe import load_recipe

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted(
    path.relative_to(ROOT).as_posix() for path in (ROOT / "recipes").rglob("*.yaml") if path.parent.name != "sweeps"
)
CARD = ("Source", "Command", "Hardware", "Time", "Expected", "Batch", "Verified")
LINES = range(10, 31)

# A small model on noise; all other options are the recipe's, except weights, which would be downloaded, and ZeRO, which
# requires a separate process (tests/train/test_strategies.py).
TINY = ["model.embed_dim=32", "model.depth=2", "model.num_heads=2", "model.img_size=32", "model.patch_size=8"]
TINY_MAE = [*TINY, "mae.decoder_dim=32", "mae.decoder_depth=1", "mae.decoder_heads=2"]
TINY_TIMM = ["model.name=timm/test_resnet", "model.img_size=32"]
QUICK = [
    "model.weights=null",
    "data.source=synthetic",
    "data.synthetic_images=64",
    "data.synthetic_classes=10",
    "data.synthetic_size=40",
    "data.workers=0",
    "schedule.steps=2",
    "batch.global=8",
    "batch.micro=4",
    "parallel.strategy=ddp",
    "run.eval_every=auto",
    "track.wandb=disabled",
]


def card(recipe: str) -> dict[str, str]:
    """Return the entries of the comment at the top; continuation lines are joined."""
    entries: dict[str, str] = {}
    for line in (ROOT / recipe).read_text().splitlines():
        if not line.startswith("#"):
            break
        if match := re.match(r"# (\w[\w ]*):\s+(.*)", line):
            key, text = match.groups()
            entries[key] = text
        elif line.startswith("#    ") and entries:
            entries[key] += " " + line.removeprefix("#").strip()
    return entries


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that recipes with a teacher learn from: ten classes, images in color."""
    return make_teacher(tmp_path_factory.mktemp("teacher"), in_chans=3)


def taught_by(teacher: Path, recipe: str, *, weights: bool) -> list[str]:
    """Return options that replace the teacher of a recipe, if it has one that is not here (`weights`: downloaded)."""
    own = load_recipe(recipe).distill.teacher
    is_here = own is None or (own.startswith("timm/") and not weights)
    return [] if is_here else [f"distill.teacher={teacher}"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_card_is_complete(recipe: str) -> None:
    entries = card(recipe)
    assert [key for key in CARD if entries.get(key)] == list(CARD)
    assert recipe in entries["Command"]
    assert re.match(r"(yes|no)\b", entries["Verified"])
    assert len((ROOT / recipe).read_text().splitlines()) in LINES


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_can_be_planned_and_matches_its_card(
    recipe: str, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    entries = card(recipe)
    hardware = re.fullmatch(r"(\d+) x (.+)", entries["Hardware"])
    machine = find_machine(int(hardware[1]), hardware[2]) if hardware else find_machine(1, "T4")
    run = make_run_plan(load_recipe(recipe, taught_by(teacher, recipe, weights=False)), recipe, machine)
    assert run.chosen.fits
    assert run.timm.equal or "no timm counterpart" in run.timm.summary()
    assert entries["Batch"].startswith(f"{run.plan.global_batch:,} = ")
    if hardware:
        number, unit = re.match(r"([\d.]+) (hours|minutes), estimated by --dry-run", entries["Time"]).groups()
        seconds = float(number) * {"hours": 3600, "minutes": 60}[unit]
        assert seconds == pytest.approx(run.cost.seconds, rel=0.1, abs=30)
        assert f"--gpus {machine.devices} --gpu {machine.kind}" in entries["Time"]
        assert f"MFU of {run.cost.mfu:.2f}" in entries["Time"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_takes_two_steps(
    recipe: str, teacher: Path, tmp_path: Path, fresh_accelerate: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vit_scale.train.run_recipe import run_recipe

    monkeypatch.chdir(ROOT)
    config = load_recipe(recipe)
    is_timm = config.model.name.startswith("timm/")
    tiny = TINY_TIMM if is_timm else TINY_MAE if config.task.name == "mae" else TINY
    folder = tmp_path / "run"
    config = load_recipe(recipe, [*tiny, *QUICK, *taught_by(teacher, recipe, weights=True), f"run.dir={folder}"])
    assert run_recipe(config, recipe) == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses)
    assert json.loads((folder / "summary.json").read_text())["step"] == 2
    assert (folder / "model_ema.safetensors").exists() == (config.ema.decay > 0)


def test_second_stage_starts_from_the_first_at_a_larger_size(
    tmp_path: Path, fresh_accelerate: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vit_scale.train.run_recipe import run_recipe

    monkeypatch.chdir(ROOT)
    first, second = tmp_path / "first", tmp_path / "second"
    small = [*TINY, *QUICK, "model.img_size=24", f"run.dir={first}"]
    assert run_recipe(load_recipe("recipes/vit_base.yaml", small), "recipes/vit_base.yaml") == 0
    large = [*TINY, *QUICK, f"model.weights={first}", f"run.dir={second}"]
    capsys.readouterr()
    assert run_recipe(load_recipe("recipes/vit_base_tune.yaml", large), "recipes/vit_base_tune.yaml") == 0
    output = capsys.readouterr().out
    assert "resized: pos_embed" in output
    assert "left as initialized" not in output
