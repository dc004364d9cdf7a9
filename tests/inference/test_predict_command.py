"""`launch/predict.py`: classes and probabilities of pictures; bad files are named and skipped."""

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
def pictures(tmp_path: Path) -> Path:
    """Three digits, one of them deeper down, a damaged picture and a text."""
    from sklearn.datasets import load_digits

    (tmp_path / "pictures/below").mkdir(parents=True)
    for name, image in zip(("a.png", "b.png", "below/a.png"), load_digits().images, strict=False):
        Image.fromarray((image * 255 / 16).astype(np.uint8)).save(tmp_path / "pictures" / name)
    (tmp_path / "pictures/bad.png").write_bytes(b"\x89PNG, not")
    (tmp_path / "pictures/notes.txt").write_text("not a picture")
    return tmp_path / "pictures"


def test_predictions_are_the_models_probabilities(trained_run: Path, pictures: Path) -> None:
    run = vit_scale.load_run(trained_run)
    paths = find_images([str(pictures)])
    found = list(predict(run, paths, top=10, batch=2))
    assert [each.path for each in found] == paths
    for each in (each for each in found if not each.problem):
        probabilities = run.model(run.transform(each.path)[None]).softmax(1)[0]
        assert [guess.index for guess in each.guesses] == probabilities.argsort(descending=True).tolist()
        torch.testing.assert_close(
            torch.tensor([g.probability for g in each.guesses]), probabilities.sort(descending=True).values
        )


def test_folders_patterns_and_files_lead_to_pictures_once(pictures: Path) -> None:
    every = [pictures / name for name in ("a.png", "b.png", "bad.png", "below/a.png")]
    assert find_images([str(pictures)]) == every
    assert find_images([str(pictures / "**/a.png")]) == [every[0], every[3]]
    assert find_images([str(every[1]), str(pictures)]) == [every[1], every[0], every[2], every[3]]
    assert find_images([str(pictures / "notes.txt")]) == [pictures / "notes.txt"], "who names a file means it"


def test_json_has_every_file_and_bad_ones_with_the_reason(
    trained_run: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(trained_run), str(pictures), "--json", "--top", "2"]) == 0
    out, err = capsys.readouterr()
    rows = {Path(row["file"]).relative_to(pictures).as_posix(): row for row in json.loads(out)}
    assert list(rows) == ["a.png", "b.png", "bad.png", "below/a.png"]
    assert "cannot be decoded" in rows["bad.png"]["problem"]
    assert len(rows["a.png"]["predictions"]) == 2
    assert rows["a.png"]["predictions"][0].keys() == {"class", "index", "probability"}
    assert f"Skipped {pictures / 'bad.png'}: cannot be decoded" in err


def test_the_table_names_classes_and_skips_what_is_bad(
    trained_run: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(trained_run), str(pictures / "a.png"), str(pictures / "bad.png")]) == 0
    out, err = capsys.readouterr()
    assert "a.png" in out
    assert out.count(" %") == 5
    assert "bad.png" not in out
    assert "bad.png" in err


def test_attention_pictures_of_equal_names_do_not_overwrite_one_another(
    trained_run: Path, pictures: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "attention"
    assert main([str(trained_run), str(pictures), "--attention", "--out", str(folder)]) == 0
    names = {"a-attention.png", "a-2-attention.png", "b-attention.png"}
    assert {path.name for path in folder.iterdir()} == names
    assert all(np.asarray(Image.open(folder / name)).std() > 10 for name in names)


def test_a_model_without_attention_says_so(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    real = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained=False, **options: real(name, **options))
    with pytest.raises(UserError, match="no attention over patches"):
        main(["timm/test_resnet", str(pictures / "a.png"), "--attention", "--out", str(tmp_path / "attention")])
    assert not (tmp_path / "attention").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{run}", "no/such/picture.png"], "there is no such file"),
        (["{run}", "{empty}"], "no images in this folder"),
        (["{run}", "{pictures}/bad.png"], "none of 1 files could be read"),
        (["{run}", "{pictures}/*.jpg"], "there is no such file"),
        (["no/such/run", "{pictures}"], "there is no such run"),
        (["{run}", "{pictures}", "--top", "0"], "--top: must be at least 1"),
        (["{run}", "{pictures}", "--out", "x"], "--out: requires --attention"),
        (["{run}"], "IMAGE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_told(arguments: list[str], said: str, trained_run: Path, pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    places = {"run": trained_run, "pictures": pictures, "empty": tmp_path / "empty"}
    with pytest.raises(UserError, match=said):
        main([argument.format(**places) for argument in arguments])


def test_status_is_2_without_a_traceback_when_nothing_could_be_read(
    launch: Callable, trained_run: Path, pictures: Path
) -> None:
    done = launch("launch/predict.py", trained_run, pictures / "bad.png")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
