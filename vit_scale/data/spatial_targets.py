"""Targets that move with the pixels: masks and boxes.

They are moved by torchvision's transforms v2 with the `Geometry` drawn for the image. torchvision is imported on first
use: runs without masks or boxes do not pay for it.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from vit_scale.config import DataConfig
from vit_scale.data.augment.geometry import Geometry
from vit_scale.data.images.decode import UnreadableImage
from vit_scale.data.sources.columns import find_column
from vit_scale.data.targets import Arrays, Collated, Columns, SlotSpec, TableRows, Values, element
from vit_scale.errors import UserError

IGNORE_INDEX = 255
"""Mask value of pixels without a class: padding, and pixels that the dataset excludes."""
_MASK_NAMES = ("mask", "segmentation_mask", "semantic_segmentation", "annotation", "label", "segmentation")
_OBJECTS_NAMES = ("objects", "annotations")
_BOX_NAMES = ("bbox", "boxes", "bboxes", "bounding_boxes")
_CLASS_NAMES = ("category", "categories", "class", "classes", "label", "labels", "category_id")
# Palette indices are classes; colors are not.
_MASK_MODES = ("L", "P", "1", "I", "I;16")


@dataclass(frozen=True)
class MaskTarget:
    """One class per pixel: {"mask": uint8 [m, H, W]}; padding and missing images are `ignore_index`."""

    column: str | None = None
    """Column of the masks; None: an image column with a name such as `mask` or `annotation`."""
    names: tuple[str, ...] = ()
    """Class names, which image columns do not have."""
    ignore_index: int = IGNORE_INDEX
    kind = "masks"
    is_spatial = True

    def find(self, features: Mapping[str, Any], config: DataConfig) -> tuple[str, ...]:
        """Return the mask column."""
        import datasets

        images = {name: value for name, value in features.items() if isinstance(value, datasets.Image)}
        return (find_column(features, images, self.column, _MASK_NAMES, "mask", config),)

    def class_names(self, dataset: Any, columns: tuple[str, ...], config: DataConfig) -> tuple[str, ...]:
        """Return the names given to this target."""
        return self.names

    def values(self, dataset: Any, columns: Columns) -> Values:
        """Return the stored masks, read on demand."""
        return TableRows(dataset, columns, self)

    def read(self, row: Mapping[str, Any], columns: Columns) -> Any:
        """Return the mask as stored: bytes or a path."""
        stored = row[columns.names[0]]
        return stored if stored is None else stored["bytes"] if stored["bytes"] is not None else stored["path"]

    def move(self, value: Any, geometry: Geometry) -> npt.NDArray[np.uint8]:
        """Decode the mask and move it, taking the nearest pixel, so that no class is invented at an edge."""
        import torch
        from torchvision.transforms.v2 import functional as v2

        mask = decode_mask(value)
        _check_mask_size(mask.shape, geometry.image)
        x = torch.from_numpy(mask)[None]
        # `NEAREST` would be shifted by half a pixel against the image.
        nearest = v2.InterpolationMode.NEAREST_EXACT
        if mask.shape != geometry.image:  # The image was shrunk by data.cache.
            x = v2.resize_image(x, list(geometry.image), nearest)
        left, top, right, bottom = geometry.box
        x = v2.crop_image(x, top, left, bottom - top, right - left)
        x = v2.resize_image(x, list(geometry.resized), nearest)
        x = v2.pad_image(x, list(geometry.padding), fill=self.ignore_index)
        x = v2.horizontal_flip_image(x) if geometry.hflip else x
        x = v2.vertical_flip_image(x) if geometry.vflip else x
        return np.asarray(x[0].numpy(), np.uint8)

    def collate(self, values: Sequence[Any], memory: Arrays) -> Collated:
        """Fill the masks in `memory`."""
        for mask, value in zip(memory["mask"], values, strict=True):
            mask[:] = self.ignore_index if value is None else value
        return {}, []

    def slot(self, size: tuple[int, int]) -> dict[str, SlotSpec]:
        """Return one mask per image."""
        return {"mask": SlotSpec(size, "uint8")}


class Boxes(NamedTuple):
    """The boxes of one image."""

    corners: npt.NDArray[np.float32]
    """[n, 4]: left, top, right, bottom in pixels of the image."""
    classes: npt.NDArray[np.int64]
    """[n]"""


@dataclass(frozen=True)
class BoxTarget:
    """Boxes with classes: {"boxes": float32 [N, 4], "class": int64 [N], "count": int64 [m]}.

    The boxes (left, top, right, bottom in pixels of the transformed image) of all images follow one another; `count`
    has the number per image. A crop cuts boxes, and drops those of which less than `min_size` pixels are left.

    A table has one column of objects, each with a box and a class, or one column of boxes and one of classes.
    """

    layout: Literal["xywh", "xyxy"] = "xywh"
    """Stored boxes: left, top, width, height (COCO), or left, top, right, bottom."""
    names: tuple[str, ...] = ()
    """Class names; empty: the names of the dataset's class feature."""
    min_size: float = 1.0
    """Smallest width and height of a box that is kept."""
    kind = "boxes"
    is_spatial = True

    def find(self, features: Mapping[str, Any], config: DataConfig) -> tuple[str, ...]:
        """Return the column of objects, or the columns of boxes and classes."""
        for name in _OBJECTS_NAMES:
            if isinstance(element(features.get(name)), Mapping):
                _find_fields(element(features[name]), f"column {name}", config)
                return (name,)
        return _find_fields(features, "the table", config)

    def class_names(self, dataset: Any, columns: tuple[str, ...], config: DataConfig) -> tuple[str, ...]:
        """Return the names given to this target, or those of the class feature."""
        feature = element(dataset.features[columns[-1]])
        if isinstance(feature, Mapping):
            feature = element(feature[_field_names(feature)[1]])
        return self.names or tuple(getattr(feature, "names", ()))

    def values(self, dataset: Any, columns: Columns) -> Values:
        """Return the boxes, read on demand."""
        return TableRows(dataset, columns, self)

    def read(self, row: Mapping[str, Any], columns: Columns) -> Boxes:
        """Return the boxes of an image as stored, as corners."""
        boxes, classes = _boxes_and_classes(row, columns.names)
        corners = np.array(boxes, np.float32).reshape(-1, 4)
        if self.layout == "xywh":
            corners[:, 2:] += corners[:, :2]
        return Boxes(corners, np.array([_class_index(value, columns) for value in classes], np.int64))

    def move(self, value: Boxes, geometry: Geometry) -> Boxes:
        """Move the boxes, cut them at the border, and drop what is left of those outside."""
        import torch
        from torchvision import tv_tensors
        from torchvision.transforms.v2 import functional as v2

        if len(value.corners) == 0:
            return value
        corners = torch.from_numpy(value.corners)
        x: Any = tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=geometry.image)  # type: ignore[call-overload]
        left, top, right, bottom = geometry.box
        x = v2.clamp_bounding_boxes(v2.crop(x, top, left, bottom - top, right - left))
        x = v2.pad(v2.resize(x, list(geometry.resized)), list(geometry.padding))
        x = v2.horizontal_flip(x) if geometry.hflip else x
        x = v2.vertical_flip(x) if geometry.vflip else x
        moved = np.asarray(v2.clamp_bounding_boxes(x).as_subclass(torch.Tensor).numpy(), np.float32)
        kept = (moved[:, 2:] - moved[:, :2] >= self.min_size).all(axis=1)
        return Boxes(moved[kept], value.classes[kept])

    def collate(self, values: Sequence[Any], memory: Arrays) -> Collated:
        """Return the boxes of all images one after another."""
        found = [value for value in values if value is not None]
        return {
            "boxes": np.concatenate([np.empty((0, 4), np.float32), *(value.corners for value in found)]),
            "class": np.concatenate([np.empty(0, np.int64), *(value.classes for value in found)]),
            "count": np.array([0 if value is None else len(value.classes) for value in values], np.int64),
        }, []

    def slot(self, size: tuple[int, int]) -> dict[str, SlotSpec]:
        """Return no arrays: the number of boxes varies."""
        return {}


