"""Frozen layers: no gradient, nothing saved, deterministic, and no changed statistics."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from vit_scale.errors import UserError
from vit_scale.kernels import cpu
from vit_scale.models import create_model
from vit_scale.models.weights.freeze import untrained_backbone_warning

SHAPE = {"depth": 4, "img_size": 32, "patch_size": 8, "num_classes": 3}
EMBEDDING = {"cls_token", "pos_embed", "patch_embed"}


def trained(model: nn.Module) -> set[str]:
    """The parts with a trained parameter: the first component of its name, and the number of a block."""
    names = [name.split(".") for name, p in model.named_parameters() if p.requires_grad]
    return {".".join(name[:2] if name[0] == "blocks" else name[:1]) for name in names}


@pytest.mark.parametrize(
    ("freeze", "expected"),
    [
        ("none", EMBEDDING | {"blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm", "head"}),
        (0, {"blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm", "head"}),
        (3, {"blocks.3", "norm", "head"}),
        (4, {"norm", "head"}),
        ("all", {"head"}),
    ],
)
def test_embedding_and_leading_blocks_are_frozen(freeze: str | int, expected: set[str]) -> None:
    assert trained(create_model("vit_mu", freeze=freeze, **SHAPE)) == expected


@pytest.mark.parametrize(
    ("name", "freeze", "expected"),
    [
        ("test_vit", 3, {"blocks.3", "blocks.4", "blocks.5", "norm", "head"}),
        ("test_vit", "all", {"head"}),
        ("resnet18", 6, {"layer4", "fc"}),
        ("resnet18", "all", {"fc"}),
    ],
)
def test_layers_of_timm_models_are_frozen(name: str, freeze: str | int, expected: set[str]) -> None:
    assert trained(create_model(f"timm/{name}", freeze=freeze)) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "vit_mu", "freeze": 3}, "model.freeze = 3: the model has 2 blocks; use 0 to 2, all or none"),
        ({"name": "timm/resnet18", "freeze": 9}, "model.freeze = 9: the model has 8 blocks"),
    ],
)
def test_more_than_there_is_cannot_be_frozen(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        create_model(**options)


def saved_by_depth(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of activations that autograd keeps alive after a forward pass, with every kernel in use."""
    monkeypatch.setattr(cpu, "WORTHWHILE_MACS", 0)
    monkeypatch.setattr(cpu, "WORTHWHILE_ELEMENTS", 0)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def record(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        outputs = model(torch.rand(8, 3, 32, 32))
    assert outputs.requires_grad
    return sum(saved.values())


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("options", [{}, {"kernel": "explicit"}, {"drop_path": 0.5, "dropout": 0.1}], ids=str)
def test_frozen_layers_save_nothing_for_the_backward_pass(
    options: dict, checkpointing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {}
    for freeze in ("none", 2, "all"):
        model = create_model("vit_mu", freeze=freeze, pool="mean", **SHAPE, **options).train()
        model.set_activation_checkpointing(checkpointing)  # type: ignore[operator]
        sizes[freeze] = saved_by_depth(model, monkeypatch)
    features = 8 * model.embed_dim * 4
    assert sizes["all"] == features, "the input of the head"
    assert sizes[2] < 0.65 * sizes["none"]


def test_input_of_the_first_trained_block_needs_no_gradient() -> None:
    model = create_model("vit_mu", freeze=2, **SHAPE)
    needed = []
    for block in model.blocks:  # type: ignore[union-attr]
        block.register_forward_pre_hook(lambda _, inputs: needed.append(inputs[0].requires_grad))
    model(torch.rand(2, 3, 32, 32))
    assert needed == [False, False, False, True]


def test_frozen_blocks_are_deterministic_and_others_are_not() -> None:
    model = create_model("vit_mu", freeze=2, dropout=0.2, drop_path=0.5, drop_path_schedule="uniform", **SHAPE)
    model.eval().train()
    x = torch.rand(4, 3, 32, 32)
    (_, second, *_, last), (_, again, *_, other) = (model.forward_intermediates(x) for _ in range(2))
    assert torch.equal(second, again)
    assert not torch.equal(last, other)


def test_batch_norm_statistics_of_frozen_layers_stay_fixed() -> None:
    model = create_model("timm/resnet18", freeze=4).train()
    before = copy.deepcopy(dict(model.named_buffers()))
    model(torch.rand(2, 3, 64, 64))
    changed = {name for name, value in model.named_buffers() if not torch.equal(value, before[name])}
    assert {name.split(".")[0] for name in changed} == {"layer3", "layer4"}


def test_frozen_random_weights_are_warned_about() -> None:
    warning = untrained_backbone_warning("all", None)
    assert warning is not None
    assert "model.freeze = all without model.weights" in warning
    assert untrained_backbone_warning("all", "timm/resnet18") is None
    assert untrained_backbone_warning("none", None) is None


def test_model_without_frozen_layers_trains_completely() -> None:
    model = create_model("vit_mu", **SHAPE).requires_grad_(False).eval()
    assert all(module.training for module in model.train().modules()), "weights of a loaded run are not `model.freeze`"
