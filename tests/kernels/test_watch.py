"""Shortcuts apply only while no hook or replaced layer observes the model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from vit_scale import kernels
from vit_scale.models import create_model

SUBMODULES = ["patch_embed.proj", "pos_drop", "blocks.0", "blocks.1.attn", "blocks.1.attn.qkv", "blocks.0.mlp.act"]
SUBMODULES += ["blocks.0.drop_path1", "blocks.1.ls2", "norm", "head"]
REGISTER: dict[str, Callable[[nn.Module], object]] = {
    "forward pre-hook": lambda module: module.register_forward_pre_hook(lambda *_: None),
    "forward hook": lambda module: module.register_forward_hook(lambda *_: None),
    "backward pre-hook": lambda module: module.register_full_backward_pre_hook(lambda *_: None),
    "backward hook": lambda module: module.register_full_backward_hook(lambda *_: None),
}


def small() -> nn.Module:
    return create_model("vit_mu", dropout=0.1)


def test_model_without_hooks_uses_shortcuts() -> None:
    model = small()
    assert kernels.choose(model) == kernels.Shortcut()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.eval().double()):  # noqa: S301
        assert kernels.choose(twin) == kernels.Shortcut()


@pytest.mark.parametrize("name", SUBMODULES)
@pytest.mark.parametrize("kind", REGISTER)
def test_hook_on_any_submodule_is_detected_until_it_is_removed(name: str, kind: str) -> None:
    model = small()
    handle = REGISTER[kind](model.get_submodule(name))
    assert kernels.choose(model) is None
    handle.remove()
    assert kernels.choose(model) is not None


@pytest.mark.parametrize("kind", REGISTER)
def test_hook_on_the_model_itself_does_not_disable_shortcuts(kind: str) -> None:
    model = small()
    REGISTER[kind](model)
    assert kernels.choose(model) is not None


def test_global_hooks_are_detected() -> None:
    model = small()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert kernels.choose(model) is None
    finally:
        handle.remove()
    assert kernels.choose(model) is not None


class Doubled(nn.Linear):
    """A custom linear layer."""


def replace_layer(model: nn.Module) -> None:
    model.blocks[0].attn.qkv = Doubled(32, 96)


def wrap_forward(model: nn.Module) -> None:
    mlp = model.blocks[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: 2 * forward(x)


def parametrize(model: nn.Module) -> None:
    torch.nn.utils.parametrize.register_parametrization(model.blocks[0].mlp.fc1, "weight", nn.Identity())


def add_layer(model: nn.Module) -> None:
    model.blocks[0].attn.adapter = nn.Linear(32, 32)


@pytest.mark.parametrize("change", [replace_layer, wrap_forward, parametrize, add_layer])
def test_replaced_wrapped_or_added_layer_is_detected(change: Callable[[nn.Module], None]) -> None:
    model = small()
    change(model)
    assert kernels.choose(model) is None
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_hooks_of_a_strategy_are_accepted_and_other_hooks_are_not() -> None:
    model = small()
    before = model.blocks[0].register_forward_hook(lambda *_: None)
    with kernels.accept_hooks(model):
        for module in model.modules():
            module.register_forward_hook(lambda *_: None)
    assert kernels.choose(model) is None
    before.remove()
    assert kernels.choose(model) == kernels.Shortcut(hooked=True)
    after = model.blocks[0].register_forward_hook(lambda *_: None)
    assert kernels.choose(model) is None
    after.remove()
    assert kernels.choose(model) is not None


def test_compiled_blocks_with_hooks_of_a_strategy_use_the_plain_code() -> None:
    model = small()
    with kernels.accept_hooks(model):
        model.blocks[0].attn.qkv.register_forward_hook(lambda *_: None)
    model.compile_blocks(backend="eager")
    assert kernels.choose(model) is None


def test_environment_variable_and_explicit_kernel_disable_shortcuts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.choose(create_model("vit_mu", kernel="explicit")) is None
    assert kernels.choose(create_model("vit_mu", kernel="math")) is not None
    monkeypatch.setenv("VIT_SCALE_KERNELS", "0")
    assert not kernels.enabled()
    assert kernels.choose(small()) is None


def test_torch_compile_of_the_full_model_traces_the_plain_code() -> None:
    model = create_model("vit_mu").eval()
    x = torch.randn(2, 3, 32, 32)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=0)
