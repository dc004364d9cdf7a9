"""Deformable attention equals that of transformers' Deformable DETR with the same weights, and starts as it does."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from transformers import DeformableDetrConfig
from transformers.models.deformable_detr.modeling_deformable_detr import (
    DeformableDetrEncoder,
    DeformableDetrMultiscaleDeformableAttention,
    MultiScaleDeformableAttention,
)

from vit_scale.models.deformable_attention import DeformableAttention, read_points
from vit_scale.models.weights.init import init_weights

DIM, HEADS, LEVELS, POINTS, QUERIES = 32, 4, 3, 2, 5
SIZES = [(6, 8), (3, 4), (2, 2)]
TOKENS = sum(rows * columns for rows, columns in SIZES)
close = partial(torch.testing.assert_close, atol=1e-10, rtol=1e-8)


def attention() -> DeformableAttention:
    """Random weights: the initial ones give offsets and weights that do not depend on the query."""
    torch.manual_seed(0)
    layer = DeformableAttention(DIM, HEADS, num_levels=LEVELS, num_points=POINTS).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer


def transformers_attention() -> DeformableDetrMultiscaleDeformableAttention:
    """That of an encoder of one layer, which initializes it."""
    config = DeformableDetrConfig(
        d_model=DIM,
        encoder_layers=1,
        encoder_ffn_dim=8,
        encoder_attention_heads=HEADS,
        encoder_n_points=POINTS,
        num_feature_levels=LEVELS,
        backbone_config={"model_type": "resnet"},  # Without it, a configuration is requested from the Hub.
    )
    return DeformableDetrEncoder(config).layers[0].self_attn.double()


def inputs(coordinates: int = 2) -> list[Tensor]:
    """Queries, references and tokens; some points lie outside of the image."""
    generator = torch.Generator().manual_seed(1)
    normal, uniform = (partial(draw, dtype=torch.float64, generator=generator) for draw in (torch.randn, torch.rand))
    tensors = [normal(2, QUERIES, DIM), uniform(2, QUERIES, LEVELS, coordinates), normal(2, TOKENS, DIM)]
    return [tensor.requires_grad_() for tensor in tensors]


def theirs_on(layer: nn.Module, tensors: list[Tensor], valid_BN: Tensor | None) -> Tensor:
    x_BQD, reference_BQLC, tokens_BND = tensors
    shapes = torch.tensor(SIZES)
    starts = torch.cat([shapes.new_zeros(1), shapes.prod(1).cumsum(0)[:-1]])
    return layer(
        x_BQD,
        attention_mask=valid_BN,
        encoder_hidden_states=tokens_BND,
        reference_points=reference_BQLC,
        spatial_shapes=shapes,
        spatial_shapes_list=SIZES,
        level_start_index=starts,
    )[0]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("coordinates", [2, 4])
def test_output_and_gradients_equal_transformers(coordinates: int, padded: bool) -> None:
    ours, theirs, tensors = attention(), transformers_attention(), inputs(coordinates)
    theirs.load_state_dict(ours.state_dict())
    valid_BN = torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(2)) < 0.8 if padded else None
    results = []
    for layer, y_BQD in ((ours, ours(*tensors, SIZES, valid_BN)), (theirs, theirs_on(theirs, tensors, valid_BN))):
        results.append([y_BQD, *torch.autograd.grad(y_BQD.square().sum(), [*tensors, *layer.parameters()])])
    for found, expected in zip(*results, strict=True):
        assert expected.abs().max() > 1e-3
        close(found, expected)


def test_reading_points_equals_the_core_of_transformers() -> None:
    torch.manual_seed(3)
    value_BNHK = torch.randn(2, TOKENS, HEADS, 8, dtype=torch.float64)
    locations = torch.rand(2, QUERIES, HEADS, LEVELS, POINTS, 2, dtype=torch.float64) * 1.4 - 0.2
    weights = torch.rand(2, QUERIES, HEADS, LEVELS, POINTS, dtype=torch.float64)
    shapes = torch.tensor(SIZES)
    expected = MultiScaleDeformableAttention()(value_BNHK, shapes, SIZES, shapes.prod(1), locations, weights, 64)
    close(read_points(value_BNHK, SIZES, locations, weights), expected)


def test_point_at_the_center_of_a_token_reads_that_token() -> None:
    value_BNHK = torch.arange(12.0).view(1, 12, 1, 1)
    row, column = 1, 2
    location = torch.tensor([(column + 0.5) / 4, (row + 0.5) / 3]).view(1, 1, 1, 1, 1, 2)
    close(read_points(value_BNHK, [(3, 4)], location, torch.ones(1, 1, 1, 1, 1)), torch.tensor([[[6.0]]]))


def test_point_outside_of_every_token_reads_zeros() -> None:
    location = torch.full((1, 1, 1, 1, 1, 2), 1.5)
    assert read_points(torch.ones(1, 12, 1, 1), [(3, 4)], location, torch.ones(1, 1, 1, 1, 1)) == 0


def test_initial_points_are_those_of_transformers() -> None:
    """Offsets 1 to P tokens away from the reference, in one direction per head; equal weights."""
    ours = DeformableAttention(DIM, HEADS, num_levels=LEVELS, num_points=POINTS)
    theirs = transformers_attention()
    for name in ("sampling_offsets", "attention_weights"):
        for kind in ("weight", "bias"):
            found, expected = (getattr(layer.get_submodule(name), kind) for layer in (ours, theirs))
            close(found.double(), expected, atol=1e-6, rtol=1e-6)
    offsets_HLP2 = ours.sampling_offsets.bias.view(HEADS, LEVELS, POINTS, 2)
    close(offsets_HLP2[0, 0], torch.tensor([[1.0, 0.0], [2.0, 0.0]]))
    assert (ours.weights(torch.randn(1, 3, DIM)) == 1 / (LEVELS * POINTS)).all()


@pytest.mark.parametrize("kind", ["trunc_normal", "jax"])
def test_initialization_of_a_model_keeps_the_initial_points(kind: str) -> None:
    layer = DeformableAttention(DIM, HEADS, num_levels=LEVELS, num_points=POINTS)
    before = layer.sampling_offsets.bias.clone()
    init_weights(nn.Sequential(layer), kind)
    assert torch.equal(layer.sampling_offsets.bias, before)
    assert layer.sampling_offsets.weight.abs().max() == layer.attention_weights.weight.abs().max() == 0
    limit = (6 / (2 * DIM)) ** 0.5
    assert 0.9 * limit < layer.value_proj.weight.abs().max() <= limit


def test_half_precision_keeps_locations_exact() -> None:
    """bf16 has 8 bits: alone it cannot address the tokens of a level with more than 256 columns."""
    layer = attention().float()
    x_BQD, reference_BQLC, tokens_BND = (tensor.detach().float() for tensor in inputs())
    with torch.autocast("cpu", torch.bfloat16):
        locations = layer.locations(x_BQD, reference_BQLC, SIZES)
        y_BQD = layer(x_BQD, reference_BQLC, tokens_BND, SIZES)
    assert locations.dtype == torch.float32
    torch.testing.assert_close(y_BQD.float(), layer(x_BQD, reference_BQLC, tokens_BND, SIZES), atol=0.1, rtol=0.1)


def test_levels_that_do_not_fit_the_tokens_are_rejected() -> None:
    x_BQD, reference_BQLC, tokens_BND = inputs()
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        attention()(x_BQD, reference_BQLC, tokens_BND[:, 1:], SIZES)
    with pytest.raises(ValueError, match="not divisible by num_heads = 3"):
        DeformableAttention(DIM, 3, num_levels=1)
