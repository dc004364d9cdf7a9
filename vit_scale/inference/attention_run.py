"""Look at the attention of loaded models: statistics over a data set on all processes, and maps of single images."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vit_scale.attention_report.layout import TokenLayout, token_layout
from vit_scale.attention_report.maps import AttentionMaps, image_maps
from vit_scale.attention_report.measure import AttentionMeter, AttentionStatistics, affordable_spectra
from vit_scale.data.images.decode import UnreadableImage
from vit_scale.data.targets import NoTarget, Target
from vit_scale.errors import UserError
from vit_scale.inference.eval_data import EvalData, open_eval_data
from vit_scale.inference.evaluate_run import available_precision, open_eval_loader
from vit_scale.inference.loaded_run import LoadedRun
from vit_scale.record.terminal import Terminal
from vit_scale.strategies.processes import Processes
from vit_scale.tasks.classify.classification import Classification

EXAMPLES = 4
"""Images of a data set whose maps are drawn."""


@dataclass(frozen=True)
class Looked:
    """What was measured of one model."""

    name: str
    loaded: LoadedRun
    statistics: AttentionStatistics
    examples: Tensor
    """uint8 [B, C, H, W], some images as the model receives them."""
    maps: AttentionMaps | None = field(repr=False)
    """Maps of the examples, on the main process, if one of them can be read."""


class Viewer:
    """A loaded model with the blocks and heads that are shown of it."""

    def __init__(
        self, name: str, loaded: LoadedRun, blocks: Sequence[int] | None = None, heads: Sequence[int] | None = None
    ) -> None:
        """Raises `UserError` for a model without plain attention, and for blocks or heads that it does not have."""
        self.name, self.loaded = name, loaded
        self.model_name = loaded.config.model.name
        self.layout: TokenLayout = token_layout(loaded.backbone, loaded.backbone.img_size, self.model_name)
        modules = list(loaded.backbone.blocks)  # type: ignore[arg-type]
        self.depth = len(modules)
        self.blocks = None if blocks is None else self._indices("--blocks", "block", blocks, self.depth)
        shown = range(self.depth) if self.blocks is None else self.blocks
        count = min(int(modules[index].attn.num_heads) for index in shown)
        self.heads = list(range(count)) if heads is None else self._indices("--heads", "head", heads, count)

    def _indices(self, option: str, kind: str, wanted: Sequence[int], count: int) -> list[int]:
        for index in wanted:
            if not -count <= index < count:
                raise UserError(
                    f"{option} {index}: {self.model_name} has {kind}s 0 to {count - 1} (negative: from the end)"
                )
        return list(dict.fromkeys(index % count for index in wanted))


def open_images(loaded: LoadedRun, data: str | None, split: str | None) -> EvalData:
    """Open the images to look at, which need no labels; `run.eval_images` is their number.

    A run's own data is split as in its training, which takes the classes of a classifier into account.
    """
    trained = (loaded.record.get("task") or {}).get("name", Classification.name)
    own: Target | None = None if data is None and trained == Classification.name else NoTarget()
    return open_eval_data(loaded, data, split, own)


def measure_run(
    viewer: Viewer, data: EvalData, processes: Processes, terminal: Terminal, *, spectra: int | None
) -> Looked:
    """Measure the attention over `data`; every process must call it. `spectra`: images with a spectrum; None: auto."""
    loaded, device = viewer.loaded, processes.device
    model, task = loaded.backbone.to(device), loaded.task
    task.to(device, torch.float32)
    if spectra is None:
        spectra = affordable_spectra(model, viewer.layout)
    meter = AttentionMeter(model, spectrum_images=spectra, name=viewer.model_name)
    examples: list[Tensor] = []
    loader = open_eval_loader(loaded, data.source, NoTarget(), processes)
    precision = available_precision(loaded.config.parallel.precision, device)
    half = torch.bfloat16 if precision == "bf16" else torch.float16
    try:
        with (
            terminal.phase(f"Attention of {viewer.name}, batch", loader.count()) as phase,
            torch.autocast(device.type, half, enabled=precision != "fp32"),
        ):
            for batch in loader:
                missing = EXAMPLES - sum(map(len, examples))
                examples.append(batch.images[batch.real][:missing].clone())
                meter.add(task.normalized(batch), batch.positions)
                phase.advance()
        if loader.problems:
            print(loader.problems.summary(), file=sys.stderr)
    finally:
        loader.close()
    statistics = meter.statistics()
    if not statistics.images:
        raise UserError(f"{data.description}: none of the images can be read")
    shown = torch.cat(examples)
    is_drawn = processes.is_main and len(shown) > 0
    maps = image_maps(model, task.normalize(shown.to(device)), viewer.model_name) if is_drawn else None
    return Looked(viewer.name, loaded, statistics, shown, maps)


@dataclass(frozen=True)
class ViewedImage:
    """An image file with its maps."""

    path: Path
    pixels: Tensor
    """uint8 [C, H, W], as the model receives it."""
    maps: AttentionMaps

    def arrays(self, blocks: Sequence[int], heads: Sequence[int]) -> dict[str, np.ndarray]:
        """Return what is written to the `.npz`: maps [blocks, heads, rows, columns], their means, rollout, pixels."""
        found = {"blocks": np.array(blocks), "heads": np.array(heads), "pixels": self.pixels.numpy()}
        found["rollout"] = self.maps.rollout[0].numpy()
        queries = {"class_token": self.maps.class_token, "patches": self.maps.patches}
        for name, maps in queries.items():
            if maps is not None:
                chosen = list(heads)
                found[name] = np.stack([maps[block][0, chosen].numpy() for block in blocks])
                found[f"{name}_mean"] = np.stack([maps[block][0].mean(0).numpy() for block in blocks])
        return found


def view_image(viewer: Viewer, path: Path, device: torch.device) -> ViewedImage | None:
    """Return the maps of an image file; None, and a line on stderr, if it cannot be read."""
    loaded = viewer.loaded
    try:
        pixels = torch.from_numpy(loaded.transform.pixels(path))
    except UnreadableImage as error:
        print(f"Skipped {path}: {error}", file=sys.stderr)
        return None
    model = loaded.backbone.to(device)
    maps = image_maps(model, loaded.transform.normalize(pixels[None].to(device)), viewer.model_name)
    return ViewedImage(path, pixels, maps)
