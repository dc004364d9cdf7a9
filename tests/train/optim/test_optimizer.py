"""The optimizers take the same steps as torch's, without importing torch's compiler."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

import vit_scale
from vit_scale.config import OptimConfig
from vit_scale.errors import UserError
from vit_scale.train.optim.optimizer import build_optimizer, parameter_groups

ADAMW = OptimConfig(name="adamw", lr=0.01, layer_decay=0.9)
SGD = OptimConfig(name="sgd", lr=0.01)


def torchs_own(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    groups = parameter_groups(model, config)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=True)


def set_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def assert_same_state(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    one, other = ours.state_dict(), theirs.state_dict()
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for mine, its in zip(one["state"].values(), other["state"].values(), strict=True):
        assert mine.keys() == its.keys()
        assert all(torch.equal(mine[key], its[key]) for key in mine)


@pytest.mark.parametrize(
    ("config", "scaled"), [(ADAMW, False), (ADAMW, True), (SGD, False)], ids=["adamw", "adamw scaled", "sgd"]
)
def test_steps_are_bit_identical_to_torchs(config: OptimConfig, scaled: bool) -> None:
    """`scaled`: gradients are divided and a step is skipped by the kernel, as fused ones can."""
    model = vit_scale.create_model("vit_mu")
    twin = copy.deepcopy(model)
    pairs = [(model, build_optimizer(model, config)), (twin, torchs_own(twin, config))]
    for step in range(5):
        for each, optimizer in pairs:
            set_gradients(each, step)
            if scaled:
                optimizer.grad_scale = torch.tensor(3.0)  # type: ignore[attr-defined]
                optimizer.found_inf = torch.tensor(float(step == 2))  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            assert all(parameter.grad is None for parameter in each.parameters())
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True))
    assert_same_state(pairs[0][1], pairs[1][1])


@pytest.mark.parametrize("config", [ADAMW, SGD], ids=lambda config: config.name)
def test_state_dicts_load_both_ways(config: OptimConfig) -> None:
    model = vit_scale.create_model("vit_mu")
    twin = copy.deepcopy(model)
    ours, theirs = build_optimizer(model, config), torchs_own(twin, config)
    set_gradients(model, 0)
    ours.step()
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert_same_state(ours, theirs)
    again = build_optimizer(model, config)
    again.load_state_dict(theirs.state_dict())
    assert_same_state(again, theirs)


@pytest.mark.parametrize("config", [ADAMW, SGD], ids=lambda config: config.name)
def test_hooks_and_closures_are_called(config: OptimConfig) -> None:
    model = vit_scale.create_model("vit_mu")
    optimizer = build_optimizer(model, config)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))

    def closure() -> float:
        assert torch.is_grad_enabled()
        called.append("closure")
        set_gradients(model, 0)
        return 0.5

    assert isinstance(optimizer, getattr(torch.optim, type(optimizer).__name__))
    assert optimizer.step(closure) == 0.5
    assert called == ["before", "closure", "after"]


STEPPING = """
import sys
import torch
from vit_scale import create_model
from vit_scale.config import OptimConfig
from vit_scale.errors import UserError
from vit_scale.train.optim.optimizer import build_optimizer

model = create_model("vit_mu")
for name in ("adamw", "sgd"):
    optimizer = build_optimizer(model, OptimConfig(name=name))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
assert "torch._dynamo" not in sys.modules
"""


def test_stepping_does_not_import_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", STEPPING], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_model_without_anything_to_train_is_rejected() -> None:
    with pytest.raises(UserError, match="model.freeze = all: nothing is left to train"):
        build_optimizer(vit_scale.create_model("vit_mu", freeze="all", num_classes=0), OptimConfig())


def test_frozen_parameters_are_in_no_group() -> None:
    model = vit_scale.create_model("vit_mu", freeze=1)
    grouped = {p for group in parameter_groups(model, OptimConfig()) for p in group["params"]}
    assert grouped == {p for name, p in model.named_parameters() if name.startswith(("blocks.1.", "norm.", "head."))}
