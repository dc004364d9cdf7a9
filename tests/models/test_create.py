"""Construct, initialize, load: three separate steps, and models without a head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from vit_scale.config import ModelConfig
from vit_scale.models import construct_from_config, create_model
from vit_scale.models.create import construct_model
from vit_scale.models.timm_models import create_counterpart
from vit_scale.models.weights.init import init_weights


@pytest.mark.parametrize(
    "options", [{}, {"pool": "mean"}, {"distilled": True}, {"pool": "max", "registers": 2}], ids=str
)
def test_model_without_a_head_returns_the_same_features_as_timm(options: dict) -> None:
    torch.manual_seed(0)
    ours = create_model("vit_mu", num_classes=0, **options).eval()
    timms = create_counterpart(ours.variant).eval()
    timms.load_state_dict(ours.state_dict(), strict=True)
    assert type(ours.head) is nn.Identity
    x = torch.randn(2, 3, 32, 32)
    found = ours(x)
    assert found.shape == (2, 32)
    torch.testing.assert_close(found, timms(x), atol=1e-5, rtol=0)
    torch.testing.assert_close(found, ours.forward_head(ours.forward_features(x), pre_logits=True))


def test_every_parameter_of_a_model_without_a_head_receives_a_gradient() -> None:
    """DDP requires it."""
    model = create_model("vit_mu", num_classes=0).train()
    model(torch.randn(2, 3, 32, 32)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_zero_classes_are_not_inferred_from_the_data() -> None:
    sizes = {"num_classes": 7, "in_chans": 3}
    assert construct_from_config(ModelConfig(name="vit_mu", num_classes=0), **sizes).num_classes == 0
    assert construct_from_config(ModelConfig(name="vit_mu"), **sizes).num_classes == 7
    timms = create_model("timm/vit_tiny_patch16_224", img_size=32, num_classes=0)
    assert timms.num_classes == 0
    assert timms(torch.randn(1, 3, 32, 32)).shape == (1, 192)


@pytest.mark.parametrize("init", ["trunc_normal", "timm", "jax", "kaiming_patch", "whitened"])
@pytest.mark.parametrize("options", [{}, {"mlp": "swiglu", "registers": 2, "pos_embed": "relative"}], ids=str)
def test_weights_do_not_depend_on_how_parameters_are_edited(init: str, options: dict) -> None:
    """Each parameter is complete only inside `editing`, as with ZeRO-3; a seed gives the same weights."""
    torch.manual_seed(0)
    expected = create_model("vit_mu", init=init, **options).state_dict()
    torch.manual_seed(0)
    model = construct_model(ModelConfig(name="vit_mu", init=init, **options))
    whole = {id(parameter): parameter.data for parameter in model.parameters()}
    for parameter in model.parameters():
        parameter.data = torch.empty(0)

    @contextmanager
    def gathered(parameter: Tensor) -> Iterator[Tensor]:
        parameter.data = whole[id(parameter)]
        yield parameter
        parameter.data = torch.empty(0)

    init_weights(model, init, gathered)
    for parameter in model.parameters():
        parameter.data = whole[id(parameter)]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_timm_models_initialize_themselves() -> None:
    model = construct_model(ModelConfig(name="timm/test_vit", num_classes=3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    init_weights(model, "jax")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
