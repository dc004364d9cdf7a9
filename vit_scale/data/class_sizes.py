"""How many images the classes have: the smallest and the largest, and what a user should know about them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vit_scale.config import DataConfig
from vit_scale.format import printable, some

Ints = npt.NDArray[np.int64]

_MIN_VAL_IMAGES = 2
MAX_IMBALANCE = 10


def describe_sizes(labels: Ints | None, names: tuple[str, ...]) -> dict[str, str]:
    """Return a line for the header: `classes: 4 (cow) to 30 (ant) training images`; none without classes."""
    if labels is None or not names:
        return {}
    sizes = np.bincount(labels, minlength=len(names))
    small, large = int(sizes.argmin()), int(sizes.argmax())
    if sizes[small] == sizes[large]:
        return {"classes": f"{sizes[small]:,} training images each"}
    fewest, most = (f"{sizes[i]:,} ({printable(names[i])})" for i in (small, large))
    return {"classes": f"{fewest} to {most} training images"}


def class_notes(
    train: Ints | None, val: Ints | None, names: tuple[str, ...], config: DataConfig, *, is_held_out: bool
) -> tuple[str, ...]:
    """Return what a user should know: classes in one split only, with few validation images, or of uneven size."""
    if train is None or val is None or not names:
        return ()
    train_sizes, val_sizes = (np.bincount(labels, minlength=len(names)) for labels in (train, val))
    notes = []
    if len(names) == 1:
        notes.append(f"{config.source}: only one class ({printable(names[0])}), so there is nothing to learn")
    one_sided = {
        "without any image": (train_sizes == 0) & (val_sizes == 0),
        "in the training split only": (val_sizes == 0) & (train_sizes > 0) & (not is_held_out),
        "in the validation split only": (train_sizes == 0) & (val_sizes > 0),
    }
    notes += [f"{config.source}: {_named(chosen, names)} {text}" for text, chosen in one_sided.items() if chosen.any()]
    few = (val_sizes < _MIN_VAL_IMAGES) & (train_sizes > 0) & ((val_sizes > 0) | is_held_out)
    if few.any():
        subject = (
            f"all {len(names):,} classes have" if few.all() and len(names) > 1 else _named(few, names, "has", "have")
        )
        advice = "raise data.val_fraction or add images" if is_held_out else "add validation images"
        notes.append(f"{config.source}: {subject} fewer than {_MIN_VAL_IMAGES} validation images; {advice}")
    return tuple(notes)


def imbalance_note(train: Ints | None, names: tuple[str, ...], config: DataConfig) -> str | None:
    """Return a warning if the largest class has more than MAX_IMBALANCE times the images of the smallest."""
    if train is None or not names:
        return None
    sizes = np.bincount(train, minlength=len(names))
    found = np.flatnonzero(sizes)
    small, large = found[sizes[found].argmin()], found[sizes[found].argmax()]
    if sizes[large] <= MAX_IMBALANCE * sizes[small]:
        return None
    listed = ", ".join(f"{sizes[i]:,} of {printable(names[i])}" for i in (large, small))
    return (
        f"{config.source}: classes are imbalanced {sizes[large] / sizes[small]:,.0f}:1 ({listed}); "
        "consider data.balance=true or optim.class_weights=balanced"
    )


def _named(chosen: npt.NDArray[np.bool_], names: tuple[str, ...], one: str = "is", many: str = "are") -> str:
    """Return `3 of 10 classes (a, b, c) are`, or `class a is`."""
    found = [names[i] for i in np.flatnonzero(chosen)]
    if len(found) == 1:
        return f"class {some(found)} {one}"
    return f"{len(found):,} of {len(names):,} classes ({some(found)}) {many}"
