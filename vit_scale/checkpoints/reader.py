"""Read a checkpoint: any slice of any tensor, no matter which rank wrote it.

Tensors are safetensors and the rest is JSON: a file from elsewhere is data, never code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vit_scale.checkpoints.find import read_meta
from vit_scale.checkpoints.pieces import Piece, Scalars
from vit_scale.errors import UserError


class Checkpoint:
    """A checkpoint directory that was found valid. Files are memory-mapped; only slices that are used are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.scalars: Scalars = {}
        self._shards: dict[str, list[tuple[Any, int]]] = {}
        try:
            self.meta = read_meta(path)
            self._weights = safe_open(path / "model.safetensors", framework="pt")
            for shard in sorted(path.glob("shard-*.safetensors")):
                self._add_shard(safe_open(shard, framework="pt"))
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}: not the files of a checkpoint: {error}") from error
        self.names = frozenset(self._weights.keys())
        """Names of the weights and buffers."""

    def _add_shard(self, file: Any) -> None:
        metadata = file.metadata()
        for key, start in json.loads(metadata["starts"]).items():
            self._shards.setdefault(key, []).append((file, start))
        for name, entries in json.loads(metadata["numbers"]).items():
            self.scalars.setdefault(name, {}).update(entries)
        for key in file.keys():  # noqa: SIM118 -- not a dict
            if key.startswith("scalar/"):
                _, entry, name = key.split("/")
                self.scalars.setdefault(name, {})[entry] = file.get_tensor(key)

    def shape(self, name: str) -> list[int] | None:
        """Return the shape of a weight, or None if it does not exist."""
        return self._weights.get_slice(name).get_shape() if name in self.names else None

    def weight(self, name: str) -> torch.Tensor:
        """Return a full weight or buffer."""
        return self._weights.get_tensor(name)

    def fill_weight(self, name: str, piece: Piece) -> None:
        """Copy a part of a weight into `piece`."""
        piece.tensor.copy_(self.weight(name).reshape(-1)[piece.start : piece.start + piece.tensor.numel()])

    def optimizer_keys(self, name: str) -> list[str]:
        """Return the keys of the optimizer state of a parameter, such as `exp_avg`."""
        parts = (key.split("/") for key in self._shards if key.startswith("optimizer/"))
        return [key for _, key, parameter in parts if parameter == name]

    def fill(self, key: str, piece: Piece) -> bool:
        """Copy a part of the tensor `key` of the shards into `piece`; return whether the shards contain it."""
        begin, end = piece.start, piece.start + piece.tensor.numel()
        for file, start in self._shards.get(key, []):
            stored = file.get_slice(key)
            first, last = max(begin, start), min(end, start + stored.get_shape()[0])
            if first < last:
                piece.tensor[first - begin : last - begin] = stored[first - start : last - start].to(
                    piece.tensor.device
                )
        return key in self._shards
