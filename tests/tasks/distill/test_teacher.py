"""The teacher: where it comes from, what it sees, and what belongs to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.tasks.distill.students import DIGITS, example, make_teacher, prepared, student
from vit_scale.data.batch import Batch
from vit_scale.errors import UserError
from vit_scale.inference.loaded_run import load_run
from vit_scale.models import create_model
from vit_scale.recipe import build_config
from vit_scale.tasks.distill.teacher import half_precision


@pytest.mark.parametrize("statistics", [{}, {"mean": [0.5], "std": [0.2]}], ids=["own", "other"])
def test_teacher_answers_for_the_mixed_pixels_as_its_run_does(teacher: Path, statistics: dict) -> None:
    """The reference goes back to pixels in 0..1, and normalizes and resizes them as the run of the teacher does."""
    task = prepared(teacher, data=statistics)
    inputs = task.inputs(example(), step=0)
    mean, std = (torch.tensor(v)[:, None, None] for v in task.normalization)
    pixels = inputs.args[0] * std + mean
    unmixed = example().images / 255
    assert (pixels - unmixed).abs().max() > 0.1, "images are mixed"
    run = load_run(teacher)
    seen = (F.interpolate(pixels, (12, 12), mode="bicubic", antialias=True) - 0.3) / 0.4
    torch.testing.assert_close(inputs.rest["teacher"].logits, run.model(seen), rtol=0, atol=1e-4)


def test_teacher_of_another_number_of_channels_sees_gray_images_in_each(tmp_path: Path) -> None:
    task = prepared(make_teacher(tmp_path / "color", in_chans=3), augment={"mixup": 0.0, "cutmix": 0.0})
    found = task.inputs(example(), step=0).rest["teacher"].logits
    seen = F.interpolate(example().images.expand(-1, 3, -1, -1) / 255, (12, 12), mode="bicubic", antialias=True)
    torch.testing.assert_close(found, load_run(tmp_path / "color").model((seen - 0.3) / 0.4), rtol=0, atol=1e-4)


def test_teacher_sees_full_images_while_progressive_resizing_shrinks_the_students(teacher: Path) -> None:
    plain = prepared(teacher).inputs(example(), step=0)
    small = prepared(teacher, augment={"progressive": [[0, 4]]}).inputs(example(), step=0)
    assert small.args[0].shape[-2:] == (4, 4)
    assert torch.equal(small.rest["teacher"].logits, plain.rest["teacher"].logits)


def test_tokens_are_those_of_the_teachers_block_on_the_students_grid(teacher: Path) -> None:
    task = prepared(teacher, distill={"features": [[0, 1], [1, 0]]}, model={"patch_size": 4, "img_size": 12})
    images = torch.randint(256, (2, 1, 12, 12), dtype=torch.uint8)
    inputs = task.inputs(Batch(images, {"label": torch.arange(2)}, torch.arange(2)), step=0)
    mean, std = (torch.tensor(v)[:, None, None] for v in task.normalization)
    seen = (inputs.args[0] * std + mean - 0.3) / 0.4
    expected = load_run(teacher).model.forward_intermediates(seen, [1, 0], as_maps=False)
    torch.testing.assert_close(inputs.rest["teacher"].tokens, expected, rtol=0, atol=1e-4)
    coarse = prepared(teacher, distill={"features": [[0, 1]]}).inputs(example(), step=0)
    assert coarse.rest["teacher"].tokens[0].shape == (4, 16, 24), "the student's 4 x 4 patches"


def test_teacher_is_frozen_and_no_part_of_the_model(teacher: Path) -> None:
    task = prepared(teacher, model={"distilled": True, "pool": "cls"})
    assert task.teacher is not None
    model = task.build().train()
    assert not task.teacher.model.training
    assert not any(p.requires_grad for p in task.teacher.model.parameters())
    assert not {id(p) for p in model.parameters()} & {id(p) for p in task.teacher.model.parameters()}
    assert not task.inputs(example(), step=0).rest["teacher"].logits.requires_grad


def test_half_precision_is_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from vit_scale.tasks.distill import teacher as module

    def dtype(precision: str) -> torch.dtype:
        config = build_config({"schedule": {"steps": 1}, "parallel": {"precision": precision}})
        return half_precision(config, torch.device("cpu"))

    assert dtype("auto") == dtype("bf16") == torch.float32
    monkeypatch.setattr(module.gpu, "is_gpu", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    assert [dtype(name) for name in ("auto", "bf16", "fp16", "fp32")] == [
        torch.bfloat16,
        torch.bfloat16,
        torch.float16,
        torch.float32,
    ]
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    assert dtype("auto") == torch.float16


def test_checksum_is_of_the_weights_wherever_they_are(teacher: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied.safetensors"
    copied.write_bytes((teacher / "model.safetensors").read_bytes())
    shape = {"img_size": 12, "patch_size": 4, "embed_dim": 24}
    facts = prepared(teacher).facts()
    assert prepared(copied, model=shape).facts() == facts
    weights = load_file(copied)
    weights["head.bias"][0] += 1e-6
    save_file(weights, copied)
    assert prepared(copied, model=shape).facts()["teacher sha256"] != facts["teacher sha256"]


def test_file_of_a_timm_model_is_a_teacher(tmp_path: Path) -> None:
    model = create_model("timm/test_vit", num_classes=10)
    save_file(model.state_dict(), tmp_path / "vit.safetensors")
    task = prepared(tmp_path / "vit.safetensors", 3, distill={"teacher_model": "timm/test_vit", "features": [[1, 3]]})
    inputs = task.inputs(example(3), step=0)
    assert inputs.rest["teacher"].tokens[0].shape == (4, 16, model.embed_dim)
    mean, std = (torch.tensor(v)[:, None, None] for v in task.normalization)
    seen = F.interpolate(inputs.args[0] * std + mean, model.img_size, mode="bicubic", antialias=True)
    expected = model.eval()((seen - 0.5) / 0.5)
    torch.testing.assert_close(inputs.rest["teacher"].logits, expected, rtol=0, atol=1e-4)


def test_student_without_a_token_learns_from_a_file_of_its_own_kind(tmp_path: Path) -> None:
    shape = student("x")["model"]
    save_file(create_model(**shape, num_classes=10, in_chans=1).state_dict(), tmp_path / "own.safetensors")
    task = prepared(tmp_path / "own.safetensors", model={"distilled": True, "pool": "cls"})
    assert task.teacher is not None
    assert not task.teacher.model.variant.distilled


def other_order(top: Path) -> dict:
    return {"teacher": make_teacher(top / "order", names=("0", "2", "1", *DIGITS[3:]))}


def without_weights(top: Path) -> dict:
    (make_teacher(top / "empty") / "model.safetensors").unlink()
    return {"teacher": top / "empty"}


def damaged(top: Path) -> dict:
    (make_teacher(top / "damaged") / "model.safetensors").write_bytes(b"no weights")
    return {"teacher": top / "damaged"}


def another_model(top: Path) -> dict:
    save_file(create_model("timm/test_vit", num_classes=10).state_dict(), top / "other.safetensors")
    return {"teacher": top / "other.safetensors"}


def another_task(top: Path) -> dict:
    summary = json.loads((make_teacher(top / "mae") / "summary.json").read_text())
    (top / "mae/summary.json").write_text(json.dumps(summary | {"task": {"name": "segment"}}))
    return {"teacher": top / "mae"}


def gray(top: Path) -> dict:
    return {"teacher": make_teacher(top / "gray"), "in_chans": 3}


def other_classes_in_file(top: Path) -> dict:
    weights = create_model("timm/test_vit", num_classes=7).state_dict()
    save_file(weights, top / "seven.safetensors")
    return {"teacher": top / "seven.safetensors", "distill": {"teacher_model": "timm/test_vit"}, "in_chans": 3}


WRONG: list[tuple[Callable[[Path], dict], str]] = [
    (lambda top: {"teacher": top / "nothing"}, "not found; use timm/<name>, a run directory or a weights file"),
    (lambda top: {"teacher": top}, "not a run directory"),
    (lambda top: {"teacher": "timm/resnet18.a1_in1k"}, "it has 1,000 classes, the student 10"),
    (lambda top: {"teacher": "timm/resnet1"}, "distill.teacher: timm has no model 'resnet1'"),
    (lambda top: {"teacher": "timm/test_vit.nothing"}, "timm"),
    (lambda top: {"teacher": make_teacher(top / "few", names=DIGITS[:4])}, "it has 4 classes, the student 10"),
    (other_order, "its class 1 is '2', but '1' in the data"),
    (without_weights, "no weights yet"),
    (damaged, "cannot read the weights"),
    (another_model, "another architecture; set distill.teacher_model, or use their run directory"),
    (other_classes_in_file, "the weights have 7 classes, the model 10"),
    (another_task, "was trained with task 'segment'; a teacher must classify"),
    (gray, "it takes images of 1 channel, the student 3"),
    (
        lambda top: {"teacher": make_teacher(top / "t"), "distill": {"teacher_model": "timm/test_vit"}},
        "only for a weights file",
    ),
    (
        lambda top: {"teacher": make_teacher(top / "t"), "distill": {"kind": "kl"}, "model": {"distilled": True}},
        "the labels need a weight",
    ),
    (lambda top: {"teacher": make_teacher(top / "t"), "distill": {"kind": "kl", "alpha": 0.9}}, "kl has no labels"),
    (lambda top: {"teacher": make_teacher(top / "t"), "distill": {"temperature": 3.0}}, "use distill.kind=soft or kl"),
    (lambda top: {"teacher": make_teacher(top / "t"), "distill": {"features": [[2, 0]]}}, "blocks 0 to 1, not 2"),
    (lambda top: {"teacher": make_teacher(top / "t"), "distill": {"features": [[0, 2]]}}, "blocks 0 to 1, not 2"),
    (
        lambda top: {
            "teacher": make_teacher(top / "t"),
            "distill": {"features": [[0, 0]]},
            "model": {"patch_dropout": 0.5},
        },
        "set model.patch_dropout=0",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_teacher_that_does_not_fit_is_refused(wrong: Callable[[Path], dict], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        prepared(**wrong(tmp_path)).build()
    text = str(caught.value)
    assert message in text
    assert "model.weights" not in text
    assert "model.name" not in text
    assert len(text.splitlines()) <= 3
