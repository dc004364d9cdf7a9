"""Targets find their columns, read rows, collate batches, and name what is missing."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vit_scale.config import AugmentConfig, DataConfig
from vit_scale.data.augment.geometry import center_geometry
from vit_scale.data.augment.transforms import TrainTransform
from vit_scale.data.batch import Batch
from vit_scale.data.data import Data, open_data
from vit_scale.data.images.decode import UnreadableImage
from vit_scale.data.loading.loaders import EvalLoader, TrainLoader
from vit_scale.data.spatial_targets import IGNORE_INDEX, Boxes, BoxTarget, MaskTarget, decode_mask
from vit_scale.data.targets import ClassTarget, Columns, NoTarget, Target, TextTarget, check_transform
from vit_scale.errors import UserError

Encode = Callable[..., bytes]
TARGETS = [ClassTarget(), NoTarget(), MaskTarget(), BoxTarget(), TextTarget()]
PLAIN = AugmentConfig(crop="random", crop_padding=2, vflip=0.5)


def stored(data: bytes) -> dict[str, Any]:
    return {"bytes": data, "path": None}


def images_and_masks(encode: Encode, count: int) -> tuple[list[Any], list[Any]]:
    """Return images of 12x16 pixels, and masks painted from their pixels: class 1 where the image is bright."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 250, (count, 12, 16), dtype=np.uint8)
    return [stored(encode(x, "png")) for x in pixels], [
        stored(encode((x > 128).astype(np.uint8), "png")) for x in pixels
    ]


@pytest.fixture
def table(encode: Encode, tmp_path: Path) -> Callable[..., str]:
    """Save 20 images with a class, a mask, boxes and captions each; `without` drops columns."""
    import datasets

    def build(*without: str, masks: list[Any] | None = None) -> str:
        images, painted = images_and_masks(encode, 20)
        boxes = [[[float(i % 5), 1.0, 6.0, 5.5]] * (i % 3) for i in range(20)]
        columns = {
            "image": images,
            "label": [i % 2 for i in range(20)],
            "mask": masks or painted,
            "objects": [{"bbox": box, "category": [i % 4] * (i % 3)} for i, box in enumerate(boxes)],
            "caption": [[f"image {i}", "an image"] if i % 2 else [] for i in range(20)],
        }
        features = {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["dark", "bright"]),
            "mask": datasets.Image(),
            "objects": {
                "bbox": datasets.Sequence(datasets.Sequence(datasets.Value("float32"), length=4)),
                "category": datasets.Sequence(datasets.ClassLabel(names=["ant", "bee", "cow", "dog"])),
            },
            "caption": datasets.Sequence(datasets.Value("string")),
        }
        kept = [name for name in columns if name not in without]
        chosen = datasets.Features({name: features[name] for name in kept})
        made = datasets.Dataset.from_dict({name: columns[name] for name in kept}, features=chosen)
        path = tmp_path / ("table" + "-".join(without))
        made.save_to_disk(path)
        return str(path)

    return build


def opened(source: str, target: Target) -> Data:
    return open_data(DataConfig(source=source, val_split="train"), target, seed=0)


def same(a: Batch, b: Batch) -> bool:
    """Return whether two batches are equal in every field."""
    tensors = torch.equal(a.images, b.images) and torch.equal(a.positions, b.positions)
    return tensors and a.texts == b.texts and all(torch.equal(a.target[name], b.target[name]) for name in a.target)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.kind)
def test_workers_give_the_same_batches(
    target: Target,
    table: Callable[..., str],
    train_loader: Callable[..., TrainLoader],
    eval_loader: Callable[..., EvalLoader],
) -> None:
    data = opened(table(), target)
    options: dict[str, Any] = {"target": target, "img_size": (10, 14)}
    for build, more in ((train_loader, {"augment": PLAIN, "micro_batch": 4}), (eval_loader, {"batch": 8})):
        loader = build(data.train, workers=2, **options, **more)
        alone = list(build(data.train, **options, **more))
        together = list(loader)
        loader.close()
        assert all(a.target.keys() == b.target.keys() for a, b in zip(alone, together, strict=True))
        assert all(same(a, b) for a, b in zip(alone, together, strict=True))


