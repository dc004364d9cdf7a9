"""One step: equal to a reference, independent of the micro-batches, and without host synchronization."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from vit_scale.config import Config
from vit_scale.data.batch import Batch, DataInfo
from vit_scale.models.weights.init import init_weights
from vit_scale.recipe import load_recipe
from vit_scale.schedule import Plan, make_plan
from vit_scale.strategies.ema import Ema
from vit_scale.strategies.replicated import PlainEngine
from vit_scale.tasks.classify.classification import Classification
from vit_scale.train.optim.optimizer import build_optimizer
from vit_scale.train.state import TrainState
from vit_scale.train.update import seed_everything, update

INFO = DataInfo(images=64, in_chans=1, class_names=tuple("0123456789"))
OPTIONS = ["augment.progressive=[]", "model.drop_path=0", "batch.micro=16"]


@pytest.fixture
def config(root: Path) -> Config:
    return load_recipe(root / "recipes/debug.yaml", OPTIONS)


def plan_of(config: Config) -> Plan:
    return make_plan(config, train_images=64, processes=1, device="cpu")


def task_and_state(config: Config) -> tuple[Classification, TrainState]:
    torch.manual_seed(0)
    task = Classification(config, INFO, plan_of(config))
    model = task.build()
    init_weights(model, config.model.init)
    engine = PlainEngine(model, build_optimizer(model, config.optim))
    return task, TrainState(engine, Ema(engine.shards, 0.9, warmup=True))


def batches_of(*sizes: int) -> list[Batch]:
    """The same 32 images in micro-batches of these sizes."""
    images = torch.randint(0, 256, (32, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    parts = zip(images.split(sizes), torch.arange(32).split(sizes), strict=True)
    return [Batch(part, {"label": positions % 10}, positions) for part, positions in parts]


def step(task: Classification, state: TrainState, *sizes: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    state.engine.accumulation = len(sizes)  # type: ignore[attr-defined]
    return update(task, state, batches_of(*sizes), lr=1e-3, seed=0, clip_norm=1.0)


def test_step_equals_a_reference(config: Config) -> None:
    task, state = task_and_state(config)
    twin = copy.deepcopy(state.model)
    optimizer = build_optimizer(twin, config.optim)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    inputs = task.inputs(batches_of(32)[0], 0)
    loss = task.loss(twin(*inputs.args), inputs)["loss"]
    loss.backward()
    norm = nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    optimizer.step()
    ours = step(task, state, 32)
    torch.testing.assert_close(ours[0]["loss"], loss.detach())
    torch.testing.assert_close(ours[1], norm)
    torch.testing.assert_close(dict(state.model.state_dict()), dict(twin.state_dict()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("freeze", [1, "all"])
def test_frozen_run_has_the_losses_of_a_plain_loop(config: Config, freeze: int | str) -> None:
    config = replace(config, model=replace(config.model, freeze=freeze, drop_path=0.3, dropout=0.1))
    task, state = task_and_state(config)
    twin = copy.deepcopy(state.model).eval()
    for name, p in twin.named_parameters():
        p.requires_grad_(name.startswith("head." if freeze == "all" else ("blocks.1.", "norm.", "head.")))
    if freeze == 1:
        twin.blocks[1].train()
    optimizer = torch.optim.AdamW(build_optimizer(twin, config.optim).param_groups, lr=1e-3, fused=True)
    for number in range(4):
        ours, _ = step(task, state, 32)
        seed_everything(0, number, 0)
        inputs = task.inputs(batches_of(32)[0], number)
        loss = task.loss(twin(*inputs.args), inputs)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
        torch.testing.assert_close(ours["loss"], loss.detach())
    torch.testing.assert_close(dict(state.model.state_dict()), dict(twin.state_dict()), rtol=1e-5, atol=1e-6)
    assert state.ema is not None
    trained = {name for name, p in twin.named_parameters() if p.requires_grad}
    assert state.ema.pieces().keys() == trained, "the EMA of a frozen weight is the weight"
    assert len(state.engine.optimizer.state) == len(trained)


def test_micro_batches_do_not_change_the_step(config: Config) -> None:
    (task, state), (_, other) = task_and_state(config), task_and_state(config)
    ours, theirs = step(task, state, 32), step(task, other, 8, 8, 8, 8)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dict(state.model.state_dict()), dict(other.model.state_dict()), rtol=1e-4, atol=1e-5)


def test_before_update_sees_all_batches_and_its_draws_change_nothing(config: Config) -> None:
    (task, state), (_, other) = task_and_state(config), task_and_state(config)
    for each in (state, other):
        each.model.train()
        each.model.blocks[0].register_forward_hook(lambda module, args, output: nn.functional.dropout(output, 0.5))
    seen: list[object] = []

    class Watching(Classification):
        def before_update(self, batches, step, forward) -> None:  # type: ignore[no-untyped-def]
            with torch.no_grad():
                seen.extend(forward(*self.inputs(batch, step).args) for batch in batches)

    watching = Watching(config, INFO, plan_of(config))
    watching.build()
    ours, theirs = step(task, state, 16, 16), step(watching, other, 16, 16)
    assert len(seen) == 2
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_non_finite_loss_is_skipped_and_counted(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    task, state = task_and_state(config)
    before = copy.deepcopy(state.model.state_dict())
    real = Classification.loss
    monkeypatch.setattr(Classification, "loss", lambda *a: {"loss": real(*a)["loss"] * float("nan")})
    _, norm = step(task, state, 32)
    assert not norm.isfinite()
    assert (state.skipped_steps.item(), state.consecutive_skipped_steps.item()) == (1, 1)
    torch.testing.assert_close(dict(state.model.state_dict()), dict(before), rtol=0, atol=0)


def to_fake_gpu(module: nn.Module) -> None:
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
                    table[name] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty


def test_step_on_a_gpu_never_synchronizes_with_the_host(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors have a device and no content: reading one, as a host synchronization would, is an error.

    Without a GPU there is no backward pass on one, so gradients are set by hand.
    """
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    task = Classification(config, INFO, plan_of(config))
    model = task.build()
    with FakeTensorMode(allow_non_fake_inputs=True):
        to_fake_gpu(model)
        to_fake_gpu(task.normalize)
        task.device = torch.device("cuda")
        engine = PlainEngine(model, build_optimizer(model, config.optim))

        def backward(loss: torch.Tensor) -> None:
            for p in model.parameters():
                p.grad = torch.zeros_like(p)

        engine.backward = backward  # type: ignore[method-assign]
        state = TrainState(engine, Ema(engine.shards, 0.9, warmup=True))
        state.skipped_steps, state.consecutive_skipped_steps = (torch.zeros((), device="cuda") for _ in range(2))
        batches = batches_of(16, 16)
        for batch in batches:
            batch.positions = np.arange(16)  # type: ignore[assignment]  # on the host, but a fake tensor cannot be read
        for _ in range(3):
            parts, norm = update(task, state, batches, lr=1e-3, seed=0, clip_norm=1.0)
            state.step += 1
        assert norm.device.type == parts["loss"].device.type == "cuda"
        with pytest.raises(DataDependentOutputException):
            norm.item()
