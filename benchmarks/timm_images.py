"""Images of a data.source, read like timm's reader for Hugging Face datasets."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from vit_scale.config import DataConfig
from vit_scale.data.data import open_data
from vit_scale.data.sources.columns import find_image_column, find_label_column
from vit_scale.data.sources.table_source import Source

FOREVER = 1_000_000


class TimmImages(Dataset[tuple[Any, int]]):
    """Images decoded by Pillow through `datasets`; for training, an infinite epoch.

    timm fills and drains its queue every epoch; with a few hundred images, that would dominate the measurement.
    """

    def __init__(self, folder: str, train: bool = True):
        import datasets

        data = open_data(DataConfig(source=folder, val_fraction=1e-9), seed=0)
        source = data.train if train else data.val
        assert isinstance(source, Source), "the benchmark requires indexable images"
        self.num_classes = data.num_classes
        features = source.dataset.features
        self.image, self.label = find_image_column(features, DataConfig()), find_label_column(features, DataConfig())
        self.dataset = source.dataset.cast_column(self.image, datasets.Image(decode=True))
        self.length = FOREVER if train else len(self.dataset)
        self.transform: Any = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Any, int]:
        row = self.dataset[index % len(self.dataset)]
        return self.transform(row[self.image].convert("RGB")), row[self.label]
