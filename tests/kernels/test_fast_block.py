"""A model computes the same results with and without shortcuts, also with the hooks of a strategy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vit_scale import kernels
from vit_scale.kernels import cpu
from vit_scale.models import create_model

OPTIONS: list[dict[str, Any]] = [
    {},
    {"pool": "mean"},
    {"distilled": True, "registers": 2},
    {"mlp": "swiglu", "layer_scale": 0.1},
    {"qk_norm": True, "pos_embed": "rope"},
    {"pos_embed": "relative", "patch_dropout": 0.5},
    {"drop_path": 0.4, "patch_dropout": 0.5},
    {"drop_path": 0.4, "drop_path_mode": "mask"},
    {"qkv_bias": False, "bias": False},
]


@pytest.fixture(autouse=True, params=[False, True], ids=["small", "as large"])
def computed_as_large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch, as for small models, and with our kernels, as for large ones."""
    if request.param:
        monkeypatch.setattr(cpu, "WORTHWHILE_MACS", 0)
        monkeypatch.setattr(cpu, "WORTHWHILE_ELEMENTS", 0)


def build(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = create_model("vit_mu", depth=3, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.train()


def logits_and_gradients(model: nn.Module) -> list[Tensor]:
    x = torch.randn(5, model.in_chans, *model.img_size, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    model.zero_grad()
    logits = model(x)
    logits.square().mean().backward()
    return [logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_results_equal_those_of_the_plain_code(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(**options)
    found = logits_and_gradients(model)
    monkeypatch.setenv("VIT_SCALE_KERNELS", "0")
    assert_close(found, logits_and_gradients(model))


@pytest.mark.parametrize("options", [*OPTIONS, {"dropout": 0.2, "drop_path": 0.4, "pool": "mean"}], ids=str)
def test_hooks_do_not_change_results(options: dict[str, Any]) -> None:
    """Dropout included: it draws the same numbers."""
    model = build(**options)
    found = logits_and_gradients(model)
    for module in list(model.modules())[1:]:
        module.register_forward_hook(lambda *_: None)
    assert kernels.choose(model) is None
    assert_close(found, logits_and_gradients(model))


@pytest.mark.parametrize("options", [*OPTIONS, {"dropout": 0.2, "drop_path": 0.4}], ids=str)
def test_layers_with_hooks_of_a_strategy_are_bit_identical(options: dict[str, Any]) -> None:
    model = build(**options)
    expected = logits_and_gradients(model)
    with kernels.accept_hooks(model):
        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: None)
            module.register_forward_hook(lambda *_: None)
    assert kernels.choose(model) == kernels.Shortcut(hooked=True)
    for one, other in zip(logits_and_gradients(model), expected, strict=True):
        assert torch.equal(one, other)
    assert not any("forward" in vars(module) for module in model.modules())


def test_weights_are_only_used_between_the_hooks_of_their_layer() -> None:
    """As under ZeRO-3, where a weight has elements only between the hooks of the module that owns it."""
    model = build(layer_scale=0.1, qk_norm=True).eval()
    x = torch.randn(2, 3, 32, 32)
    expected = model(x)
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def own(module: nn.Module, prefix: str) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for name, parameter in module.named_parameters(recurse=False):
            yield parameter, whole[f"{prefix}.{name}".lstrip(".")]

    def gather(module: nn.Module, prefix: str) -> None:
        for parameter, tensor in own(module, prefix):
            parameter.data = tensor

    def release(module: nn.Module, prefix: str) -> None:
        for parameter, _ in own(module, prefix):
            parameter.data = torch.empty(0)

    with kernels.accept_hooks(model):
        for prefix, module in model.named_modules():
            module.register_forward_pre_hook(lambda module, _inputs, prefix=prefix: gather(module, prefix))
            module.register_forward_hook(lambda module, *_, prefix=prefix: release(module, prefix))
            release(module, prefix)
    assert kernels.choose(model) is not None
    assert torch.equal(model(x), expected)


def test_error_in_a_layer_does_not_affect_later_calls() -> None:
    model = build()
    with kernels.accept_hooks(model):
        model.blocks[0].mlp.fc1.register_forward_hook(lambda *_: None)
    model.blocks[0].mlp.fc1.weight.data = torch.empty(3, 3)
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 3, 32, 32))
    assert not any("forward" in vars(module) for module in model.modules())


def test_weight_that_cannot_be_sliced_is_used_in_full() -> None:
    class Unsliced(nn.Parameter):
        __tensor_flatten__ = None  # torch uses it to detect a tensor that wraps others.

        def __getitem__(self, _: object) -> Tensor:
            raise NotImplementedError

    model, x = build(), torch.randn(2, 3, 32, 32)
    expected = model(x)
    qkv = model.blocks[-1].attn.qkv
    qkv.weight = Unsliced(qkv.weight.detach())
    torch.testing.assert_close(model(x), expected, atol=1e-6, rtol=1e-5)


def test_short_run_has_the_same_losses_without_kernels(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, fresh_accelerate: None
) -> None:
    import json

    from accelerate.state import AcceleratorState, GradientState, PartialState

    from vit_scale.recipe import load_recipe
    from vit_scale.train.run_recipe import run_recipe

    options = [
        "track.wandb=disabled",
        "data.workers=0",
        "run.log_every=1",
        "schedule.steps=4",
        "schedule.warmup_steps=1",
    ]
    losses = []
    for switch in ("1", "0"):
        monkeypatch.setenv("VIT_SCALE_KERNELS", switch)
        recipe, folder = str(root / "recipes/debug.yaml"), tmp_path / switch
        assert run_recipe(load_recipe(recipe, [*options, f"run.dir={folder}"]), recipe) == 0
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses.append([line[key] for line in lines for key in ("train/loss", "val/loss") if key in line])
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
    assert len(losses[0]) >= 5
    assert losses[0] == pytest.approx(losses[1], rel=1e-6, abs=1e-6)
