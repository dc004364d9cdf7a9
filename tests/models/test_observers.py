"""Hooks, LoRA, quantization and second derivatives see an ordinary ViT: timm's shapes and values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vit_scale.kernels import cpu
from vit_scale.models import create_model
from vit_scale.models.timm_models import create_counterpart

OPTIONS: dict[str, dict[str, Any]] = {
    "class token": {"layer_scale": 0.1, "qk_norm": True},
    "mean": {"pool": "mean"},
    "distilled": {"distilled": True},
    "swiglu": {"mlp": "swiglu", "mlp_ratio": 3.0},
}


@pytest.fixture(autouse=True, params=[False, True], ids=["small", "as large"])
def computed_as_large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(cpu, "WORTHWHILE_MACS", 0)
        monkeypatch.setattr(cpu, "WORTHWHILE_ELEMENTS", 0)


def pair(**options: Any) -> tuple[nn.Module, nn.Module]:
    """Our model and timm's with the same weights, in training mode."""
    torch.manual_seed(0)
    ours = create_model("vit_mu", **options)
    timms = create_counterpart(ours.variant)
    with torch.no_grad():
        for parameter in timms.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    ours.load_state_dict(timms.state_dict(), strict=True)
    return ours.train(), timms.train()


def images(batch: int = 3) -> Tensor:
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def shared_submodules(ours: nn.Module, timms: nn.Module) -> list[str]:
    """Names of both models. Stochastic depth is implemented differently: ours skips samples."""
    theirs = dict(timms.named_modules())
    names = [name for name, module in ours.named_modules() if name in theirs and not isinstance(module, nn.ModuleList)]
    return [name for name in names if name and "drop_path" not in name]


def observe(model: nn.Module, names: list[str]) -> dict[str, list[Tensor]]:
    """Capture inputs, outputs and output gradients of each module with hooks, without copying."""
    seen: dict[str, list[Tensor]] = {}
    for name in names:
        module = model.get_submodule(name)

        def keep(_module: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
            seen[name] = [inputs[0], output]

        def keep_gradient(_module: nn.Module, _grad_in: Any, grad_out: Any, name: str = name) -> None:
            seen[name].append(grad_out[0])

        module.register_forward_hook(keep)
        module.register_full_backward_hook(keep_gradient)
    model(images()).square().mean().backward()
    return seen


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_hooks_on_every_submodule_receive_the_same_values_as_in_timm(options: dict[str, Any]) -> None:
    ours, timms = pair(**options)
    names = shared_submodules(ours, timms)
    kinds = {"patch_embed", "pos_drop", "blocks.1", "blocks.1.norm1", "blocks.1.attn", "blocks.1.attn.qkv", "head"}
    kinds |= {"blocks.1.attn.proj", "blocks.1.ls1", "blocks.1.mlp", "blocks.1.mlp.fc1", "blocks.1.mlp.act", "norm"}
    assert kinds | {"blocks.1.mlp.drop1", "blocks.1.mlp.fc2", "blocks.1.mlp.drop2", "blocks.1.ls2"} <= set(names)
    found, expected = observe(ours, names), observe(timms, names)
    assert found.keys() == expected.keys()
    for name, tensors in expected.items():
        assert len(found[name]) == len(tensors) == 3, name
        for mine, theirs in zip(found[name], tensors, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("name", ["attn", "attn.proj", "mlp", "mlp.fc2", "mlp.act", "attn.qkv", "ls1", "norm2"])
def test_tensor_captured_by_a_hook_is_not_changed_later(name: str) -> None:
    model, _ = pair()
    kept: list[tuple[Tensor, Tensor]] = []
    hook = lambda _m, _i, out: kept.append((out, out.detach().clone()))  # noqa: E731
    model.blocks[0].get_submodule(name).register_forward_hook(hook)
    model(images()).square().mean().backward()
    ((kept_tensor, copy_of_it),) = kept
    assert torch.equal(kept_tensor, copy_of_it)


def lora(model: nn.Module, targets: list[str]) -> nn.Module:
    from peft import LoraConfig, inject_adapter_in_model

    return inject_adapter_in_model(LoraConfig(r=2, target_modules=targets, init_lora_weights=False), model)


@pytest.mark.parametrize("options", [{}, {"pool": "mean", "dropout": 0.1}, {"drop_path": 0.3}], ids=str)
def test_lora_on_every_linear_layer_trains_a_step(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = create_model("vit_mu", **options)
    targets = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    model = lora(model, targets).train()
    adapters = {name: p for name, p in model.named_parameters() if "lora_" in name}
    assert len(adapters) == 2 * len(targets) == 2 * (4 * 2 + 1)
    before = {name: p.detach().clone() for name, p in adapters.items()}
    optimizer = torch.optim.SGD(adapters.values(), lr=0.1)
    model(images()).square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(p, before[name]) for name, p in adapters.items())


def test_lora_gives_the_same_results_as_on_timms_model() -> None:
    ours, timms = pair()
    outputs = []
    for model in (ours, timms):
        torch.manual_seed(3)
        adapted = lora(model, ["qkv", "proj", "fc1", "fc2"] if model is timms else ["qkv", "attn.proj", "fc1", "fc2"])
        torch.manual_seed(4)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name and "patch_embed" not in name:
                    parameter.normal_(std=0.1)
                elif "lora_" in name:
                    parameter.zero_()
        outputs.append(adapted.eval()(images()))
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"pool": "mean", "drop_path": 0.4}, {"pos_embed": "relative"}], ids=str)
def test_explicit_kernel_can_be_differentiated_twice(options: dict[str, Any]) -> None:
    """The derivative of the squared gradient norm, against finite differences."""
    torch.manual_seed(0)
    model = create_model("vit_mu", kernel="explicit", **options).double().train()
    x = images(4).double().requires_grad_()

    def penalty(x: Tensor) -> Tensor:
        torch.manual_seed(5)
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return gradient.square().sum()

    (found,) = torch.autograd.grad(penalty(x), x)
    direction = torch.randn_like(x)
    step = 1e-4 * direction
    slope = (penalty(x + step) - penalty(x - step)).detach() / 2e-4
    assert (found * direction).sum().item() == pytest.approx(slope.item(), rel=1e-4)


def test_dynamic_quantization_finds_every_linear_layer() -> None:
    model = create_model("vit_mu").eval()
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert len(layers) == 4 * 2 + 1
    expected = model(images())
    quantized = quantize(model)
    for name in layers:
        assert "quantized" in type(quantized.get_submodule(name)).__module__, name
    found = quantized(images())
    assert (found - expected).abs().max() < 0.1 * expected.abs().max() + 0.01


def quantize(model: nn.Module) -> nn.Module:
    quantize_dynamic: Callable[..., nn.Module] = torch.ao.quantization.quantize_dynamic
    return quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_replaced_block_receives_only_tokens(dropout: float) -> None:
    """Any module from tokens to tokens can replace a block."""
    model = create_model("vit_mu", dropout=dropout).eval()
    x = images()
    model.blocks[0] = nn.Identity()
    expected = model.forward_head(model.norm(model.blocks[1](model._embed(x)[0])))
    torch.testing.assert_close(model(x), expected)
