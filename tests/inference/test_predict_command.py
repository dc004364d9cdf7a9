"""`launch/predict.py`: classes and probabilities of images; unreadable files are reported and skipped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vit_scale
from vit_scale.commands.predict import main
from vit_scale.errors import UserError
from vit_scale.inference.prediction import find_images, predict


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Three digits, one of them in a subdirectory, a corrupt image and a text file."""
    from sklearn.datasets import load_digits

    (tmp_path / "images/below").mkdir(parents=True)
    for name, image in zip(("a.png", "b.png", "below/a.png"), load_digits().images, strict=False):
        Image.fromarray((image * 255 / 16).astype(np.uint8)).save(tmp_path / "images" / name)
    (tmp_path / "images/bad.png").write_bytes(b"\x89PNG, not")
    (tmp_path / "images/notes.txt").write_text("not an image")
    return tmp_path / "images"


def test_predictions_equal_the_softmax_of_the_model(trained_run: Path, images: Path) -> None:
    run = vit_scale.load_run(trained_run)
    paths = find_images([str(images)])
    found = list(predict(run, paths, top=10, batch=2))
    assert [each.path for each in found] == paths
    for each in (each for each in found if not each.problem):
        probabilities = run.model(run.transform(each.path)[None]).softmax(1)[0]
        assert [found.index for found in each.classes] == probabilities.argsort(descending=True).tolist()
        torch.testing.assert_close(
            torch.tensor([c.probability for c in each.classes]), probabilities.sort(descending=True).values
        )


def test_directories_patterns_and_files_give_each_image_once(images: Path) -> None:
    every = [images / name for name in ("a.png", "b.png", "bad.png", "below/a.png")]
    assert find_images([str(images)]) == every
    assert find_images([str(images / "**/a.png")]) == [every[0], every[3]]
    assert find_images([str(every[1]), str(images)]) == [every[1], every[0], every[2], every[3]]
    assert find_images([str(images / "notes.txt")]) == [images / "notes.txt"], "named explicitly"


def test_json_has_every_file_and_the_problem_of_unreadable_ones(
    trained_run: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(trained_run), str(images), "--json", "--top", "2"]) == 0
    out, err = capsys.readouterr()
    rows = {Path(row["file"]).relative_to(images).as_posix(): row for row in json.loads(out)}
    assert list(rows) == ["a.png", "b.png", "bad.png", "below/a.png"]
    assert "cannot be decoded" in rows["bad.png"]["problem"]
    assert len(rows["a.png"]["predictions"]) == 2
    assert rows["a.png"]["predictions"][0].keys() == {"class", "index", "probability"}
    assert f"Skipped {images / 'bad.png'}: cannot be decoded" in err


def test_table_lists_classes_and_skips_unreadable_files(
    trained_run: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(trained_run), str(images / "a.png"), str(images / "bad.png")]) == 0
    out, err = capsys.readouterr()
    assert "a.png" in out
    assert out.count("%") == 5
    assert "bad.png" not in out
    assert "bad.png" in err


def test_attention_figures_of_equal_names_do_not_overwrite_each_other(
    trained_run: Path, images: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "attention"
    assert main([str(trained_run), str(images), "--attention", "--out", str(folder)]) == 0
    names = {"a-attention.png", "a-2-attention.png", "b-attention.png"}
    assert {path.name for path in folder.iterdir()} == names
    assert all(np.asarray(Image.open(folder / name)).std() > 10 for name in names)


def test_model_without_attention_is_reported(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    real = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained=False, **options: real(name, **options))
    with pytest.raises(UserError, match="no patch attention"):
        main(["timm/test_resnet", str(images / "a.png"), "--attention", "--out", str(tmp_path / "attention")])
    assert not (tmp_path / "attention").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "no/such/image.png"], "file not found"),
        (["{run}", "{empty}"], "no images in this directory"),
        (["{run}", "{images}/bad.png"], "none of 1 files could be read"),
        (["{run}", "{images}/*.jpg"], "file not found"),
        (["no/such/run", "{images}"], "run not found"),
        (["{run}", "{images}", "--top", "0"], "--top: must be at least 1"),
        (["{run}", "{images}", "--out", "x"], "--out: requires --attention"),
        (["{run}"], "IMAGE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_input_is_reported(
    arguments: list[str], message: str, trained_run: Path, images: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"run": trained_run, "images": images, "empty": tmp_path / "empty"}
    with pytest.raises(UserError, match=message):
        main([argument.format(**places) for argument in arguments])


def test_exit_status_is_2_without_traceback_if_nothing_was_readable(
    launch: Callable, trained_run: Path, images: Path
) -> None:
    done = launch("launch/predict.py", trained_run, images / "bad.png")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_formats_that_cannot_be_read_are_reported_and_hidden_files_are_not(trained_run: Path, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    for name in ("phone.HEIC", "._phone.jpg", ".git/a.jpg", "Thumbs.db"):
        (tmp_path / name).write_bytes(b"\0\0\0\x18ftypheic" + bytes(20))
    paths = find_images([str(tmp_path)])
    assert paths == [tmp_path / "phone.HEIC"]
    assert [each.problem for each in predict(vit_scale.load_run(trained_run), paths)] == [
        "cannot be decoded: HEIC requires pillow-heif"
    ]
