"""One optimizer step, a function of (seed, step) and the micro-batches of this rank."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from vit_scale.data.batch import Batch
from vit_scale.tasks.task import Task
from vit_scale.train.optim.optimizer import set_learning_rate
from vit_scale.train.state import TrainState


def update(
    task: Task, state: TrainState, batches: Sequence[Batch], *, lr: float, seed: int, clip_norm: float
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Take step `state.step` from the micro-batches of this rank.

    Returns the mean of each part of the loss over the micro-batches, and the gradient norm, on the device.
    """
    engine = state.engine
    set_learning_rate(engine.optimizer, lr)
    seed_everything(seed, state.step, engine.rank)
    task.before_update(batches, state.step, engine)
    seed_everything(seed, state.step, engine.rank)  # the passes of `before_update` draw the same dropout as these
    sums: dict[str, torch.Tensor] = {}
    for batch in batches:
        inputs = task.inputs(batch, state.step)
        with engine.accumulate():
            parts = task.loss(engine(*inputs.args), inputs)
            engine.backward(parts["loss"])
        for name, part in parts.items():
            sums[name] = sums[name] + part.detach() if name in sums else part.detach()
    norm = engine.step(clip_norm)
    state.count_skipped(norm)
    if state.ema is not None:
        state.ema.update(state.step)
    return {name: total / len(batches) for name, total in sums.items()}, norm


def seed_everything(seed: int, step: int, rank: int) -> None:
    """Make the draws of dropout and stochastic depth a function of (seed, step, rank)."""
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=7).digest()
    torch.manual_seed(int.from_bytes(digest, "little"))
