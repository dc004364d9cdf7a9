"""A folder of real photographs by class, cut from those that scikit-image ships; also run by hand:

python tests/photographs.py photos
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("astronaut", "brick", "cat", "coffee", "grass", "retina", "rocket")
SIZE = 160


def write_photographs(folder: Path, *, per_class: int = 40, seed: int = 0) -> Path:
    """Write `per_class` crops of one photograph per class, of different size, position and orientation."""
    rng = np.random.default_rng(seed)
    for name in CLASSES:
        (folder / name).mkdir(parents=True, exist_ok=True)
        photograph = _photograph(name)
        for number in range(per_class):
            _crop(photograph, rng).save(folder / name / f"{name}_{number:02d}.jpg", quality=90)
    return folder


def _photograph(name: str) -> Image.Image:
    from skimage import data

    return Image.fromarray(getattr(data, name)()).convert("RGB")


def _crop(photograph: Image.Image, rng: np.random.Generator) -> Image.Image:
    side = int(rng.uniform(0.4, 0.8) * min(photograph.size))
    left, top = (int(rng.integers(0, extent - side + 1)) for extent in photograph.size)
    crop = photograph.crop((left, top, left + side, top + side)).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
    return crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else crop


if __name__ == "__main__":
    print(f"Wrote {write_photographs(Path(sys.argv[1]))}")
