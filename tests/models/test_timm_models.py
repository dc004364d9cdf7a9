"""Any timm model by name: trains unchanged, accepts its own options, and rejects others."""

from __future__ import annotations

import copy

import pytest
import torch

from vit_scale.errors import UserError
from vit_scale.models import create_model

FAMILIES = [
    "swin_tiny_patch4_window7_224",
    "pvt_v2_b0",
    "convnext_atto",
    "mobilevitv2_050",
    "efficientformer_l1",
    "fastvit_t8",
    "deit_tiny_distilled_patch16_224",
    "resnet18",
]


@pytest.mark.parametrize("name", FAMILIES)
def test_timm_model_equals_timms_and_has_our_attributes(name: str) -> None:
    import timm

    with torch.device("meta"):
        model = create_model(f"timm/{name}", num_classes=7, drop_path=0.1)
        timms = timm.create_model(name, num_classes=7)
    assert list(model.state_dict()) == list(timms.state_dict())
    assert isinstance(model, type(timms))
    assert model.num_classes == 7
    assert model.in_chans == 3
    assert model.img_size == tuple(timms.pretrained_cfg["input_size"][1:])
    layers = {model.layer_id(parameter) for parameter, _ in model.named_parameters()}
    assert layers <= set(range(model.num_layers))
    assert max(layers) == model.num_layers - 1 > 0
    vectors = {parameter for parameter, p in model.named_parameters() if p.ndim <= 1}
    assert vectors <= model.no_weight_decay() < {parameter for parameter, _ in model.named_parameters()}
    with torch.device("meta"):
        assert model(torch.empty(2, 3, *model.img_size)).shape == (2, 7)


def test_drop_path_reaches_the_model() -> None:
    model = create_model("timm/vit_tiny_patch16_224", depth=None, drop_path=0.2)
    assert model.blocks[-1].drop_path1.drop_prob == pytest.approx(0.2)


def test_image_size_and_channels_reach_the_model() -> None:
    model = create_model("timm/vit_tiny_patch16_224", img_size=(32, 64), in_chans=1, num_classes=3)
    assert (model.img_size, model.in_chans) == ((32, 64), 1)
    assert model(torch.randn(2, 1, 32, 64)).shape == (2, 3)
    assert create_model("timm/resnet18", img_size=64, num_classes=3).img_size == (64, 64)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vgg11", {"drop_path": 0.1}, "model.drop_path = 0.1.*vgg11"),
        ("efficientformer_l1", {"img_size": 160}, "model.img_size.*efficientformer_l1"),
        ("resnet18", {"layer_scale": 1e-4}, "model.layer_scale"),
        ("resnet18", {"pos_embed": "rope"}, "model.pos_embed"),
        ("resnet18", {"drop_path_schedule": "uniform"}, "model.drop_path_schedule"),
        ("vit_tiny_patch16_224", {"kernel": "math"}, "model.kernel"),
        ("no_such_model", {}, "model.name"),
    ],
)
def test_unsupported_option_is_rejected(name: str, options: dict[str, object], message: str) -> None:
    with torch.device("meta"), pytest.raises(UserError, match=message):
        create_model(f"timm/{name}", **options)


def test_activation_checkpointing_uses_timms() -> None:
    model = create_model("timm/vit_tiny_patch16_224", img_size=32)
    model.set_activation_checkpointing("full")
    assert model.grad_checkpointing
    model.set_activation_checkpointing("none")
    assert not model.grad_checkpointing
    with pytest.raises(UserError, match="selective"):
        model.set_activation_checkpointing("selective")


def test_copy_of_a_timm_model_is_complete() -> None:
    """EMA weights are a deep copy."""
    model = create_model("timm/resnet18", num_classes=3, img_size=64).eval()
    twin = copy.deepcopy(model)
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(twin(x), model(x))
    assert twin.num_layers == model.num_layers
