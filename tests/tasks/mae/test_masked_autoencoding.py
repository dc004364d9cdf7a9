"""The task of a masked autoencoder: what its model computes, its loss, its options, and its cost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vit_scale.config import Config
from vit_scale.cost.count import count_model
from vit_scale.cost.meta import build_on_meta
from vit_scale.cost.training import training_cost
from vit_scale.data.batch import Batch, DataInfo
from vit_scale.data.progressive import make_progressive
from vit_scale.errors import UserError
from vit_scale.report.model_report import report_on
from vit_scale.tasks.mae.masked_autoencoding import MaskedAutoencoding
from vit_scale.train.optim.optimizer import parameter_groups

NON_SQUARE = {"img_size": [8, 12], "patch_size": [2, 4], "class_token": False, "pool": "mean", "registers": 3}


def built(task: MaskedAutoencoding) -> Any:
    torch.manual_seed(0)
    model = task.build()
    task.init_weights(model, nullcontext)
    return model


def grads(task: MaskedAutoencoding, model: Any, batch: Batch) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    inputs = task.inputs(batch, step=0)
    task.loss(model.train()(*inputs.args), inputs)["loss"].backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("pos_embed", ["learned", "learned_2d", "sincos", "rope", "relative", "none"])
@pytest.mark.parametrize("model", [{}, {"registers": 2}, NON_SQUARE])
def test_encoder_computes_visible_patches_only(
    mae_task: Callable[..., MaskedAutoencoding], batch_of: Callable[..., Batch], model: dict, pos_embed: str
) -> None:
    """The pixels of masked patches change nothing, and no block sees more tokens than are visible."""
    task = mae_task(f"model.pos_embed={pos_embed}", model=model)
    autoencoder = built(task)
    seen = []
    for block in autoencoder.backbone.blocks:
        block.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    inputs = task.inputs(batch_of(torch.arange(3), task.variant.img_size), step=0)
    images, keep = inputs.args
    rows, columns = task.patch_size
    masked = inputs.rest["masked"].view(-1, 1, *task.grid).repeat_interleave(rows, 2).repeat_interleave(columns, 3)
    predicted = autoencoder(images, keep)
    assert predicted.shape == inputs.rest["pixels"].shape
    assert torch.equal(autoencoder(torch.where(masked, 9.0, images), keep), predicted)
    assert not torch.equal(autoencoder(torch.where(masked, images, 9.0), keep), predicted)
    assert set(seen) == {keep.shape[1] + task.variant.num_prefix_tokens}


@pytest.mark.parametrize("pos_embed", ["learned", "learned_2d", "sincos", "rope", "relative"])
def test_visible_patches_keep_their_positions(mae_task: Callable[..., MaskedAutoencoding], pos_embed: str) -> None:
    """All patches in another order are the same tokens in another order."""
    encoder = built(mae_task(f"model.pos_embed={pos_embed}", model={"registers": 1})).backbone.eval()
    images, order = torch.randn(2, 3, 16, 16), torch.stack([torch.randperm(16) for _ in range(2)])
    with torch.no_grad():
        plain, shuffled = encoder.forward_features(images), encoder.forward_features(images, order)
    expected = plain[:, 2:].gather(1, order[..., None].expand(-1, -1, 32))
    torch.testing.assert_close(shuffled[:, 2:], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(shuffled[:, :2], plain[:, :2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("norm_pixels", ["true", "false"])
def test_loss_is_the_mean_over_masked_patches(
    mae_task: Callable[..., MaskedAutoencoding], batch_of: Callable[..., Batch], norm_pixels: str
) -> None:
    task = mae_task(f"mae.norm_pixels={norm_pixels}")
    inputs = task.inputs(batch_of(torch.arange(4)), step=0)
    masked, pixels = inputs.rest["masked"], inputs.rest["pixels"].double()
    if norm_pixels == "true":
        pixels = (pixels - pixels.mean(2, keepdim=True)) / (pixels.var(2, keepdim=True) + 1e-6) ** 0.5
    outputs = torch.randn(pixels.shape)
    expected = ((outputs.double() - pixels) ** 2)[masked].mean().item()
    assert task.loss(outputs, inputs)["loss"].item() == pytest.approx(expected, rel=1e-5)
    outputs[~masked] = 1e6
    assert task.loss(outputs, inputs)["loss"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("way", ["checkpointing", "compiled"])
def test_gradients_are_the_same_recomputed_and_compiled(
    mae_task: Callable[..., MaskedAutoencoding], batch_of: Callable[..., Batch], way: str
) -> None:
    task, batch = mae_task("model.drop_path=0.5", model={"registers": 1}), batch_of(torch.arange(8))
    plain = grads(task, built(task), batch)
    assert all(grad is not None and grad.isfinite().all() for grad in plain.values())
    other = built(task)
    if way == "checkpointing":
        other.set_activation_checkpointing("full")
    else:
        other.compile_blocks(backend="eager")
    for name, grad in grads(task, other, batch).items():
        torch.testing.assert_close(grad, plain[name], rtol=0, atol=1e-6, msg=name)


def test_smaller_images_have_masks_and_positions_of_their_own(
    mae_config: Callable[..., Config], batch_of: Callable[..., Batch]
) -> None:
    config = mae_config(augment={"progressive": [[0, 8]]})
    task = MaskedAutoencoding(config, DataInfo(64, 3))
    model = built(task)
    task.progressive = make_progressive(config.augment.progressive, 8, model.backbone)
    inputs = task.inputs(batch_of(torch.arange(2)), step=0)
    assert [tuple(each.shape) for each in inputs.args] == [(2, 3, 8, 8), (2, 1)]
    assert model(*inputs.args).shape == inputs.rest["pixels"].shape == (2, 4, 48)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_mask_token_is_not_decayed_and_blocks_of_the_decoder_are_optimized_as_blocks(
    mae_task: Callable[..., MaskedAutoencoding], name: str
) -> None:
    task = mae_task(f"optim.name={name}", "optim.layer_decay=0.5")
    model = built(task)
    groups = parameter_groups(model, task.config.optim)
    found = {n: group for n, p in model.named_parameters() for group in groups if any(p is q for q in group["params"])}
    assert found["decoder.mask_token"]["weight_decay"] == 0
    assert found["decoder.embed.weight"]["weight_decay"] > 0
    assert found["decoder.blocks.0.mlp.fc1.weight"].get("matrices", False) == (name == "muon")
    assert found["decoder.blocks.0.mlp.fc1.weight"]["lr_scale"] == 1
    assert found["backbone.patch_embed.proj.weight"]["lr_scale"] == 0.5**3
    assert 0.01 < model.decoder.mask_token.std() < 0.03


ERRORS = [
    ({"mae": {"mask_ratio": 0.95}}, "mae.mask_ratio = 0.95: leaves none of 4 x 4 patches"),
    ({"mae": {"mask_ratio": 1e-18}}, "mae.mask_ratio = 1e-18: masks none of 4 x 4 patches"),
    ({"augment": {"progressive": [[0, 4]]}}, "mae.mask_ratio = 0.75: leaves none of 1 x 1 patches"),
    ({"model": {"class_token": False}}, "model.pool = cls requires a class token"),
    ({"model": {"name": "timm/resnet18"}}, "model.name = timm/resnet18: task.name = mae needs a Vision Transformer"),
    ({"model": {"name": "deit_tiny_distilled_patch16_224"}}, "no use for a distillation token"),
    ({"model": {"distilled": True}}, "model.distilled = True: has no meaning for task.name = mae, .*without labels"),
    ({"model": {"patch_dropout": 0.5}}, "model.patch_dropout = 0.5: .* mae.mask_ratio says what is masked"),
    ({"model": {"num_classes": 7}}, "model.num_classes = 7: task.name = mae trains no head"),
    ({"mae": {"decoder_heads": 3}}, "mae.decoder_heads = 3 does not divide mae.decoder_dim = 16"),
    ({"mae": {"decoder_dim": 6, "decoder_heads": 1}}, "mae.decoder_dim = 6: must be a multiple of 4"),
    ({"model": {"patch_size": 1}}, "mae.norm_pixels = true: a patch of one number"),
    ({"augment": {"mixup": 0.8}}, "augment.mixup = 0.8: has no meaning"),
    ({"augment": {"mixup": 0.8, "label_smoothing": 0.1}}, "set augment.mixup=0 augment.label_smoothing=0"),
    ({"augment": {"cutmix": 1.0}}, "augment.cutmix = 1.0: has no meaning"),
    ({"augment": {"label_smoothing": 0.1}}, "augment.label_smoothing = 0.1: has no meaning"),
    ({"optim": {"class_weights": "balanced"}}, "optim.class_weights = balanced: has no meaning"),
    ({"optim": {"loss": "binary"}}, "optim.loss = binary: task.name = mae has a loss of its own"),
]


@pytest.mark.parametrize(("changes", "message"), ERRORS)
def test_options_without_meaning_are_errors(mae_config: Callable[..., Config], changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        MaskedAutoencoding(mae_config(**changes), DataInfo(64, 1))
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize("ratio", ["1", "0", "-1", "1.5"])
def test_mask_ratio_is_a_fraction(mae_config: Callable[..., Config], ratio: str) -> None:
    with pytest.raises(UserError, match="mae.mask_ratio = .*must be"):
        mae_config(f"mae.mask_ratio={ratio}")


@pytest.mark.parametrize("model", [{}, NON_SQUARE, {"mlp": "swiglu", "layer_scale": 0.1}])
def test_cost_is_what_torch_counts(mae_task: Callable[..., MaskedAutoencoding], model: dict) -> None:
    """Forward and backward pass, exactly."""
    task = mae_task(model=model)
    autoencoder = build_on_meta(task.build)
    kept = int(task.grid[0] * task.grid[1] * 0.25)
    inputs = torch.empty(1, 3, *task.variant.img_size, device="meta"), torch.zeros(1, kept, dtype=torch.long).to("meta")
    with FlopCounterMode(display=False) as forward:
        outputs = autoencoder(*inputs)
    with FlopCounterMode(display=False) as backward:
        outputs.sum().backward()
    counted = training_cost(task.cost_parts(autoencoder), task.config, batch=None)
    assert counted.total == forward.get_total_flops() + backward.get_total_flops()
    with FlopCounterMode(display=False) as decoder:
        autoencoder.decoder(
            torch.empty(1, kept + task.variant.num_prefix_tokens, 32, device="meta"), inputs[1], task.grid
        )
    count = count_model(autoencoder.decoder)
    assert count.flops == decoder.get_total_flops()
    assert counted.flops["decoder"] == 3 * count.flops
    assert count.params == sum(p.numel() for p in autoencoder.decoder.parameters())


def test_cost_of_smaller_images_is_that_of_a_smaller_model(mae_task: Callable[..., MaskedAutoencoding]) -> None:
    large, small = (build_on_meta(mae_task(f"model.img_size={size}").build) for size in (32, 16))
    task = mae_task()
    whole = training_cost(task.cost_parts(large), task.config, batch=None, side=16)
    assert whole.flops == training_cost(task.cost_parts(small), task.config, batch=None).flops


def test_report_counts_encoder_and_decoder(mae_config: Callable[..., Config]) -> None:
    report = report_on(mae_config(), batch=8)
    plain = report_on(
        mae_config("task.name=classify", mae={"decoder_dim": 512, "decoder_depth": 8, "decoder_heads": 16})
    )
    assert set(report.train_flops_by_part) == {"encoder", "decoder"}
    assert report.count.params == sum(
        p.numel() for p in build_on_meta(MaskedAutoencoding(mae_config(), DataInfo(0, 3)).build).parameters()
    )
    assert report.train_flops_by_part["encoder"] < 0.5 * plain.train_flops
    more = report_on(mae_config("mae.decoder_depth=6"), batch=8)
    assert more.activations.total > report.activations.total
    assert report_on(mae_config("mae.mask_ratio=0.5"), batch=8).activations.total > report.activations.total