def decode_mask(stored: Any) -> npt.NDArray[np.uint8]:
    """Decode a mask [H, W] of class indices from bytes, a path or an array. Raises UnreadableImage."""
    if stored is None:
        raise UnreadableImage("has no mask")
    try:
        if isinstance(stored, np.ndarray):
            mask = stored
        else:
            with Image.open(stored if isinstance(stored, str) else io.BytesIO(stored)) as image:
                if image.mode not in _MASK_MODES:
                    raise UnreadableImage(f"mask has mode {image.mode}; expected one class index per pixel")
                mask = np.array(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UnreadableImage(f"mask cannot be decoded: {error}") from error
    if mask.ndim != 2 or mask.size == 0:
        raise UnreadableImage(f"mask has shape {mask.shape}; expected [height, width]")
    if mask.dtype != np.uint8:
        if mask.min() < 0 or mask.max() > IGNORE_INDEX:
            raise UnreadableImage(f"mask has classes {mask.min()} to {mask.max()}; expected 0 to {IGNORE_INDEX}")
        mask = mask.astype(np.uint8)
    return mask


def _check_mask_size(mask: tuple[int, ...], image: tuple[int, int]) -> None:
    """Raise UnreadableImage if a mask is neither as large as its image nor of the same aspect ratio."""
    if mask != image and abs(mask[0] * image[1] - mask[1] * image[0]) > max(*mask, *image):
        raise UnreadableImage(f"mask is {mask[0]}x{mask[1]} pixels, the image {image[0]}x{image[1]}")


def _field_names(features: Iterable[str]) -> tuple[str, str]:
    """Return the names of the boxes and of their classes; empty if not found."""
    found = set(features)
    boxes, classes = (next((name for name in names if name in found), "") for names in (_BOX_NAMES, _CLASS_NAMES))
    return boxes, classes


def _find_fields(features: Mapping[str, Any], where: str, config: DataConfig) -> tuple[str, str]:
    boxes, classes = _field_names(features)
    if boxes and classes:
        return boxes, classes
    missing, names = ("classes", _CLASS_NAMES) if boxes else ("boxes", _BOX_NAMES)
    raise UserError(
        f"data.source={config.source}: no {missing} among {', '.join(features) or 'none'} of {where}; "
        f"expected one of {', '.join(names)}"
    )


def _boxes_and_classes(row: Mapping[str, Any], columns: tuple[str, ...]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return both for one row of separate columns, a mapping of lists or a list of mappings."""
    objects = row if len(columns) == 2 else row[columns[0]]
    if not objects:
        return [], []
    if isinstance(objects, Mapping):
        boxes, classes = columns if len(columns) == 2 else _field_names(objects)
        return objects[boxes] or [], objects[classes] or []
    boxes, classes = _field_names(objects[0])
    return [each[boxes] for each in objects], [each[classes] for each in objects]


def _class_index(value: Any, columns: Columns) -> int:
    names = columns.class_names
    if isinstance(value, str):
        if value not in names:
            raise UserError(f"data.source: a box has class {value!r}, which is not among {', '.join(names) or 'none'}")
        return names.index(value)
    if names and not 0 <= value < len(names):
        raise UserError(f"data.source: a box has class {value}, outside 0..{len(names) - 1}")
    return int(value)
