"""Runs with a teacher: they learn from it, resume, and are used afterwards without it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import vit_scale
from tests.tasks.distill.students import DIGITS, example, losses, make_teacher, prepared, student
from vit_scale.commands import export, predict
from vit_scale.cost.count import count_model
from vit_scale.cost.meta import build_on_meta
from vit_scale.errors import UserError
from vit_scale.format import amount
from vit_scale.models import create_model
from vit_scale.page.page import write_page
from vit_scale.page.runs import read_runs
from vit_scale.plan.machine import find_machine
from vit_scale.plan.print_plan import print_plan
from vit_scale.plan.run_plan import make_run_plan
from vit_scale.recipe import build_config
from vit_scale.report.model_report import report_on

EVERYTHING = {
    "model": {"distilled": True, "pool": "cls", "drop_path": 0.2, "dropout": 0.1},
    "augment": {"progressive": [[0, 4], [0.5, 8]]},
    "distill": {"kind": "soft", "temperature": 2.0, "features": [[0, 0], [1, 1]]},
}


def train(teacher: Path, folder: Path, *options: str, **sections: dict) -> Path:
    vit_scale.train(student(teacher, **sections), [f"run.dir={folder}", *options])
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with both heads, features and everything random; its teacher is deleted afterwards."""
    top = tmp_path_factory.mktemp("distilled")
    train(make_teacher(top / "teacher"), top / "run", **EVERYTHING)
    moved = (top / "teacher").rename(top / "moved")  # the same teacher at another place
    checkpoint = top / "run/checkpoints/step-00000004"
    train(moved, top / "resumed", f"run.resume={checkpoint}", **EVERYTHING)
    shutil.rmtree(moved)
    return top / "run"


def test_each_loss_is_logged_and_their_sum_is_the_loss(run: Path) -> None:
    for step in losses(run):
        assert step.keys() == {"train/loss", *(f"train/loss_{part}" for part in ("class", "distill", "features"))}
        total = 0.5 * step["train/loss_class"] + 0.5 * step["train/loss_distill"] + step["train/loss_features"]
        assert step["train/loss"] == pytest.approx(total, rel=1e-5)


def test_resumed_run_is_bit_identical(run: Path) -> None:
    for name in ("model", "model_ema"):
        whole, resumed = (load_file(folder / f"{name}.safetensors") for folder in (run, run.parent / "resumed"))
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_teacher_is_in_no_checkpoint(run: Path) -> None:
    shape = student("x")["model"] | {"distilled": True, "pool": "cls", "num_classes": 10, "in_chans": 1}
    backbone = set(create_model(**shape).state_dict())
    own = backbone | {f"projections.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")}
    for path in (run / "model.safetensors", *run.glob("checkpoints/*/*.safetensors")):
        names = {name.removeprefix("backbone.") for name in load_file(path) if "/" not in name}
        assert names <= own, path


