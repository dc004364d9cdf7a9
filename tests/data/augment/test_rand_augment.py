"""RandAugment has the operations, magnitudes and probabilities of timm."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from PIL import Image, ImageOps

from vit_scale.config import AugmentConfig
from vit_scale.data.augment.rand_augment import MOVING, OPERATIONS, Draw, RandAugment, RandAugmentSpec, parse_spec
from vit_scale.data.draws import uniforms
from vit_scale.errors import UserError

FILL = (124, 116, 104)


def planes(pixels: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.atleast_3d(pixels).transpose(2, 0, 1))


def timm_result(
    monkeypatch: pytest.MonkeyPatch, name: str, magnitude: float, negative: bool, bicubic: bool, image: Image.Image
) -> np.ndarray:
    from timm.data import auto_augment

    monkeypatch.setattr(auto_augment, "_randomly_negate", lambda value: -value if negative else value)
    resample = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    fill = FILL if image.mode == "RGB" else FILL[0]
    hparams = {"img_mean": fill, "interpolation": resample, "magnitude_max": 10}
    return np.asarray(auto_augment.AugmentOp(name, prob=1.0, magnitude=magnitude, hparams=hparams)(image))


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_against_timm_on_photographs(name: str, photographs: list[np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = 2.0 if name in MOVING else 1.0
    for bicubic in (False, True) if name in MOVING else (False,):
        for magnitude, negative in ((2.3, True), (9.0, False), (10.0, True)):
            draw = Draw(negative, bicubic, np.array(FILL, np.uint8))
            for photograph in (*photographs, photographs[0][:32, :40]):
                theirs = timm_result(monkeypatch, name, magnitude, negative, bicubic, Image.fromarray(photograph))
                ours = OPERATIONS[name](planes(photograph), magnitude / 10, draw)
                difference = np.abs(planes(theirs).astype(int) - ours)
                assert difference.mean() <= allowed, (magnitude, negative, bicubic)
                if name not in MOVING:
                    assert difference.max() <= 1
                elif name != "Rotate" or not bicubic:
                    assert difference.mean() < 0.2, "only bicubic rotation uses a different kernel than Pillow"


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_grayscale_against_timm(name: str, photographs: list[np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    gray = np.asarray(Image.fromarray(photographs[1]).convert("L"))
    theirs = timm_result(monkeypatch, name, 9.0, False, False, Image.fromarray(gray))
    ours = OPERATIONS[name](planes(gray), 0.9, Draw(False, False, np.array(FILL[:1], np.uint8)))
    assert np.abs(planes(theirs).astype(int) - ours).mean() <= 0.2


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize("bicubic", [False, True])
def test_small_color_images_move_like_their_planes(name: str, bicubic: bool, photographs: list[np.ndarray]) -> None:
    x = planes(photographs[2][:32, :40])
    together = OPERATIONS[name](x, 0.9, Draw(True, bicubic, np.array(FILL, np.uint8)))
    for plane, moved, level in zip(x, together, FILL, strict=True):
        alone = OPERATIONS[name](plane[None].copy(), 0.9, Draw(True, bicubic, np.array([level], np.uint8)))
        assert np.array_equal(moved, alone[0])


@pytest.mark.parametrize("name", list(OPERATIONS))
@pytest.mark.parametrize("level", [0, 9, 255])
def test_constant_images_stay_constant(name: str, level: int) -> None:
    x = np.full((3, 8, 8), level, np.uint8)
    out = OPERATIONS[name](x, 0.9, Draw(False, True, np.full(3, level, np.uint8)))
    assert len(np.unique(out)) == 1
    if name in (*MOVING, "AutoContrast", "Equalize"):
        assert np.array_equal(out, x)


@pytest.mark.parametrize("name", list(OPERATIONS))
@pytest.mark.parametrize("shape", [(3, 1, 1), (3, 2, 5), (1, 8, 8), (5, 16, 16)])
def test_operations_work_at_any_size_and_number_of_channels(name: str, shape: tuple[int, int, int]) -> None:
    x = np.arange(math.prod(shape), dtype=np.uint8).reshape(shape)
    before = x.copy()
    for bicubic in (False, True):
        draw = Draw(True, bicubic, np.full(shape[0], 7, np.uint8))
        out = OPERATIONS[name](x, 0.9, draw)
        assert out.shape == shape
        assert out.dtype == np.uint8
    assert np.array_equal(x, before), "the input is not modified"


@pytest.mark.parametrize("name", list(OPERATIONS))
@pytest.mark.filterwarnings("error")
def test_read_only_images_give_no_warning(name: str) -> None:
    x = np.zeros((3, 96, 96), np.uint8)
    x.flags.writeable = False
    assert OPERATIONS[name](x, 0.5, Draw(False, False, np.array(FILL, np.uint8))).shape == x.shape


@pytest.mark.parametrize(
    "spec",
    ["rand-m9-mstd0.5-inc1", "rand-n2-m10", "rand-m7-n3-p0.8", "rand-mstd101-m5", "rand-m12-mmax15", "rand-tweights"],
)
def test_specs_are_parsed_as_in_timm(spec: str) -> None:
    from timm.data.auto_augment import rand_augment_transform

    theirs = rand_augment_transform(spec, {})
    parsed = parse_spec(AugmentConfig(rand_augment=spec))
    assert parsed is not None
    operation = theirs.ops[0]
    assert parsed.layers == theirs.num_layers
    assert parsed.probability == operation.prob
    assert parsed.magnitude == operation.magnitude
    assert parsed.magnitude_std == operation.magnitude_std
    assert parsed.magnitude_max == (operation.magnitude_max or 10)
    ours = RandAugment(parsed, "random", np.zeros(3, np.uint8))
    assert Counter(ours.weights or ours.names).keys() == Counter(op.name for op in theirs.ops).keys()
    if theirs.choice_weights is not None:
        weights = dict(zip((op.name for op in theirs.ops), theirs.choice_weights, strict=True))
        total = sum(ours.weights.values())
        assert {name: weight / total for name, weight in ours.weights.items()} == pytest.approx(weights)


@pytest.mark.parametrize("spec", ["rand-t3a-m5", "rand-t3aw"])
def test_three_augment_sets_match_timm(spec: str) -> None:
    from timm.data.auto_augment import rand_augment_transform

    theirs = rand_augment_transform(spec, {})
    ours = RandAugment(parse_spec(AugmentConfig(rand_augment=spec)), "random", np.zeros(3, np.uint8))
    assert set(ours.weights or ours.names) == {op.name for op in theirs.ops}


def test_fields_equal_a_spec() -> None:
    by_fields = AugmentConfig(rand_magnitude=9.0, rand_layers=3, rand_magnitude_std=0.5, rand_increasing=True)
    assert parse_spec(by_fields) == parse_spec(AugmentConfig(rand_augment="rand-m9-n3-mstd0.5-inc1"))
    assert parse_spec(AugmentConfig()) is None


@pytest.mark.parametrize(
    ("spec", "named"),
    [("rand-m9-x3", "x3"), ("augmix-m3", "augmix"), ("rand-p2", "p2"), ("rand-n0", "n0"), ("rand-tbest", "tbest")],
)
def test_invalid_spec_names_its_section(spec: str, named: str) -> None:
    with pytest.raises(UserError, match=rf"augment.rand_augment={spec}: invalid section `{named}`"):
        parse_spec(AugmentConfig(rand_augment=spec))


def test_spec_and_fields_are_mutually_exclusive() -> None:
    with pytest.raises(UserError, match="mutually exclusive"):
        parse_spec(AugmentConfig(rand_augment="rand-m9", rand_magnitude=5.0))


def test_operations_are_drawn_and_applied_as_often_as_in_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RandAugmentSpec(magnitude=9, layers=2, magnitude_std=0.5, increasing=True)
    augment = RandAugment(spec, "random", np.zeros(1, np.uint8))
    counts: Counter[str] = Counter()
    levels, bicubics = [], []

    def count(name: str):
        def operation(x, level, draw):
            counts[name] += 1
            levels.append(level)
            bicubics.append(draw.bicubic)
            return x

        return operation

    for name in augment.names:
        monkeypatch.setitem(OPERATIONS, name, count(name))
    rows = uniforms(0, np.arange(6000), augment.slots)
    for row in rows.tolist():
        augment(np.zeros((1, 2, 2), np.uint8), row)
    assert sum(counts.values()) == pytest.approx(6000, rel=0.05), "two layers, each with probability 0.5"
    assert min(counts.values()) > 300
    assert max(counts.values()) < 500
    assert np.mean(levels) == pytest.approx(0.9, abs=0.01)
    assert max(levels) == 1.0
    assert np.mean(bicubics) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("spec", ["rand-m9-mstd0.5-inc1", "rand-m9-n4-p0.7", "rand-n20-tweights", "rand-t3a"])
def test_images_in_groups_equal_images_one_by_one(spec: str, photographs: list[np.ndarray]) -> None:
    augment = RandAugment(parse_spec(AugmentConfig(rand_augment=spec)), "random", np.array(FILL, np.uint8))
    images = [planes(photographs[i % 6][i : i + 32, :32]) for i in range(20)]
    before = [x.copy() for x in images]
    rows = uniforms(0, np.arange(20), augment.slots).tolist()
    together = augment.change(images, rows)
    for x, u, changed in zip(images, rows, together, strict=True):
        assert np.array_equal(augment(x, u), changed)
    assert all(map(np.array_equal, images, before)), "the inputs are not modified"


def test_weighted_sets_are_drawn_without_replacement() -> None:
    augment = RandAugment(RandAugmentSpec(layers=5, choices="weights"), "random", np.zeros(3, np.uint8))
    for row in uniforms(0, np.arange(200), augment.slots).tolist():
        names = augment.choose(row)
        assert len(set(names)) == 5
    first = Counter(augment.choose(row)[0] for row in uniforms(1, np.arange(4000), augment.slots).tolist())
    assert first["Rotate"] / 4000 == pytest.approx(3 / sum(augment.weights.values()), abs=0.03)


def test_posterize_to_zero_bits_works_with_pillow_13(monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(image, bits):
        raise ValueError("bits must be between 1 and 8")

    monkeypatch.setattr(ImageOps, "posterize", reject)
    x = np.arange(48, dtype=np.uint8).reshape(3, 4, 4)
    draw = Draw(False, False, np.zeros(3, np.uint8))
    assert not OPERATIONS["PosterizeIncreasing"](x, 1.0, draw).any(), "zero bits are black"
    assert np.array_equal(OPERATIONS["Posterize"](x * 5, 0.99, draw), x * 5 & 0b11100000)


@pytest.mark.parametrize(("spec", "moving"), [("rand-m9", MOVING), ("rand-tweights", MOVING), ("rand-t3a", ())])
def test_operations_that_move_pixels_are_named(spec: str, moving: tuple[str, ...]) -> None:
    augment = RandAugment(parse_spec(AugmentConfig(rand_augment=spec)), "random", np.zeros(3, np.uint8))
    assert augment.moving == moving
