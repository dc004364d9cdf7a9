"""Loss and gradients are those of transformers' ViTMAEForPreTraining, with the same weights and the same masks."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vit_scale.data.batch import Batch
from vit_scale.data.draws import uniforms
from vit_scale.models.decoders.mae import MaskedAutoencoder
from vit_scale.tasks.mae.masked_autoencoding import MaskedAutoencoding
from vit_scale.tasks.mae.patches import EVALUATION, TRAINING

SEED, POSITIONS = 7, torch.arange(1000, 1004)

NAMES = (
    (r"^backbone\.patch_embed\.proj", "vit.embeddings.patch_embeddings.projection"),
    (r"^backbone\.cls_token", "vit.embeddings.cls_token"),
    (r"^backbone\.pos_embed", "vit.embeddings.position_embeddings"),
    (r"^backbone\.blocks", "vit.layers"),
    (r"^backbone\.norm", "vit.layernorm"),
    (r"^decoder\.blocks", "decoder.decoder_layers"),
    (r"^decoder\.(embed|norm|pred)", r"decoder.decoder_\1"),
    (r"\.norm1", ".layernorm_before"),
    (r"\.norm2", ".layernorm_after"),
    (r"\.attn\.proj", ".attention.o_proj"),
    (r"\.attn\.qkv", ".attention.qkv"),
)


def by_our_names(theirs: dict[str, Tensor], model: MaskedAutoencoder) -> dict[str, Tensor]:
    """Return tensors of transformers' model under our names; queries, keys and values packed."""
    found = {}
    for name, _ in model.named_parameters():
        other = name
        for ours, their_name in NAMES:
            other = re.sub(ours, their_name, other)
        parts = [other.replace(".qkv", f".{each}_proj") for each in "qkv"] if ".qkv" in other else [other]
        found[name] = torch.cat([theirs[part] for part in parts]) if len(parts) > 1 else theirs[other]
    return found


@pytest.mark.parametrize("norm_pixels", [True, False])
@pytest.mark.parametrize("stream", [TRAINING, EVALUATION])
def test_loss_and_gradients_are_those_of_transformers(
    mae_task: Callable[..., MaskedAutoencoding], batch_of: Callable[..., Batch], *, norm_pixels: bool, stream: int
) -> None:
    transformers = pytest.importorskip("transformers")
    task = mae_task(f"mae.norm_pixels={norm_pixels}".lower(), f"run.seed={SEED}", "model.drop_path=0")
    config = transformers.ViTMAEConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, image_size=16, patch_size=4,
        decoder_hidden_size=16, decoder_num_hidden_layers=2, decoder_num_attention_heads=2,
        decoder_intermediate_size=64, norm_pix_loss=norm_pixels, layer_norm_eps=1e-6,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.ViTMAEForPreTraining(config).train()
    ours = task.build().train()
    with torch.no_grad():
        for parameter in theirs.parameters():  # biases and norms too
            parameter += 0.05 * torch.randn_like(parameter)
        theirs.decoder.decoder_pos_embed[:, 1:] = ours.decoder.pos_1GD
        theirs.decoder.decoder_pos_embed[:, 0] = 0
    ours.load_state_dict(by_our_names(theirs.state_dict(), ours))

    batch = batch_of(POSITIONS)
    if stream == TRAINING:
        inputs = task.inputs(batch, step=0)
        outputs = ours(*inputs.args)
    else:
        outputs, inputs = task.predict(ours, batch)
    loss = task.loss(outputs, inputs)["loss"]
    loss.backward()
    noise = torch.from_numpy(uniforms(SEED, POSITIONS.numpy(), 16, stream))
    reference = theirs(inputs.args[0].clone(), noise=noise)
    reference.loss.backward()

    assert torch.equal(inputs.rest["masked"], reference.mask.bool())
    torch.testing.assert_close(outputs, reference.logits, rtol=0, atol=1e-5)
    assert loss.item() == pytest.approx(reference.loss.item(), abs=1e-5)
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in theirs.named_parameters()}
    for name, expected in by_our_names(grads, ours).items():
        if name != "backbone.pos_embed":  # fixed in transformers' model
            torch.testing.assert_close(ours.get_parameter(name).grad, expected, rtol=0, atol=1e-4, msg=name)


def test_positions_of_the_decoder_are_those_of_transformers(mae_task: Callable[..., MaskedAutoencoding]) -> None:
    reference = pytest.importorskip("transformers.models.vit_mae.modeling_vit_mae")
    rows, columns = reference.build_2d_sinusoidal_position_embedding(4, 4, 16).chunk(2, dim=1)
    theirs = torch.cat([columns, rows], dim=1)[None]  # in the order of the published weights
    torch.testing.assert_close(mae_task().build().decoder.pos_1GD, theirs, rtol=0, atol=1e-6)
