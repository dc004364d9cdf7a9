"""Clipping equals torch's, and nothing non-finite reaches weights or optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from vit_scale.config import OptimConfig
from vit_scale.strategies.ema import Ema
from vit_scale.strategies.guarded_step import _undoable_step, guarded_step
from vit_scale.strategies.replicated import PlainEngine
from vit_scale.train.optim.optimizer import build_optimizer, parameter_groups, set_learning_rate
from vit_scale.train.state import TrainState


class Model(nn.Linear):
    def no_weight_decay(self) -> set[str]:
        return set()


def state_of(model: nn.Module, **options: object) -> TrainState:
    return TrainState(PlainEngine(model, build_optimizer(model, OptimConfig(**options))))  # type: ignore[arg-type]


def take_step(state: TrainState) -> torch.Tensor:
    norm = state.engine.step(clip_norm=1.0)
    state.count_skipped(norm)
    return norm


def backward(model: nn.Module, scale: float = 1.0) -> None:
    torch.manual_seed(1)
    (scale * model(torch.randn(4, 3)).square().sum()).backward()


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb"])
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_clipped_step_equals_torch_clipping(name: str, scale: float) -> None:
    torch.manual_seed(0)
    model = Model(3, 2)
    twin = copy.deepcopy(model)
    optimizer = build_optimizer(model, OptimConfig(name=name, lr=0.1))
    reference = build_optimizer(twin, OptimConfig(name=name, lr=0.1))
    for _ in range(3):
        backward(model, scale)
        norm = guarded_step(optimizer, 1.0)
        backward(twin, scale)
        theirs = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        reference.step()
        reference.zero_grad()
        torch.testing.assert_close(norm, theirs)
        torch.testing.assert_close(model.weight, twin.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_non_finite_gradient_changes_nothing_and_is_counted(name: str, poison: float) -> None:
    model = Model(3, 2)
    state = state_of(model, name=name, lr=0.1)
    backward(model)
    take_step(state)
    before = copy.deepcopy((model.state_dict(), state.engine.optimizer.state_dict()["state"]))
    for expected in (1, 2):
        backward(model)
        model.weight.grad[0, 0] = poison
        take_step(state)
        assert (state.skipped_steps.item(), state.consecutive_skipped_steps.item()) == (expected, expected)
    after = (model.state_dict(), state.engine.optimizer.state_dict()["state"])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    backward(model)
    take_step(state)
    assert (state.skipped_steps.item(), state.consecutive_skipped_steps.item()) == (2, 0)
    assert not torch.equal(model.weight, before[0]["weight"])
    assert model.weight.isfinite().all()


@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize("name", ["sgd", "lamb", "lion"])
def test_step_undone_on_the_device_equals_checking_first(name: str, good: bool) -> None:
    model = Model(3, 2)
    checked, undone = state_of(model, name=name), state_of(copy.deepcopy(model), name=name)
    for state in (checked, undone):
        backward(state.model)
        take_step(state)
        backward(state.model)
    grads = [p.grad for p in undone.model.parameters()]
    if good:
        checked.engine.optimizer.step()
    else:
        grads[0][0, 0] = float("nan")  # type: ignore[index]
    _undoable_step(undone.engine.optimizer, grads, torch.tensor(good))  # type: ignore[arg-type]
    for ours, theirs in zip(
        checked.engine.optimizer.state.values(), undone.engine.optimizer.state.values(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    torch.testing.assert_close(checked.model.state_dict(), undone.model.state_dict(), rtol=0, atol=0)


def test_undoing_a_step_takes_as_many_kernels_for_many_tensors_as_for_few() -> None:
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            # Views and empty tensors start no kernel.
            self.calls += func.overloadpacket.__name__ not in ("view", "detach", "empty_like")
            return func(*args, **(kwargs or {}))

    counts = []
    for tensors in (2, 20):
        params = [nn.Parameter(torch.ones(3)) for _ in range(tensors)]
        for p in params:
            p.grad = torch.ones(3)
        optimizer = torch.optim.SGD(params, lr=0.1)
        optimizer.step = lambda: None  # type: ignore[assignment,method-assign]
        with Count() as count:
            _undoable_step(optimizer, [p.grad for p in params], torch.tensor(True))  # type: ignore[misc]
        counts.append(count.calls)
    assert counts[0] == counts[1] < 12


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "lion"])
def test_step_on_a_gpu_never_synchronizes_with_the_host(name: str) -> None:
    """Fake tensors have a device and no content: reading one, as a host synchronization would, is an error."""
    with FakeTensorMode():
        model = Model(3, 2, device="cuda")
        state = state_of(model, name=name)
        state.skipped_steps, state.consecutive_skipped_steps = (torch.zeros((), device="cuda") for _ in range(2))
        state.ema = Ema(state.engine.shards, 0.9, warmup=True)
        for step in range(3):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            norm = take_step(state)
            state.ema.update(step)
        assert norm.device.type == "cuda"
        with pytest.raises(DataDependentOutputException):
            norm.item()


def test_vectors_and_named_parameters_are_not_decayed() -> None:
    import vit_scale

    model = vit_scale.create_model("vit_mu", layer_scale=1e-4)
    names = {p: n for n, p in model.named_parameters()}
    groups = parameter_groups(model, OptimConfig(weight_decay=0.3))
    undecayed = {names[p] for g in groups if g["weight_decay"] == 0 for p in g["params"]}
    assert {"cls_token", "pos_embed", "blocks.0.ls1.gamma", "blocks.0.norm1.weight", "head.bias"} <= undecayed
    assert {"blocks.0.attn.qkv.weight", "head.weight", "patch_embed.proj.weight"}.isdisjoint(undecayed)
    assert sum(len(g["params"]) for g in groups) == len(names)


def test_layer_decay_falls_from_head_to_patches() -> None:
    import vit_scale

    model = vit_scale.create_model("vit_mu", layer_scale=1e-4)
    names = {p: n for n, p in model.named_parameters()}
    groups = parameter_groups(model, OptimConfig(layer_decay=0.5))
    scale = {names[p]: g["lr_scale"] for g in groups for p in g["params"]}
    assert scale["head.weight"] == 1.0
    assert scale["blocks.1.ls1.gamma"] == 2 * scale["blocks.0.ls1.gamma"]
    assert scale["blocks.0.attn.qkv.weight"] == 2 * scale["patch_embed.proj.weight"]
    assert scale["cls_token"] == scale["pos_embed"] == scale["patch_embed.proj.weight"]


def test_set_learning_rate_applies_the_scale_of_each_group() -> None:
    optimizer = torch.optim.SGD(
        [
            {"params": [nn.Parameter(torch.zeros(1))], "lr_scale": 1.0},
            {"params": [nn.Parameter(torch.zeros(1))], "lr_scale": 0.25},
        ],
        lr=1.0,
    )
    set_learning_rate(optimizer, 0.4)
    assert [group["lr"] for group in optimizer.param_groups] == [0.4, 0.1]