def test_masks_are_batched_with_their_images(
    table: Callable[..., str], train_loader: Callable[..., TrainLoader], eval_loader: Callable[..., EvalLoader]
) -> None:
    data = opened(table(), MaskTarget(names=("dark", "bright")))
    assert data.class_names == ("dark", "bright")
    assert data.in_chans == 1
    for batch in train_loader(data.train, target=MaskTarget(), augment=PLAIN, img_size=(12, 16)):
        mask = batch.target["mask"]
        assert (mask.shape, mask.dtype) == ((16, 12, 16), torch.uint8)
        inside = mask != IGNORE_INDEX
        assert 0 < (~inside).sum() < inside.sum(), "padding is ignored"
        assert torch.equal((batch.images[:, 0] > 128)[inside], mask[inside] == 1)
    last = list(eval_loader(data.train, target=MaskTarget(), img_size=(12, 16), batch=16))[-1]
    assert last.real.tolist() == [True] * 4 + [False] * 12
    assert (last.target["mask"][4:] == IGNORE_INDEX).all()


def test_masks_of_shared_slots_are_not_overwritten(
    table: Callable[..., str], train_loader: Callable[..., TrainLoader]
) -> None:
    data = opened(table(), MaskTarget())
    options: dict[str, Any] = {"target": MaskTarget(), "augment": PLAIN, "micro_batch": 4, "end_step": 8}
    loader = train_loader(data.train, workers=1, **options)
    batches = list(loader)
    loader.close()
    assert all(same(a, b) for a, b in zip(batches, train_loader(data.train, **options), strict=True))


def test_boxes_are_flat_with_a_count_per_image(
    table: Callable[..., str], eval_loader: Callable[..., EvalLoader]
) -> None:
    data = opened(table(), BoxTarget())
    assert data.class_names == ("ant", "bee", "cow", "dog")
    augment = AugmentConfig(eval_crop=1.0)
    first, last = eval_loader(data.train, target=BoxTarget(), augment=augment, img_size=(12, 16), batch=16)
    assert first.target["count"].tolist() == [i % 3 for i in range(16)]
    assert first.target["class"].tolist() == [i % 4 for i in range(16) for _ in range(i % 3)]
    expected = [[i % 5, 1.0, i % 5 + 6.0, 6.5] for i in range(16) for _ in range(i % 3)]
    torch.testing.assert_close(first.target["boxes"], torch.tensor(expected))
    assert last.target["count"].tolist() == [i % 3 for i in range(16, 20)] + [0] * 12


def test_captions_are_lists_of_strings(table: Callable[..., str], eval_loader: Callable[..., EvalLoader]) -> None:
    data = opened(table(), TextTarget())
    (batch,) = eval_loader(data.train, target=TextTarget(), batch=24)
    assert batch.texts[:3] == [[], ["image 1", "an image"], []]
    assert batch.texts[20:] == [[]] * 4
    assert batch.target == {}
    assert TextTarget().read({"text": "one"}, Columns(("text",))) == ["one"]


def test_images_alone_have_no_target(table: Callable[..., str], train_loader: Callable[..., TrainLoader]) -> None:
    data = opened(table("label"), NoTarget())
    assert all(batch.target == {} and batch.real.all() for batch in train_loader(data.train, target=NoTarget()))


@pytest.mark.parametrize("layout", ["list of objects", "columns"])
def test_boxes_in_other_layouts(layout: str) -> None:
    if layout == "columns":
        row: dict[str, Any] = {"boxes": [[1, 2, 5, 7]], "labels": ["bee"]}
        columns = Columns(("boxes", "labels"), ("ant", "bee"))
    else:
        row = {"objects": [{"bbox": [1, 2, 5, 7], "category": 1}]}
        columns = Columns(("objects",), ("ant", "bee"))
    boxes = BoxTarget(layout="xyxy").read(row, columns)
    assert (boxes.corners.tolist(), boxes.classes.tolist()) == ([[1, 2, 5, 7]], [1])
    assert BoxTarget().read(row, columns).corners.tolist() == [[1, 2, 6, 9]]
    empty = BoxTarget().read(dict.fromkeys(columns.names), columns)
    assert (empty.corners.shape, empty.classes.shape) == ((0, 4), (0,))


