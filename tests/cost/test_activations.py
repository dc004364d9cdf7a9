"""Closed-form activation memory matches the bytes that autograd actually saves."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from vit_scale.cost.activations import measured_activations, saved_bytes, vit_activations
from vit_scale.cost.meta import build_on_meta
from vit_scale.kernels import cpu_linear_attention
from vit_scale.models import create_model

OPTIONS: list[dict] = [
    {},
    {"layer_scale": 1e-5},
    {"qk_norm": True},
    {"mlp": "swiglu"},
    {"registers": 4},
    {"distilled": True},
    {"pool": "mean"},
    {"pool": "max"},
    {"pool": "tokens"},
    {"pos_embed": "rope"},
    {"pos_embed": "sincos"},
    {"patch_dropout": 0.5},
    {"drop_path": 0.5},
    {"drop_path": 0.5, "drop_path_schedule": "uniform", "layer_scale": 1e-5},
    {"drop_path": 0.5, "drop_path_mode": "mask"},
    {"freeze": 0, "patch_dropout": 0.5},
    {"freeze": 2, "dropout": 0.1, "drop_path": 0.5},
    {"freeze": 4},
    {"freeze": "all"},
]
KINDS: list[dict] = [
    {"attention": "window", "window": 2},
    {"attention": "window", "window": 4, "pool": "mean", "class_token": False},
    {"attention": "window", "window": 4, "window_shift": False, "global_blocks": (-1,), "pool": "mean"},
    {"attention": "window", "window": 8, "pool": "mean"},
    {"attention": "dilated", "dilation": 2, "qk_norm": True, "pool": "mean"},
    {"attention": "block", "window": 2, "pos_embed": "rope", "pool": "mean"},
    {"attention": "block", "window": 2, "pos_embed": "rope", "pool": "mean", "class_token": False},
    {"attention": "linear"},
    {"attention": "linear", "random_features": 8, "qk_norm": True, "patch_dropout": 0.5},
]
SHAPE = {"depth": 4, "img_size": 64, "embed_dim": 64}
BATCH = 8


def saved_per_image(model: torch.nn.Module, precision: str) -> float:
    """Bytes that grow with the batch, which excludes autocast's copies of the weights."""
    once, twice = (saved_bytes(model, (images, 3, 64, 64), precision) for images in (BATCH, 2 * BATCH))
    return (twice - once) / BATCH


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_closed_form_is_within_10_percent_of_saved_bytes(options: dict, precision: str, checkpointing: str) -> None:
    model = build_on_meta(lambda: create_model("vit_mu", **SHAPE, **options))
    model.set_activation_checkpointing(checkpointing)
    cost = {name: value for name, value in options.items() if "drop_path" in name or name == "patch_dropout"}
    cost |= {"frozen_layers": model.frozen_layers, "activation_checkpointing": checkpointing}
    acts = vit_activations(model.variant, precision=precision, **cost)
    # The logits and pooled features of a linear layer alone are not counted.
    assert sum(acts.by_part.values()) == pytest.approx(saved_per_image(model, precision), rel=0.1, abs=512)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_closed_form_of_each_kind_of_attention_is_within_1_percent(options: dict, precision: str) -> None:
    model = build_on_meta(lambda: create_model("vit_mu", **SHAPE, **options))
    acts = vit_activations(model.variant, precision=precision, patch_dropout=options.get("patch_dropout", 0.0))
    assert acts.total == pytest.approx(saved_per_image(model, precision), rel=0.01)


@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize("kernel", ["math", "explicit"])
def test_windows_save_small_attention_matrices(kernel: str, class_token: bool) -> None:
    options = {"attention": "window", "window": 2, "pool": "mean", "kernel": kernel, "class_token": class_token}
    model = build_on_meta(lambda: create_model("vit_mu", **SHAPE, **options))
    acts = vit_activations(model.variant, precision="fp32", kernel=kernel)
    assert acts.total == pytest.approx(saved_per_image(model, "fp32"), rel=0.01)


@pytest.mark.skipif(not cpu_linear_attention.is_built(), reason="the kernels are not built")
@pytest.mark.parametrize("kind", [{"attention": "window", "window": 2}, {"attention": "linear"}], ids=str)
def test_cpu_kernels_save_about_as_much_as_full_attention(kind: dict) -> None:
    full = create_model("vit_mu", **SHAPE).variant
    variant = dataclasses.replace(full, **kind)
    on_cpu = vit_activations(variant, precision="fp32", on_cpu=True).total
    assert on_cpu == pytest.approx(vit_activations(full, precision="fp32").total, rel=0.03)
    assert on_cpu < vit_activations(variant, precision="fp32").total


def test_fake_tensors_give_the_same_count_as_real_ones() -> None:
    """Compare with the same count on a real CPU model."""
    model = create_model("vit_mu", **SHAPE).train()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def record(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        output = model(torch.rand(2, 3, 64, 64))
    real = sum(storage.nbytes() for pointer, storage in saved.items() if pointer not in own)
    assert output.requires_grad
    assert saved_bytes(model, (2, 3, 64, 64), "fp32") == real


@pytest.mark.parametrize("kernel", ["math", "explicit"])
def test_kernels_that_save_the_attention_matrix_need_more_memory(kernel: str) -> None:
    model = build_on_meta(lambda: create_model("vit_mu", **SHAPE, kernel=kernel))
    acts = vit_activations(model.variant, precision="fp32", kernel=kernel)
    assert acts.total == pytest.approx(saved_per_image(model, "fp32"), rel=0.1)
    assert acts.total > vit_activations(model.variant, precision="fp32").total


def test_timm_model_saves_as_much_as_the_closed_form() -> None:
    ours = build_on_meta(lambda: create_model("vit_tiny_patch16_224"))
    theirs = build_on_meta(lambda: create_model("timm/vit_tiny_patch16_224"))
    measured = measured_activations(theirs, (224, 224), 3, "bf16")
    assert vit_activations(ours.variant).total == pytest.approx(measured.total, rel=0.1)


def test_checkpointing_saves_less_but_recomputes_one_block() -> None:
    variant = create_model("vit_mu", **SHAPE).variant
    none, selective, full = (
        vit_activations(variant, activation_checkpointing=mode) for mode in ("none", "selective", "full")
    )
    assert none.recomputed == 0
    assert selective.recomputed == full.recomputed > 0
    assert none.total > selective.total > full.total


def test_measuring_does_not_modify_the_model() -> None:
    model = create_model("timm/test_vit").eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert measured_activations(model, model.img_size, 3).total > 0
    assert not model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
