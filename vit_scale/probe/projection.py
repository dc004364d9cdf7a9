"""A picture of features: projected to two dimensions, one point per image, in the color of its class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_POINTS = 2000
"""Images shown; t-SNE takes some 10 s for so many."""
MAX_COLORS = 20
"""Classes with a color; all others are gray."""
_TSNE_DIMENSIONS = 50
"""Principal components that t-SNE starts from."""
_MIN_FOR_TSNE = 10


def projection_figure(
    features: Tensor, labels: Tensor, class_names: Sequence[str], *, title: str, seed: int = 0
) -> Figure:
    """Plot the two main principal components, and t-SNE, of features [n, D]; the largest classes are in color."""
    from matplotlib.figure import Figure

    chosen = _spread(labels)
    points, label = features[chosen], labels[chosen].numpy()
    components, explained = principal_components(points, _TSNE_DIMENSIONS)
    plots = {f"PCA ({100 * explained[:2].sum():.0f}% of the variance)": components[:, :2].numpy()}
    if len(points) >= _MIN_FOR_TSNE:
        plots["t-SNE"] = _tsne(components.numpy(), seed)
    figure = Figure(figsize=(6.0 * len(plots) + 2, 6.0), layout="constrained")
    colors = _colors(label)
    for axes, (name, places) in zip(figure.subplots(1, len(plots), squeeze=False)[0], plots.items(), strict=True):
        _scatter(axes, places, label, class_names, colors)
        axes.set_title(name, loc="left", fontsize=10)
    shown = f"{len(points):,} images" if len(points) == len(labels) else f"{len(points):,} of {len(labels):,} images"
    figure.suptitle(f"{title}, {shown}", x=0.005, ha="left", fontsize=11)
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", frameon=False, fontsize=9, markerscale=2)
    return figure


def principal_components(rows_ND: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the main components of each row, largest variance first, and the fraction of the variance of each.

    At least two, of zeros if there are no more; the entry of largest magnitude of each direction is positive.
    """
    centered = rows_ND.double() - rows_ND.double().mean(0)
    left, values, right = torch.linalg.svd(centered, full_matrices=False)
    largest = right.gather(1, right.abs().argmax(1, keepdim=True))
    found = left * values * torch.where(largest < 0, -1.0, 1.0).T
    total = values.square().sum().clamp(min=1e-300)
    wanted = min(count, len(values))
    missing = max(0, 2 - wanted)
    explained = torch.cat([values.square()[:wanted] / total, torch.zeros(missing, dtype=torch.float64)])
    return torch.cat([found[:, :wanted], found.new_zeros(len(found), missing)], dim=1), explained


def _spread(labels: Tensor) -> Tensor:
    """Return the indices of at most MAX_POINTS images, spread evenly over the images in order of their class."""
    by_class = labels.argsort(stable=True)
    count = min(MAX_POINTS, len(labels))
    return by_class[(torch.arange(count) * len(labels)) // count]


def _tsne(rows: np.ndarray, seed: int) -> np.ndarray:
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(rows) - 1) / 3)
    scaled = rows / max(1e-12, float(rows[:, 0].std()))
    return TSNE(2, perplexity=perplexity, init=scaled[:, :2] * 1e-4, random_state=seed, n_jobs=1).fit_transform(scaled)


def _colors(labels: np.ndarray) -> dict[int, Any]:
    """Return a color for each of the largest classes, by class."""
    from matplotlib import colormaps

    classes, counts = np.unique(labels, return_counts=True)
    chosen = sorted(classes[np.argsort(-counts, kind="stable")][:MAX_COLORS])
    palette = colormaps["tab10" if len(chosen) <= 10 else "tab20"].colors  # type: ignore[attr-defined]
    return {int(each): palette[i] for i, each in enumerate(chosen)}


def _scatter(axes: Any, places: np.ndarray, labels: np.ndarray, names: Sequence[str], colors: dict[int, Any]) -> None:
    others = ~np.isin(labels, list(colors))
    if others.any():
        count = len(np.unique(labels[others]))
        axes.scatter(*places[others].T, s=6, color="#d0d0d0", linewidths=0, label=f"{count:,} other classes")
    # In random order, so that no class covers another where points overlap.
    shown = np.random.default_rng(0).permutation(np.flatnonzero(~others))
    axes.scatter(*places[shown].T, s=14, c=[colors[int(each)] for each in labels[shown]], linewidths=0, alpha=0.8)
    for each, color in colors.items():
        name = names[each] if len(names[each]) <= 24 else f"{names[each][:23]}…"
        axes.scatter([], [], s=14, color=color, linewidths=0, label=name)
    axes.set_xticks([])
    axes.set_yticks([])
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_color("#cccccc")