@pytest.mark.parametrize(
    ("value", "message"), [("cow", "class 'cow', which is not among ant, bee"), (2, "outside 0..1")]
)
def test_unknown_class_of_a_box(value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        BoxTarget().read({"boxes": [[0, 0, 1, 1]], "class": [value]}, Columns(("boxes", "class"), ("ant", "bee")))


def test_boxes_outside_the_crop_are_dropped_and_others_cut() -> None:
    geometry = center_geometry((20, 40), (10, 10), (20, 40), "bilinear")
    corners = np.array([[0, 0, 12, 20], [10, 8, 18, 12], [16, 6, 20, 11], [15, 5, 15.4, 9]], np.float32)
    moved = BoxTarget().move(Boxes(corners, np.arange(4)), geometry)
    assert moved.classes.tolist() == [1, 2]
    assert moved.corners.tolist() == [[0, 3, 3, 7], [1, 1, 5, 6]]


@pytest.mark.parametrize(
    ("target", "missing", "message"),
    [
        (ClassTarget(), ("label",), "no label column among image, mask, .*set data.label_column"),
        (MaskTarget(), ("mask",), "no mask column among image, label, .*expected one of mask"),
        (MaskTarget(column="masks"), (), "mask column=masks: column not found; available: image, label"),
        (BoxTarget(), ("objects",), "no boxes among image, label, mask, caption of the table; expected one of bbox"),
        (TextTarget(), ("caption",), "no caption column among image, .*expected one of text, caption"),
    ],
)
def test_missing_column_is_named(
    target: Target, missing: tuple[str, ...], message: str, table: Callable[..., str]
) -> None:
    with pytest.raises(UserError, match=message):
        opened(table(*missing), target)


def test_synthetic_images_have_no_masks() -> None:
    with pytest.raises(UserError, match="data.source=synthetic: synthetic images have no masks"):
        open_data(DataConfig(source="synthetic"), MaskTarget(), seed=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda encode: b"not an image", "mask cannot be decoded"),
        (lambda encode: encode(np.zeros((12, 16, 3), np.uint8), "png"), "mask has mode RGB; expected one class index"),
        (lambda encode: encode(np.full((12, 16), 300, np.uint16), "png"), "mask has classes 300 to 300"),
        (lambda encode: encode(np.zeros((16, 12), np.uint8), "png"), "mask is 16x12 pixels, the image 12x16"),
    ],
)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_unreadable_mask_is_handled_like_an_unreadable_image(
    make: Callable[[Encode], bytes],
    message: str,
    on_error: str,
    encode: Encode,
    table: Callable[..., str],
    eval_loader: Callable[..., EvalLoader],
) -> None:
    _, masks = images_and_masks(encode, 20)
    masks[7] = stored(make(encode))
    data = opened(table(masks=masks), MaskTarget())
    loader = eval_loader(data.train, target=MaskTarget(), on_error=on_error, batch=20)
    if on_error == "raise":
        with pytest.raises(UserError, match=f"row 7 of .*: {message}.*data.on_error=skip"):
            list(loader)
        return
    (batch,) = loader
    assert batch.real.tolist() == [i != 7 for i in range(20)]
    assert (batch.target["mask"][7] == IGNORE_INDEX).all()
    assert message in loader.problems.first[0].reason


def test_palette_indices_are_classes(encode: Encode) -> None:
    from PIL import Image

    classes = np.array([[0, 1], [2, 1]], np.uint8)
    mask = Image.fromarray(classes, mode="P")
    mask.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
    assert decode_mask(encode(mask, "png")).tolist() == classes.tolist()
    assert decode_mask(classes.astype(np.int64)).tolist() == classes.tolist()
    with pytest.raises(UnreadableImage, match="has no mask"):
        decode_mask(None)


def test_masks_follow_images_that_the_cache_shrank() -> None:
    mask = np.zeros((40, 60), np.uint8)
    mask[:20] = 3
    geometry = center_geometry((20, 30), (20, 30), (20, 30), "bilinear")
    moved = MaskTarget().move(mask, geometry)
    assert moved.shape == (20, 30)
    assert (moved[:10] == 3).all()
    assert (moved[10:] == 0).all()


@pytest.mark.parametrize("target", [MaskTarget(), BoxTarget()], ids=lambda target: target.kind)
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rand_augment": "rand-m9"}, "augment.rand_augment=rand-m9"),
        ({"rand_magnitude": 9.0}, "augment.rand_magnitude"),
    ],
)
def test_rand_augment_that_moves_pixels_is_rejected(target: Target, options: dict[str, Any], named: str) -> None:
    transform = TrainTransform(AugmentConfig(**options), (8, 8), (0.5,), (0.25,))
    with pytest.raises(UserError, match=f"{named}.*: Rotate, ShearX, .* move pixels but not {target.kind}") as error:
        check_transform(target, transform)
    assert "\n" not in str(error.value)
    check_transform(ClassTarget(), transform)
    color_only = TrainTransform(AugmentConfig(rand_augment="rand-t3a"), (8, 8), (0.5,), (0.25,))
    check_transform(target, color_only)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.kind)
def test_targets_and_their_sources_can_be_sent_to_workers(target: Target, table: Callable[..., str]) -> None:
    source = opened(table(), target).train
    value = source.read_target(5)
    copy = pickle.loads(pickle.dumps((target, source)))
    assert copy[0] == target
    assert str(copy[1].read_target(5)) == str(value) == str(source.read(5).target)


def test_classes_do_not_import_torchvision() -> None:
    code = "import sys, vit_scale.data.loading.loaders, vit_scale.data.data; print('torchvision' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