def test_summary_and_page_name_the_teacher(run: Path, tmp_path: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    facts = summary["task"]["facts"]
    assert facts["teacher"] == "vit_mu"
    assert len(facts["teacher sha256"]) == 64
    assert summary["speed/mfu_teacher"] < summary["speed/mfu"]
    write_page(read_runs([run]), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert facts["teacher sha256"] in page
    assert "training, distill" in page


def test_run_is_evaluated_exported_and_fine_tuned_without_its_teacher(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = vit_scale.load_run(run)
    assert loaded.backbone is loaded.model, "the projections are not needed"
    images = torch.rand(2, 1, 8, 8)
    x = loaded.model.forward_features(images)
    both = (loaded.model.head(x[:, 0]) + loaded.model.head_dist(x[:, 1])) / 2
    assert torch.equal(loaded.model(images), both), "evaluation averages both heads"
    assert export.main([str(run), "--to", "timm", "--out", str(tmp_path / "timm.safetensors")]) == 0
    from PIL import Image

    Image.new("L", (8, 8), 99).save(tmp_path / "digit.png")
    assert predict.main([str(run), str(tmp_path / "digit.png")]) == 0
    capsys.readouterr()
    recipe = student("x", model={"distilled": True, "pool": "cls", "weights": str(run)}, schedule={"steps": 1})
    del recipe["distill"]
    vit_scale.train(recipe, [f"run.dir={tmp_path / 'tuned'}"])
    output = capsys.readouterr().out
    assert "left as initialized" not in output
    assert "tensors kept as they are" in output


def test_another_teacher_is_refused_on_resume(teacher: Path, tmp_path: Path) -> None:
    other = make_teacher(tmp_path / "other", seed=1)
    train(teacher, tmp_path / "run", "schedule.steps=2")
    with pytest.raises(UserError, match="teacher sha256") as caught:
        train(other, tmp_path / "run", "schedule.steps=4")
    assert len(str(caught.value).splitlines()) <= 3


def test_student_learns_what_the_teacher_says(teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The labels are not used: the loss falls although the teacher's classes are arbitrary."""
    sections = {"schedule": {"steps": 40}, "augment": {"mixup": 0.0, "cutmix": 0.0}, "ema": {"decay": 0.0}}
    folder = train(teacher, tmp_path / "run", distill={"kind": "kl"}, **sections)
    found = [step["train/loss"] for step in losses(folder)]
    assert losses(folder)[0].keys() == {"train/loss", "train/loss_distill"}
    assert sum(found[-5:]) < 0.7 * sum(found[:5])
    params = amount(sum(tensor.numel() for tensor in load_file(teacher / "model.safetensors").values()))
    assert f"teacher     {teacher} (vit_mu, {params} parameters; kl, temperature 1)" in capsys.readouterr().out


def test_timm_student_with_two_heads_and_its_features(teacher: Path) -> None:
    """timm's deit: tokens are those of its own method, and no hook stays on it."""
    torch.manual_seed(0)
    model = {"name": "timm/deit_tiny_distilled_patch16_224", "img_size": 32}
    unused = dict.fromkeys(("patch_size", "embed_dim", "depth", "num_heads"))
    task = prepared(teacher, model=model | unused, distill={"features": [[11, 1]]})
    built = task.build().train()
    inputs = task.inputs(example(size=32), step=0)
    (class_logits, distill_logits), (projected,) = outputs = built(*inputs.args)
    _, (tokens,) = built.backbone.forward_intermediates(inputs.args[0], indices=[11], output_fmt="NLC")
    torch.testing.assert_close(projected, built.projections[0](tokens), rtol=0, atol=1e-5)
    assert not torch.equal(class_logits, distill_logits)
    task.loss(outputs, inputs)["loss"].backward()
    assert all(p.grad is not None for p in built.parameters())
    assert not any(module._forward_hooks for module in built.modules())
    averaged = built.eval()(*inputs.args)
    assert averaged.shape == class_logits.shape, "evaluation averages both heads"


def test_plan_counts_the_teacher_apart_without_its_weights(capsys: pytest.CaptureFixture[str]) -> None:
    sections = {"data": {"source": "synthetic"}, "batch": {"global": 64}, "schedule": {"steps": 10}}
    distilled = {"model": {"name": "vit_tiny_patch16_224"}, "distill": {"teacher": "timm/resnet18.a1_in1k"}}
    machine = find_machine(2, "A100")
    alone = make_run_plan(build_config(sections | {"model": distilled["model"]}), "r", machine)
    both = make_run_plan(build_config(sections | distilled), "r", machine)
    teacher = count_model(build_on_meta(lambda: create_model("timm/resnet18", num_classes=1000)))
    assert both.cost.frozen_flops_per_image == {"teacher": teacher.flops}
    assert both.cost.flops_per_image == pytest.approx(alone.cost.flops_per_image + teacher.flops)
    for strategy, option in both.options.items():
        assert option.footprint.parts["frozen"] == 2 * teacher.params, "in half precision, whatever the strategy"
        assert option.footprint.peak == alone.options[strategy].footprint.peak + 2 * teacher.params
        assert option.communication == alone.options[strategy].communication
    print_plan(both)
    output = capsys.readouterr().out
    assert "teacher     timm/resnet18.a1_in1k (11,689,512 parameters, 1.814 GMACs per image)" in output
    assert re.search(r"teacher 3\.628 GFLOPs \(\d+%, forward only\)", output)


def test_report_counts_the_teacher_at_its_own_size(teacher: Path) -> None:
    """A teacher by its run directory; the student's images shrink, the teacher's do not."""
    config = build_config(student(teacher, augment={"progressive": [[0, 4]]}, model={"num_classes": 10, "in_chans": 1}))
    parts = report_on(config).cost_parts
    from vit_scale.cost.training import training_cost

    full, small = (training_cost(list(parts), config, batch=None, side=side).flops for side in (None, 4))
    assert small["teacher"] == full["teacher"] > 0
    assert small["model"] < full["model"]


def test_report_without_data_takes_classes_and_channels_from_the_teacher(tmp_path: Path) -> None:
    """So does --try; the student's own table says 10 classes and 3 channels."""
    teacher = make_teacher(tmp_path / "seven", names=DIGITS[:7])
    assert report_on(build_config(student(teacher))).classes == 7
    with pytest.raises(UserError, match="it has 7 classes, the student 9"):
        report_on(build_config(student(teacher, model={"num_classes": 9})))


def test_dry_run_refuses_a_teacher_of_other_classes(tmp_path: Path) -> None:
    recipe = student(make_teacher(tmp_path / "few", names=DIGITS[:3]))
    with pytest.raises(UserError, match="it has 3 classes, the student 10"):
        make_run_plan(build_config(recipe), "r", find_machine(1, "T4"))
