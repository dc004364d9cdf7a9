"""Default benchmark images: crops of the two photographs included in scikit-learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def make_photographs(folder: Path, count: int = 300, width: int = 470, height: int = 400) -> str:
    """Write JPEG files in two classes; returns the directory as a data.source."""
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(0)
    for label, photograph in enumerate(load_sample_images().images):
        (folder / str(label)).mkdir(parents=True)
        for i in range(count // 2):
            left = rng.integers(0, photograph.shape[1] - width)
            top = rng.integers(0, photograph.shape[0] - height)
            crop = Image.fromarray(photograph[top : top + height, left : left + width])
            crop.save(folder / str(label) / f"{i}.jpg", quality=95, subsampling=0)
    return str(folder)
