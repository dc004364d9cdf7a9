"""The table of variants: exact parameter counts, timm's names and shapes, and errors for unknown names."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from vit_scale.errors import UserError
from vit_scale.models import VARIANTS, check_model_name, create_model
from vit_scale.models.layers.dropout import Dropout
from vit_scale.models.timm_models import create_counterpart
from vit_scale.models.variants import pixel_statistics

PARAMETERS = {
    "vit_tiny_patch16_224": 5_717_416,
    "vit_small_patch32_224": 22_878_952,
    "vit_small_patch16_224": 22_050_664,
    "vit_small_patch16_384": 22_196_584,
    "vit_base_patch32_224": 88_224_232,
    "vit_base_patch16_224": 86_567_656,
    "vit_base_patch16_384": 86_859_496,
    "vit_large_patch16_224": 304_326_632,
    "vit_large_patch14_224": 304_203_752,
    "vit_huge_patch14_224": 632_045_800,
    "vit_giant_patch14_224": 1_012_611_432,
    "deit3_small_patch16_224": 22_059_496,
    "deit3_base_patch16_224": 86_585_320,
    "deit3_large_patch16_224": 304_374_760,
    "vit_cifar_small": 5_362_762,
    "vit_cifar_base": 21_342_346,
    "vit_cifar_large": 75_722_250,
    "vit_cifar_512x6": 19_028_490,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    with torch.device("meta"):
        model = create_model(name)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_has_timms_parameter_names_and_shapes(name: str) -> None:
    with torch.device("meta"):
        ours, timms = create_model(name), create_counterpart(VARIANTS[name])
    assert shapes(ours) == shapes(timms)


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {key: tuple(p.shape) for key, p in model.named_parameters()}


def test_variants_named_in_timm_are_in_timm_and_expect_the_same_pixels() -> None:
    import timm
    from timm.models import get_pretrained_cfg

    named = {name: variant for name, variant in VARIANTS.items() if variant.timm_name is not None}
    assert set(named) <= set(timm.list_models())
    unnamed_here = [name for name in VARIANTS if name not in named and name in timm.list_models()]
    assert unnamed_here == []
    for name, variant in named.items():
        published = get_pretrained_cfg(name)
        assert variant.img_size == tuple(published.input_size[1:]), name
        assert pixel_statistics(name) == (tuple(published.mean), tuple(published.std)), name


def test_32_pixel_family_has_ten_classes_and_dropout() -> None:
    for name in ("vit_cifar_small", "vit_cifar_base", "vit_cifar_large", "vit_cifar_512x6"):
        assert (VARIANTS[name].num_classes, VARIANTS[name].dropout, VARIANTS[name].img_size) == (10, 0.1, (32, 32))
    model = create_model("vit_cifar_small", depth=1)
    rates = [module.rate for module in model.modules() if isinstance(module, Dropout)]
    assert rates == [0.1] * 4
    assert not any(isinstance(m, Dropout) for m in create_model("vit_cifar_small", depth=1, dropout=0).modules())


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match="model.name.*vit_smal_patch16_224.*vit_small_patch16_224"):
        check_model_name("vit_smal_patch16_224")
    with pytest.raises(UserError, match="model.name.*resnet5O.*resnet50"):
        check_model_name("timm/resnet5O")
    with pytest.raises(UserError, match="model.name.*resnet50.a1_in2k.*resnet50.a1_in1k"):
        check_model_name("timm/resnet50.a1_in2k")
    check_model_name("timm/resnet50.a1_in1k")
    with pytest.raises(UserError, match="model.name"):
        create_model("qqq")


def test_names_are_checked_without_torch_or_timm() -> None:
    code = (
        "import sys; from vit_scale.models import check_model_name; check_model_name('vit_mu'); "
        "assert not {'torch', 'timm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_options_and_invalid_values_are_reported() -> None:
    with pytest.raises(TypeError, match="drop_pth.*drop_path"):
        create_model("vit_mu", drop_pth=0.1)
    with pytest.raises(UserError, match="model.drop_path = 1.5"):
        create_model("vit_mu", drop_path=1.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"img_size": 30}, "model.img_size.*24 or 32"),
        ({"num_heads": 3}, "model.num_heads = 3 does not divide"),
        ({"pos_embed": "rope", "num_heads": 16}, "model.pos_embed = rope"),
        ({"pos_embed": "sincos", "embed_dim": 6}, "model.pos_embed = sincos"),
        ({"class_token": False}, "model.pool = cls"),
        ({"distilled": True, "pool": "mean"}, "model.distilled"),
    ],
)
def test_contradictory_options_are_rejected(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        create_model("vit_mu", **options)


def test_construct_from_config_infers_classes_and_channels_from_the_data_by_default() -> None:
    from vit_scale.config import ModelConfig
    from vit_scale.models import construct_from_config

    model = construct_from_config(ModelConfig(name="vit_mu"), num_classes=7, in_chans=1)
    assert (model.num_classes, model.in_chans, model.head.out_features) == (7, 1, 7)
    model = construct_from_config(ModelConfig(name="vit_mu", num_classes=5), num_classes=7, in_chans=3)
    assert model.head.out_features == 5
