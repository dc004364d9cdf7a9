"""CPU attention kernel vs. torch's scaled_dot_product_attention, forward and backward.

    python benchmarks/attention_kernel.py [--rounds 20] [--shapes 16x197x6x64 ...] [--json]

Both start from the output of a fused query, key and value projection and end with its gradient, which is checked to be
equal before timing. Always runs on CPU, regardless of `--device`: on GPU, torch's kernels are used.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from compare import Row, compare, interleave, matmul_gflops, parser, seconds, show
from torch import Tensor

from vit_scale.kernels.cpu_attention import attend, is_built

LIMIT = (
    "matmuls, five in the backward pass and two in the forward pass; short rows leave much of the last vector "
    "unused (with 65 elements in vectors of 16, 20% of all)"
)


def main() -> None:
    """Run the benchmark and print the results."""
    options = parser(__doc__, rounds=20)
    options.add_argument(
        "--shapes",
        nargs="+",
        default=["16x197x6x64", "64x65x3x64", "8x577x6x64"],
        help="images x tokens x heads x head dimension",
    )
    args = options.parse_args()
    args.device = "cpu"
    peak = matmul_gflops()
    notes = [f"Matmul: {peak:.0f} GFLOP/s"]
    if not is_built():
        notes.append("The custom kernel is not available (no compiler or no AVX2): both sides use torch")
    show([measure(shape, peak, args) for shape in args.shapes], args, notes)


def measure(shape: str, peak: float, args: argparse.Namespace) -> Row:
    """Measure GFLOP/s of both sides, including the scores that flash attention recomputes."""
    images, tokens, heads, width = map(int, shape.split("x"))
    torch.manual_seed(0)
    qkv_BNC = torch.randn(images, tokens, 3 * heads * width, requires_grad=True)
    grad_BND = torch.randn(images, tokens, heads * width)
    sides = {"ours": attend if is_built() else by_torch, "torch": by_torch}
    gradients = [gradient(side, qkv_BNC, heads, grad_BND) for side in sides.values()]
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)
    gflop = 7 * 2 * images * heads * tokens**2 * width / 1e9

    def speed(side: Callable[[Tensor, int], Tensor]) -> Callable[[], float]:
        return lambda: gflop / seconds(lambda: gradient(side, qkv_BNC, heads, grad_BND))

    values = interleave({name: speed(side) for name, side in sides.items()}, args.rounds, warmup=3)
    case = f"{images} images, {tokens} tokens, {heads} heads of {width}"
    row = compare(case, values, "ours", "torch", "GFLOP/s", limit=LIMIT)
    return replace(row, mfu=(row.ours / peak, row.baseline / peak))


def by_torch(qkv_BNC: Tensor, heads: int) -> Tensor:
    """Compute attention like timm's model."""
    q, k, v = qkv_BNC.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def gradient(side: Callable[[Tensor, int], Tensor], qkv_BNC: Tensor, heads: int, grad_BND: Tensor) -> Tensor:
    """Run forward and backward and return the gradient."""
    (found,) = torch.autograd.grad(side(qkv_BNC, heads), qkv_BNC, grad_BND)
    return found


if __name__ == "__main__":
    main()
