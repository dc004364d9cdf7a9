"""Output and errors of launch/report.py."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from vit_scale.errors import UserError
from vit_scale.models.variants import VARIANTS

RECIPE = """
model: {name: vit_mu, drop_path: 0.4, patch_dropout: 0.5}
schedule: {steps: 10}
batch: {global: 64, micro: 16}
parallel: {precision: fp32, activation_checkpointing: full}
"""


@pytest.fixture
def report(root: Path) -> ModuleType:
    """The script as a module, to call its main() in this process."""
    spec = importlib.util.spec_from_file_location("launch_report", root / "launch" / "report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def as_json(report: ModuleType, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[dict]]:
    """The report as data."""

    def run(*args: str) -> list[dict]:
        assert report.main([*args, "--format", "json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_help_shows_examples_and_does_not_import_torch(launch: Callable) -> None:
    done = launch("-Ximporttime", "launch/report.py", "--help")
    assert done.returncode == 0
    assert "examples:" in done.stdout
    assert "vit_scale" in done.stderr
    assert not re.search(r"\|\s+torch\b", done.stderr)


def test_every_variant_is_reported_by_default(as_json: Callable) -> None:
    rows = as_json()
    assert [row["model"] for row in rows] == list(VARIANTS)
    assert all(row["params"] == sum(row["params_by_part"].values()) for row in rows)
    assert all(row["macs_torchvision"] == sum(row["macs_by_part"].values()) for row in rows)


def test_exact_numbers_of_a_known_model(as_json: Callable) -> None:
    (row,) = as_json("vit_base_patch16_224")
    assert row["params"] == 86_567_656
    assert row["macs_torchvision"] == 17_563_828_224
    assert row["macs_timm_csv"] == row["macs_torchvision"] + 5 * 25 * 197 * 768
    assert row["flops_torch"] == 2 * row["macs_torchvision"]


def test_options_change_the_model(as_json: Callable) -> None:
    (row,) = as_json("vit_base_patch16_224", "--image-size", "384x192", "--patch-size", "32", "--classes", "10")
    assert row["image_size"] == [384, 192]
    assert row["patch_size"] == [32, 32]
    assert row["params_by_part"]["head"] == 7690
    assert row["params_by_part"]["position"] == (12 * 6 + 1) * 768


def test_recipe_determines_flops_and_memory(as_json: Callable, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    (recipe,) = as_json(str(path))
    (name,) = as_json("vit_mu", "--precision", "fp32")
    assert recipe["recipe"] == str(path)
    assert recipe["assumed"]["batch"] == 16
    assert recipe["train_flops_per_image_actual"] < name["train_flops_per_image_actual"]
    assert recipe["activation_bytes_per_image"] < name["activation_bytes_per_image"]
    memory = recipe["memory_bytes_per_gpu"]["ddp"]
    assert memory["activations"] == 16 * recipe["activation_bytes_per_image"]
    assert memory["ema"] == 0 < name["memory_bytes_per_gpu"]["ddp"]["ema"]


def test_what_a_kind_of_attention_saves_is_one_line(
    report: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert report.main(["vit_mu", "model.attention=linear"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("attention: ")]
    assert line.startswith("attention: linear at 17 tokens: ")
    assert "(saves nothing below " in line


def test_json_compares_a_kind_of_attention_with_full_attention(as_json: Callable) -> None:
    full, window = (as_json("vit_mu", *options)[0] for options in ((), ("model.attention=window", "model.window=2")))
    assert full["attention"] is None
    assert window["attention"]["macs"] == window["macs_torchvision"] < window["attention"]["macs_full"]
    assert window["attention"]["macs_full"] == full["macs_torchvision"]


def test_recipe_options_apply_to_model_names(as_json: Callable) -> None:
    (row,) = as_json("vit_mu", "model.drop_path=0.4", "--parallel.activation_checkpointing=full")
    assert row["assumed"]["drop_path"] == 0.4
    assert row["assumed"]["activation_checkpointing"] == "full"


def test_batch_and_gpus_change_memory(as_json: Callable) -> None:
    (row,) = as_json("vit_mu", "--batch", "100", "--gpus", "2")
    memory = row["memory_bytes_per_gpu"]["zero2"]
    assert memory["activations"] == 100 * row["activation_bytes_per_image"]
    assert memory["ema"] == 2 * row["params"]


def test_timm_models_report_the_counting_method(as_json: Callable) -> None:
    ours, theirs = as_json("vit_mu", "timm/test_vit")
    assert ours["counted"] == "closed form"
    assert theirs["counted"] == "traced on the meta device"
    assert theirs["activation_bytes_per_image"] > 0


def test_csv_has_one_line_per_model(report: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    report.main(["vit_mu", "vit_cifar_small", "--format", "csv"])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["model"] for row in rows] == ["vit_mu", "vit_cifar_small"]
    assert int(rows[1]["params"]) == 5_362_762
    assert int(rows[1]["memory_bytes_per_gpu.zero3.total"]) > 0


def test_markdown_is_a_table(report: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    report.main(["vit_base_patch16_224", "--format", "markdown"])
    heading, rule, row = capsys.readouterr().out.splitlines()[:3]
    assert heading.count("|") == rule.count("|") == row.count("|")
    assert "86,567,656 | 17.56 | 17.58 | 35.13" in row


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("pages", [True, False])
def test_tables_fit_the_terminal(
    report: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int, pages: bool
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    names = ["vit_giant_patch8_384", "deit_small_distilled_patch16_224", "vit_giant_patch14_reg4_dinov2", "vit_mu"]
    report.main([*names, *(["--detail"] if pages else [])])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text
    assert "1,138,020,840" in text


def test_few_models_are_reported_in_detail(report: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    report.main(["deit3_small_patch16_224"])
    text = capsys.readouterr().out
    for part in ("patch embedding", "position embedding", "attention", "MLP", "norms", "LayerScale", "head", "ZeRO-3"):
        assert part in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["vit_bse_patch16_224"], "vit_base_patch16_224"),
        (["timm/resnet51"], "resnet50"),
        (["recipes/none.yaml"], "recipe not found"),
        (["vit_base_patch16_224", "--image-size", "225"], "224 or 240"),
        (["vit_mu", "--gpus", "0"], "--gpus"),
        (["vit_mu", "--batch", "many"], "--batch"),
        (["vit_mu", "--image-size", "1x2x3"], "HEIGHTxWIDTH"),
        (["vit_mu", "--unheard-of"], "--unheard-of"),
        (["vit_mu", "model.unheard_of=1"], "model.unheard_of"),
        (["vit_mu", "--check", "--format", "csv"], "table and json"),
        (["--image-size", "225"], "224 or 232"),
    ],
    ids=str,
)
def test_invalid_input_is_a_user_error(
    report: ModuleType, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        report.main(args)
    assert capsys.readouterr().out == ""


def test_user_error_exits_with_code_2_without_traceback(launch: Callable) -> None:
    done = launch("launch/report.py", "vit_bse_patch16_224")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Did you mean" in done.stderr
    assert "Traceback" not in done.stderr


def test_incompatible_variants_are_skipped(report: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--image-size", "256", "--format", "csv"]) == 0
    out, err = capsys.readouterr()
    assert "vit_base_patch16_224" in out
    assert "vit_base_patch14_224" not in out
    assert "Skipped" in err
    assert "14" in err


def test_every_variant_equals_timm(report: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--check"]) == 0
    assert f"{len(VARIANTS)} of {len(VARIANTS)} equal" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["table", "json"])
def test_wrong_variant_exits_with_code_1_and_names_the_layer(
    report: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    wrong = dataclasses.replace(VARIANTS["vit_tiny_patch16_224"], mlp_ratio=3.0)
    monkeypatch.setitem(VARIANTS, "vit_tiny_patch16_224", wrong)
    assert report.main(["--check", "vit_tiny_patch16_224", "vit_mu", "--format", form]) == 1
    out = capsys.readouterr().out
    assert "blocks.0.mlp.fc1.weight: ours (576, 192), timm (768, 192)" in out
