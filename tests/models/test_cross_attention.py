"""Cross attention equals nn.MultiheadAttention with the same weights, with every kernel that runs here."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from vit_scale.models.cross_attention import CrossAttention

DIM, HEADS, TOKEN_DIM = 32, 4, 24
close = partial(torch.testing.assert_close, atol=1e-10, rtol=1e-8)


def reference(bias: bool = True, token_dim: int = TOKEN_DIM) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(DIM, HEADS, bias=bias, kdim=token_dim, vdim=token_dim, batch_first=True)
    for name, parameter in attention.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return attention.double()


def projections(theirs: nn.MultiheadAttention) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Their weights by the name of our layer; equal widths are packed in one matrix."""
    packed = theirs.in_proj_weight
    separate = (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight)
    weights = separate if packed is None else packed.chunk(3)
    biases = (None, None, None) if theirs.in_proj_bias is None else theirs.in_proj_bias.chunk(3)
    layers = dict(zip("qkv", zip(weights, biases, strict=True), strict=True))
    return layers | {"proj": (theirs.out_proj.weight, theirs.out_proj.bias)}


def copy_of(theirs: nn.MultiheadAttention, **options: object) -> CrossAttention:
    bias = theirs.in_proj_bias is not None
    ours = CrossAttention(DIM, HEADS, token_dim=theirs.kdim, bias=bias, **options).double()
    with torch.no_grad():
        for name, (weight, bias) in projections(theirs).items():
            ours.get_submodule(name).weight.copy_(weight)
            if bias is not None:
                ours.get_submodule(name).bias.copy_(bias)
    return ours


def inputs(token_dim: int = TOKEN_DIM) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    shapes = ((2, 5, DIM), (2, 7, token_dim), (2, 7, token_dim))
    return tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)


def masks(kind: str) -> tuple[Tensor | None, Tensor | None]:
    valid_BN = torch.arange(7) < torch.tensor([[7], [4]])
    mask_BQN = torch.rand(2, 5, 7, generator=torch.Generator().manual_seed(2)) < 0.6
    mask_BQN[..., 0] = True
    return valid_BN if kind in ("padding", "both") else None, mask_BQN if kind in ("mask", "both") else None


def gradients(y: Tensor, module: nn.Module, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return list(torch.autograd.grad(y.square().sum(), [*tensors, *module.parameters()]))


@pytest.mark.parametrize("kernel", ["auto", "math", "explicit"])
@pytest.mark.parametrize("kind", ["none", "padding", "mask", "both"])
def test_output_and_gradients_equal_multihead_attention(kind: str, kernel: str) -> None:
    theirs, tensors = reference(), inputs()
    ours = copy_of(theirs, kernel=kernel)
    valid_BN, mask_BQN = masks(kind)
    y_BQD = ours(*tensors, valid_BN=valid_BN, mask_BQN=mask_BQN)
    expected, weights = theirs(
        *tensors,
        key_padding_mask=None if valid_BN is None else ~valid_BN,
        attn_mask=None if mask_BQN is None else ~mask_BQN.repeat_interleave(HEADS, dim=0),
        average_attn_weights=False,
    )
    close(y_BQD, expected)
    close(ours.weights(*tensors[:2], valid_BN=valid_BN, mask_BQN=mask_BQN), weights)
    found, wanted = gradients(y_BQD, ours, tensors), gradients(expected, theirs, tensors)
    for ours_grad, theirs_grad in zip(found[:3], wanted[:3], strict=True):
        close(ours_grad, theirs_grad)
    by_name = dict(zip((name for name, _ in theirs.named_parameters()), wanted[3:], strict=True))
    ours_by_name = dict(zip((name for name, _ in ours.named_parameters()), found[3:], strict=True))
    for name in "qkv":
        close(ours_by_name[f"{name}.weight"], by_name[f"{name}_proj_weight"])
    close(torch.cat([ours_by_name[f"{name}.bias"] for name in "qkv"]), by_name["in_proj_bias"])
    close(ours_by_name["proj.weight"], by_name["out_proj.weight"])
    close(ours_by_name["proj.bias"], by_name["out_proj.bias"])


@pytest.mark.parametrize("bias", [True, False])
def test_tokens_of_the_same_width_equal_multihead_attention(bias: bool) -> None:
    theirs, (x_BQD, key_BND, _) = reference(bias, DIM), inputs(DIM)
    close(copy_of(theirs)(x_BQD, key_BND), theirs(x_BQD, key_BND, key_BND)[0])


def test_padding_changes_neither_output_nor_gradient() -> None:
    ours, (x_BQD, key_BNC, value_BNC) = copy_of(reference()), inputs()
    valid_BN = (torch.arange(7) < 4).expand(2, 7)
    y_BQD = ours(x_BQD, key_BNC, value_BNC, valid_BN=valid_BN)
    close(y_BQD, ours(x_BQD, key_BNC[:, :4], value_BNC[:, :4]))
    for gradient in torch.autograd.grad(y_BQD.sum(), [key_BNC, value_BNC]):
        assert gradient[:, 4:].abs().max() == 0


@pytest.mark.parametrize("kernel", ["auto", "math", "explicit"])
def test_query_that_may_attend_to_no_token_reads_zeros(kernel: str) -> None:
    ours, tensors = copy_of(reference(), kernel=kernel), inputs()
    mask_BQN = torch.ones(2, 5, 7, dtype=torch.bool)
    mask_BQN[0, 2] = False
    y_BQD = ours(*tensors, mask_BQN=mask_BQN)
    close(y_BQD[0, 2], ours.proj.bias)
    assert ours.weights(*tensors[:2], mask_BQN=mask_BQN)[0, :, 2].abs().max() == 0
    assert all(gradient.isfinite().all() for gradient in gradients(y_BQD, ours, tensors))


def test_kernels_agree_with_normalized_queries_and_keys() -> None:
    results = []
    for kernel in ("auto", "explicit"):
        torch.manual_seed(0)
        ours = CrossAttention(DIM, HEADS, token_dim=TOKEN_DIM, qk_norm=True, kernel=kernel).double()
        tensors = inputs()
        y_BQD = ours(*tensors)
        results.append([y_BQD, *gradients(y_BQD, ours, tensors)])
    for found, expected in zip(*results, strict=True):
        close(found, expected)


def test_half_precision_follows_full_precision() -> None:
    torch.manual_seed(0)
    ours = CrossAttention(DIM, HEADS, qk_norm=True)
    x_BQD, key_BND = torch.randn(2, 5, DIM), torch.randn(2, 7, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        y_BQD = ours(x_BQD, key_BND)
    assert y_BQD.dtype == torch.bfloat16
    torch.testing.assert_close(y_BQD.float(), ours(x_BQD, key_BND), atol=0.02, rtol=0.02)


def test_dropout_is_off_in_eval_mode() -> None:
    for kernel in ("auto", "explicit"):
        ours = CrossAttention(DIM, HEADS, dropout=0.5, attn_dropout=0.5, kernel=kernel)
        x_BQD, key_BND = torch.randn(2, 5, DIM), torch.randn(2, 7, DIM)
        assert not torch.equal(ours(x_BQD, key_BND), ours(x_BQD, key_BND))
        ours.eval()
        assert torch.equal(ours(x_BQD, key_BND), ours(x_BQD, key_BND))
