"""Composite answers for its backbone, and its weights go into plain models and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vit_scale.config import OptimConfig
from vit_scale.models import create_model
from vit_scale.models.composite import Composite
from vit_scale.models.interface import backbone_of
from vit_scale.models.weights.load import load_weights
from vit_scale.train.optim.optimizer import parameter_groups


class WithHead(Composite):
    def __init__(self, backbone: nn.Module) -> None:
        super().__init__(backbone)
        self.head = nn.Linear(16, 10)
        self.blocks = nn.ModuleList([nn.Linear(16, 16)])

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.head(self.backbone(x_BCHW))


@pytest.fixture(params=["vit_mu", "timm/test_vit"])
def composite(request: pytest.FixtureRequest) -> WithHead:
    return WithHead(create_model(request.param, num_classes=0))


def groups_by_name(model: nn.Module, config: OptimConfig) -> dict[str, tuple]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        names[id(p)]: (group["weight_decay"], group["lr_scale"], group.get("matrices", False))
        for group in parameter_groups(model, config)
        for p in group["params"]
    }


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_backbone_is_optimized_as_without_its_composite(composite: WithHead, optimizer: str) -> None:
    config = OptimConfig(name=optimizer, lr=0.01, layer_decay=0.5, weight_decay=0.1)
    alone = groups_by_name(backbone_of(composite), config)
    together = groups_by_name(composite, config)
    assert {name: together[f"backbone.{name}"] for name in alone} == alone
    assert any(matrices for _, _, matrices in together.values()) == (optimizer == "muon")


def test_added_layers_are_as_deep_as_the_head_and_decayed_except_for_vectors(composite: WithHead) -> None:
    groups = groups_by_name(composite, OptimConfig(layer_decay=0.5, weight_decay=0.1))
    assert groups["head.weight"] == (0.1, 1.0, False)
    assert groups["head.bias"] == (0.0, 1.0, False)


def test_attributes_are_those_of_the_backbone(composite: WithHead) -> None:
    for name in ("num_classes", "in_chans", "img_size", "patch_size", "num_layers"):
        assert getattr(composite, name) == getattr(composite.backbone, name)


def test_composite_weights_load_into_a_plain_model(tmp_path: Path) -> None:
    composite = WithHead(create_model("vit_mu", num_classes=0))
    save_file(composite.state_dict(), tmp_path / "model.safetensors")
    plain = create_model("vit_mu", num_classes=10)
    head = plain.head.weight.clone()
    report = load_weights(plain, tmp_path / "model.safetensors")
    assert sorted(report.kept) == sorted(composite.backbone.state_dict())
    assert set(report.initialized) == {"head.weight", "head.bias"}
    assert torch.equal(plain.head.weight, head), "the head of the composite is another layer"
    assert set(report.skipped) == {f"composite.{n}" for n in composite.state_dict() if not n.startswith("backbone.")}


def test_plain_weights_load_into_a_backbone(tmp_path: Path) -> None:
    plain = create_model("vit_mu", num_classes=10)
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    composite = WithHead(create_model("vit_mu", num_classes=0))
    report = load_weights(backbone_of(composite), tmp_path / "model.safetensors")
    assert set(report.skipped) == {"head.weight", "head.bias"}
    assert all(torch.equal(t, plain.state_dict()[name]) for name, t in composite.backbone.state_dict().items())
