"""The timm check passes for equal models and names the layer that differs otherwise."""

from __future__ import annotations

import dataclasses
import json

import pytest

from vit_scale.config import ModelConfig
from vit_scale.cost.timm_check import check_against_timm
from vit_scale.errors import UserError
from vit_scale.models.variants import VARIANTS

TINY = "vit_tiny_patch16_224"
TIMM_CLASS_OPTIONS: list[dict] = [
    {"depth": 3},
    {"embed_dim": 128, "num_heads": 4},
    {"patch_size": 32},
    {"patch_size": (16, 32)},
    {"layer_scale": 0.1},
    {"mlp_ratio": 3.0},
    {"mlp": "swiglu"},
    {"qk_norm": True},
    {"qkv_bias": False, "bias": False},
    {"registers": 3},
    {"distilled": True},
    {"pool": "mean"},
    {"pool": "tokens"},
    {"pos_embed": "none"},
]


ARGUMENTS: list[dict] = [{}, {"num_classes": 7}, {"num_classes": 0}, {"in_chans": 1}, {"img_size": (96, 160)}]


@pytest.mark.parametrize("options", ARGUMENTS, ids=str)
def test_timm_arguments_keep_the_model_name(options: dict) -> None:
    check = check_against_timm(ModelConfig(name=TINY, **options))
    assert check.matched == TINY
    assert check.equal, check.differences
    assert check.params == check.timm_params
    assert check.macs == check.timm_macs


@pytest.mark.parametrize("options", TIMM_CLASS_OPTIONS, ids=str)
def test_other_shapes_are_compared_with_the_timm_class(options: dict) -> None:
    check = check_against_timm(ModelConfig(name=TINY, **options))
    assert check.matched == ("VisionTransformerDistilled" if options.get("distilled") else "VisionTransformer")
    assert check.equal, check.differences


MISSING = [{"pos_embed": name} for name in ("rope", "relative", "sincos", "learned_2d")]
MISSING += [{"attention": "window", "window": 7}, {"attention": "linear"}, {"attention": "dilated", "dilation": 2}]


@pytest.mark.parametrize("options", MISSING, ids=str)
def test_missing_counterpart_is_reported(options: dict) -> None:
    check = check_against_timm(ModelConfig(name=TINY, **options))
    assert check.matched is None
    assert next(iter(options.values())) in check.reason
    assert check.reason in check.summary()
    assert not check.equal
    assert not check.differences


def test_shapes_are_reported_per_stage() -> None:
    stages = check_against_timm(TINY, num_classes=7).stages
    assert list(stages) == ["patch_embed", *(f"blocks.{i}" for i in range(12)), "norm", "head"]
    assert stages["patch_embed"].ours == stages["patch_embed"].timm == [(196, 192)]
    assert stages["blocks.11"].ours == [(197, 192)]
    assert stages["head"].ours == [(7,)]


@pytest.mark.parametrize(
    ("wrong", "layer"),
    [
        ({"mlp_ratio": 3.0}, "blocks.0.mlp.fc1.weight: ours (576, 192), timm (768, 192)"),
        ({"depth": 11}, "blocks.11.norm1.weight: ours missing, timm (192,)"),
        ({"layer_scale": 1e-5}, "blocks.0.ls1.gamma: ours (192,), timm missing"),
        ({"patch_size": (8, 8)}, "patch_embed: output: ours [(784, 192)], timm [(196, 192)]"),
        ({"registers": 1}, "reg_token: ours (1, 1, 192), timm missing"),
    ],
    ids=str,
)
def test_wrong_variant_error_names_the_layer(monkeypatch: pytest.MonkeyPatch, wrong: dict, layer: str) -> None:
    monkeypatch.setitem(VARIANTS, TINY, dataclasses.replace(VARIANTS[TINY], **wrong))
    check = check_against_timm(TINY)
    assert check.matched == TINY
    assert layer in check.differences
    assert not check.equal
    assert "differs" in check.summary()


def test_timm_models_are_described_too() -> None:
    check = check_against_timm("timm/resnet18", num_classes=10)
    assert check.matched == "resnet18"
    assert check.equal
    assert check.stages["fc"].timm == [(10,)]
    assert check.params == 11_181_642


def test_result_is_plain_data() -> None:
    tree = json.loads(json.dumps(check_against_timm("vit_mu", num_classes=10).to_dict()))
    assert tree["equal"] is True
    assert tree["stages"]["head"] == {"ours": [[10]], "timm": [[10]]}


def test_unknown_name_is_a_user_error() -> None:
    with pytest.raises(UserError, match="vit_tiny_patch16_224"):
        check_against_timm("vit_tiny_patch16_225")


def test_check_needs_neither_gpu_kernel_nor_weights_file() -> None:
    check = check_against_timm(ModelConfig(name="vit_mu", kernel="cudnn", weights="nowhere.safetensors"))
    assert check.equal
