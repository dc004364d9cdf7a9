"""Statistics of the attention of a model over many images, block by block: only one block's weights are in memory.

Shapes: B images, L blocks, H heads, N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vit_scale.attention_report.layout import TokenLayout, check_tokens, token_layout
from vit_scale.attention_report.names import TABLE
from vit_scale.attention_report.statistics import (
    attention_distance,
    effective_rank,
    head_similarity,
    normalized_entropy,
    patch_distances,
    prefix_share,
    singular_values,
)
from vit_scale.models.attention_weights import attention_weights
from vit_scale.tasks.results import Table
from vit_scale.tasks.task import sum_over_ranks

MAX_WEIGHTS = 4_000_000
"""Attention weights of a head that are in memory: images of a chunk times tokens squared."""
SPECTRUM_COST = 100_000_000_000
"""Matrices times tokens cubed, of the singular values of all images: about a minute on two cores."""
MAX_SPECTRA = 16


def affordable_spectra(model: Any, layout: TokenLayout, cost: int = SPECTRUM_COST, *, at_least: int = 1) -> int:
    """Return of how many images the singular values take at most `cost`.

    `at_least` so many may take three times as much; 0 if they would take more.
    """
    matrices = sum(int(block.attn.num_heads) for block in model.blocks)
    of_image = matrices * layout.tokens**3
    return min(MAX_SPECTRA, max(cost // of_image, at_least if at_least * of_image <= 3 * cost else 0))


@dataclass(frozen=True)
class BlockStatistics:
    """Means over images of the heads of a block, on the CPU."""

    distance: Tensor
    """[H], in pixels of the model's input."""
    entropy: Tensor
    """[H], from 0 to 1."""
    prefix: Tensor
    """[H], fraction of the attention of patches on prefix tokens."""
    similarity: Tensor
    """[H, H]"""
    rank: Tensor | None
    """[H], effective rank, from 1 to N; None if no spectrum was computed."""
    spectrum: Tensor | None
    """[H, N], singular values, largest first."""

    @property
    def heads(self) -> int:
        """Return the number of heads."""
        return len(self.distance)

    def similarity_to_others(self) -> Tensor | None:
        """Return the mean similarity of each head to the other heads; None of a single head."""
        if self.heads == 1:
            return None
        return (self.similarity.sum(1) - self.similarity.diagonal()) / (self.heads - 1)


@dataclass(frozen=True)
class AttentionStatistics:
    """Statistics of a model over images."""

    layout: TokenLayout
    images: int
    spectrum_images: int
    blocks: list[BlockStatistics]

    @property
    def uniform_distance(self) -> float:
        """Return the distance of attention that is equal everywhere."""
        return patch_distances(self.layout.grid, self.layout.patch).mean().item()

    def table(self) -> Table:
        """Return one row per block and head."""
        columns = ["block", "head", "distance", "entropy", "prefix_share", "similarity", "effective_rank"]
        rows = []
        for index, block in enumerate(self.blocks):
            optional = (block.similarity_to_others(), block.rank)
            for head in range(block.heads):
                numbers = [block.distance, block.entropy, block.prefix]
                values = [each[head].item() for each in numbers]
                more = [None if each is None else each[head].item() for each in optional]
                rows.append([index, head, *(_finite(value) for value in (*values, *more))])
        return Table(TABLE, "Attention per block and head", columns, rows, percent=["prefix_share"])


def _finite(value: float | None) -> float | None:
    """Return the value to seven digits; None for a value that is not finite, which JSON cannot hold."""
    return float(f"{value:.7g}") if value is not None and abs(value) < float("inf") else None


class AttentionMeter:
    """Sums the statistics of images, over all ranks; sums stay on the device until they are read."""

    def __init__(self, model: nn.Module, *, spectrum_images: int, name: str = "") -> None:
        """`spectrum_images`: how many of the first images have their singular values computed, which takes long."""
        self.model, self.spectrum_images, self.name = model, spectrum_images, name
        self.layout: TokenLayout | None = None
        self._sums: list[list[Tensor]] = []
        """Of each block: `BlockStatistics`' values, summed over images."""
        self._counts = torch.zeros(2, dtype=torch.float64)

    def add(self, x_BCHW: Tensor, positions_B: Tensor) -> None:
        """Add normalized images; `positions_B` are their places in the data, negative for padding.

        Every rank must call it, with equally many images.
        """
        self.layout = token_layout(self.model, (x_BCHW.shape[-2], x_BCHW.shape[-1]), self.name)
        size = max(1, MAX_WEIGHTS // self.layout.tokens**2)
        distances = patch_distances(self.layout.grid, self.layout.patch).to(x_BCHW.device)
        for images, positions in zip(x_BCHW.split(size), positions_B.cpu().split(size), strict=True):
            real, first = positions >= 0, (positions >= 0) & (positions < self.spectrum_images)
            self._counts += torch.stack([real.sum(), first.sum()])
            block = 0
            for weights in attention_weights(self.model, images):
                check_tokens(weights, self.layout, block, self.name)
                self._add_block(block, weights, real, first, distances)
                block += 1  # noqa: SIM113 -- enumerate would keep the weights while the next block's are computed
                del weights

    def _add_block(self, block: int, weights: Tensor, real: Tensor, first: Tensor, distances: Tensor) -> None:
        assert self.layout is not None
        found = [
            attention_distance(weights, distances),
            normalized_entropy(weights),
            prefix_share(weights, self.layout.prefix),
            head_similarity(weights),
        ]
        sums = [each.double()[real.to(each.device)].sum(0) for each in found]
        values = singular_values(weights[first.to(weights.device)])
        spectra = [effective_rank(values), values] if len(values) else []
        # All ranks have the same sums, also one whose images have no spectrum.
        heads, tokens = weights.shape[1:3]
        shapes: Sequence[tuple[int, ...]] = [(heads,), (heads, tokens)]
        sums += [each.double().sum(0).to(weights.device) for each in spectra] or [
            torch.zeros(shape, dtype=torch.float64, device=weights.device) for shape in shapes
        ]
        if block == len(self._sums):
            self._sums.append(sums)
        else:
            self._sums[block] = [total + new for total, new in zip(self._sums[block], sums, strict=True)]

    def statistics(self, *, over_ranks: bool = True) -> AttentionStatistics:
        """Return the means over the images of all ranks; every rank must call it, after at least one image.

        `over_ranks=False`: over the images of this rank.
        """
        assert self.layout is not None, "every rank measures at least one batch"
        total = sum_over_ranks if over_ranks else torch.clone
        device = self._sums[0][0].device
        images, with_spectrum = total(self._counts.to(device)).tolist()
        blocks = []
        for sums in self._sums:
            flat = total(torch.cat([each.flatten() for each in sums])).cpu()
            parts = flat.split([each.numel() for each in sums])
            *means, rank, spectrum = [part.view(each.shape) for part, each in zip(parts, sums, strict=True)]
            distance, entropy, prefix, similarity = [each / max(1.0, images) for each in means]
            spectra = (rank / with_spectrum, spectrum / with_spectrum) if with_spectrum else (None, None)
            blocks.append(BlockStatistics(distance, entropy, prefix, similarity, *spectra))
        return AttentionStatistics(self.layout, int(images), int(with_spectrum), blocks)
