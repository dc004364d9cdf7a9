"""Muon (Jordan et al., 2024): orthogonalized momentum for the matrices of blocks, AdamW for all other parameters.

torch's and timm's Muon iterate in bf16, which crashes on some CPUs that advertise it; here a CPU iterates in fp32.
Matrices of the same shape, such as those of all blocks, are batched. If several processes train the same weights, each
orthogonalizes its part of the matrices, and they exchange the results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

# Coefficients of the quintic iteration, by Keller Jordan: they increase small singular values quickly and bring all of
# them between about 0.7 and 1.2.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Groups with `matrices` set take Muon steps, all others AdamW steps.

    Steps are scaled to the typical size of AdamW steps (Liu et al., 2025, arXiv:2502.16982: 0.2 x the square root of
    the longer side), so that learning rates of AdamW are a good starting point.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ):
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": 0.0, "matrices": False}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step with the current gradients."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if group["matrices"]:
                self._step_matrices(params, group)
            else:
                self._step_others(params, group)

    def _step_matrices(self, params: list[Tensor], group: dict[str, Any]) -> None:
        by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for p in params:
            by_shape[p.shape].append(p)
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        for shape, alike in by_shape.items():
            directions = orthogonal_together(torch.stack([self._nesterov(p, group["momentum"]) for p in alike]))
            size = -group["lr"] * 0.2 * max(shape) ** 0.5
            torch._foreach_add_(alike, list(directions.to(alike[0].dtype).unbind()), alpha=size)

    def _nesterov(self, p: Tensor, momentum: float) -> Tensor:
        """Return the gradient with Nesterov momentum."""
        assert p.grad is not None
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer = state["momentum_buffer"].lerp_(p.grad, 1 - momentum)
        return torch.lerp(p.grad, buffer, momentum)

    def _step_others(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for p in params:
            if "step" not in self.state[p]:
                zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                self.state[p] |= {"step": torch.zeros(()), **zeros}
        states = [self.state[p] for p in params]
        adamw(
            params,
            [p.grad for p in params if p.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def orthogonal_together(matrices: Tensor) -> Tensor:
    """Return `orthogonal` of matrices [K, rows, columns] that are the same on all processes, which split the work."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        return orthogonal(matrices)
    part = -(-len(matrices) // world)
    # Indices past the end wrap around: every process must contribute equally many.
    own = torch.arange(dist.get_rank() * part, (dist.get_rank() + 1) * part, device=matrices.device) % len(matrices)
    done = orthogonal(matrices[own]).contiguous()
    found = torch.empty(world * part, *matrices.shape[1:], dtype=done.dtype, device=done.device)
    dist.all_gather_into_tensor(found, done)
    return found[: len(matrices)]


def orthogonal(matrices: Tensor) -> Tensor:
    """Return roughly the nearest orthogonal matrices [K, rows, columns]: singular values between about 0.7 and 1.2."""
    x = matrices.to(torch.bfloat16 if matrices.device.type == "cuda" else torch.float32)
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = _A * x + torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C) @ x
    return x.mT if tall else x
