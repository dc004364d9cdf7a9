"""Calibration: are 80% of the predictions made with a confidence of 80% correct?

Guo et al. 2017, "On Calibration of Modern Neural Networks" (arXiv:1706.04599): predictions are sorted into bins by
their confidence; the expected calibration error is the mean gap between confidence and accuracy over predictions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BINS = 15
_WELL_CALIBRATED = 0.02
_FEW_IMAGES = 1000


@dataclass(frozen=True)
class Calibration:
    """Sums per confidence bin, from 0 to 1."""

    counts: list[float]
    confidences: list[float]
    """Sum of the confidences per bin."""
    hits: list[float]
    """Correct predictions per bin."""

    @property
    def error(self) -> float:
        """Return the expected calibration error."""
        gaps = [abs(conf - hit) for conf, hit in zip(self.confidences, self.hits, strict=True)]
        return sum(gaps) / max(1.0, sum(self.counts))

    @property
    def overconfidence(self) -> float:
        """Return mean confidence minus accuracy."""
        return (sum(self.confidences) - sum(self.hits)) / max(1.0, sum(self.counts))

    def note(self) -> str:
        """Explain the error in one line."""
        images = sum(self.counts)
        caution = f"; a rough estimate, from {images:,.0f} images" if images < _FEW_IMAGES else ""
        if self.error < _WELL_CALIBRATED:
            return f"well calibrated{caution}"
        direction = "above" if self.overconfidence > 0 else "below"
        return f"mean confidence {100 * abs(self.overconfidence):.1f} points {direction} accuracy{caution}"


def bin_sums(confidence_B: torch.Tensor, hit_B: torch.Tensor, weight_B: torch.Tensor) -> torch.Tensor:
    """Return counts, confidences and hits of a batch per bin, [3, BINS]; bins are open below and closed above."""
    bins_B = (confidence_B.double() * BINS).ceil().long().sub(1).clamp(0, BINS - 1)
    rows_3B = torch.stack((weight_B, confidence_B.double() * weight_B, hit_B.double() * weight_B))
    return torch.zeros(3, BINS, dtype=torch.float64, device=rows_3B.device).index_add_(1, bins_B, rows_3B)


def from_sums(sums: torch.Tensor) -> Calibration:
    """Return the calibration from sums over all batches and ranks."""
    return Calibration(*sums.tolist())
