"""Linear probes: linear classifiers of frozen features, one per learning rate and weight decay, trained at once.

Features are standardized by the training images, which is BatchNorm without affine parameters in front of a head. All
heads are columns of one matrix, so a step is one product forward and one backward. SGD with momentum 0.9, a cosine
schedule, L2 regularization of the weights, cross entropy.

Shapes: B batch, D features, H heads, C classes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vit_scale.data.sampling import sample_index
from vit_scale.data.sources.table_source import balanced_holdout

LEARNING_RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0, 10.0)
WEIGHT_DECAYS = (0.0, 1e-4, 1e-3, 1e-2)
HELD_OUT = 0.2
"""Fraction of the training images that the setting is selected on."""
BATCH, STEPS, EPOCHS = 1024, 1000, 20
"""Batch size; the training length is the longer one of these."""
_MOMENTUM = 0.9


class Setting(NamedTuple):
    """Hyperparameters of one head."""

    lr: float
    weight_decay: float


GRID = tuple(Setting(*pair) for pair in itertools.product(LEARNING_RATES, WEIGHT_DECAYS))


@dataclass(frozen=True)
class LinearProbe:
    """The selected setting and its results."""

    setting: Setting
    held_out: float
    """Accuracy of the selected setting on the held-out training images."""
    predictions: Tensor
    """Predicted class of each query, by a head trained on all training images."""
    grid: dict[Setting, float]
    """Accuracy of each setting on the held-out training images."""

    def is_at_the_edge(self) -> bool:
        """Return whether the selected learning rate is the smallest or largest one that was tried."""
        rates = {setting.lr for setting in self.grid}
        return len(rates) > 1 and self.setting.lr in (min(rates), max(rates))


def linear_probe(
    train_ND: Tensor,
    labels_N: Tensor,
    queries_QD: Tensor,
    num_classes: int,
    *,
    seed: int,
    settings: Sequence[Setting] = GRID,
    steps: int | None = None,
    device: torch.device | str = "cpu",
    advance: Callable[[], None] = lambda: None,
) -> LinearProbe:
    """Select a setting on held-out training images, retrain it on all of them, and predict the queries.

    A function of the features and the seed. `advance` is called after each step: `training_steps` times two.
    """
    held = held_out(labels_N, seed)
    steps = steps or training_steps(len(train_ND))
    options: dict[str, Any] = {
        "num_classes": num_classes,
        "seed": seed,
        "steps": steps,
        "device": device,
        "advance": advance,
    }
    heads = _fit(train_ND[~held], labels_N[~held], settings, **options)
    accuracy, loss = heads.score(train_ND[held], labels_N[held])
    # Diverged heads have a loss that is not a number; of equally good ones the one with the lower loss.
    ranked = sorted(range(len(settings)), key=lambda head: (-accuracy[head], loss[head]))
    best = settings[ranked[0]]
    final = _fit(train_ND, labels_N, [best], **options)
    grid = dict(zip(settings, accuracy, strict=True))
    return LinearProbe(best, accuracy[ranked[0]], final.predict(queries_QD), grid)


def training_steps(images: int) -> int:
    """Return the steps of a training run on so many images."""
    return max(STEPS, math.ceil(EPOCHS * images / BATCH))


def held_out(labels_N: Tensor, seed: int) -> Tensor:
    """Return the mask of the held-out images: the same fraction of each class, drawn by the seed."""
    labels = labels_N.numpy()
    order = np.random.default_rng(seed).permutation(len(labels))
    mask = np.zeros(len(labels), dtype=bool)
    mask[order] = balanced_holdout(labels[order], HELD_OUT)
    return torch.from_numpy(mask)


@dataclass(frozen=True)
class _Heads:
    """Trained heads of equally standardized features.

    Heads are the last dimension: a softmax over classes that are the last one is 20 times as slow on a CPU.
    """

    weight_DCH: Tensor
    bias_CH: Tensor
    mean_D: Tensor
    scale_D: Tensor

    def logits(self, rows_BD: Tensor) -> Tensor:
        """Return the logits [B, C, H] of features."""
        x_BD = (rows_BD.to(self.mean_D.device) - self.mean_D) * self.scale_D
        return (x_BD @ self.weight_DCH.flatten(1)).unflatten(1, self.bias_CH.shape) + self.bias_CH

    def predict(self, rows: Tensor) -> Tensor:
        """Return the classes that the only head predicts."""
        return torch.cat([self.logits(part)[..., 0].argmax(1).cpu() for part in rows.split(BATCH)])

    def score(self, rows: Tensor, labels: Tensor) -> tuple[list[float], list[float]]:
        """Return accuracy and loss of each head; 0 and infinity if it has diverged."""
        hits = loss = torch.zeros(self.bias_CH.shape[1], dtype=torch.float64)
        for part, label_B in zip(rows.split(BATCH), labels.split(BATCH), strict=True):
            logits_BCH = self.logits(part).cpu()
            hits = hits + (logits_BCH.argmax(1) == label_B[:, None]).double().sum(0)
            loss = loss - logits_BCH.log_softmax(1)[torch.arange(len(label_B)), label_B].double().sum(0)
        finite = loss.isfinite()
        count = max(1, len(labels))
        return torch.where(finite, hits / count, 0.0).tolist(), torch.where(finite, loss / count, torch.inf).tolist()


@torch.no_grad()
def _fit(
    rows: Tensor,
    labels: Tensor,
    settings: Sequence[Setting],
    *,
    num_classes: int,
    seed: int,
    steps: int,
    device: torch.device | str,
    advance: Callable[[], None],
) -> _Heads:
    """Train one head per setting; all see the same batches."""
    mean, deviation = rows.mean(0).to(device), rows.std(0, correction=0).to(device)
    # Features that are constant up to rounding carry nothing.
    scale = torch.where(deviation > 1e-6 * deviation.max(), 1 / deviation, 0.0)
    heads, size = len(settings), min(BATCH, len(rows))
    weight, bias = (torch.zeros(count, num_classes * heads, device=device) for count in (rows.shape[1], 1))
    velocity, bias_velocity = torch.zeros_like(weight), torch.zeros_like(bias)
    lr, decay = (torch.tensor(values, device=device).repeat(num_classes) for values in zip(*settings, strict=True))
    batch = torch.arange(size, device=device)
    for step in range(steps):
        index = torch.from_numpy(sample_index(seed, np.arange(step * size, (step + 1) * size), len(rows)))
        x_BD, label_B = (rows[index].to(device) - mean) * scale, labels[index].to(device)
        grad_BCH = (x_BD @ weight + bias).view(size, num_classes, heads).softmax(1)
        grad_BCH[batch, label_B] -= 1
        grad = grad_BCH.flatten(1) / size
        velocity.mul_(_MOMENTUM).add_(x_BD.T @ grad).addcmul_(weight, decay)
        bias_velocity.mul_(_MOMENTUM).add_(grad.sum(0))
        rate = lr * (0.5 * (1 + math.cos(math.pi * step / steps)))
        weight -= rate * velocity
        bias -= rate * bias_velocity
        advance()
    return _Heads(weight.view(-1, num_classes, heads), bias.view(num_classes, heads), mean, scale)
