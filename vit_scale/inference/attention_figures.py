"""Figures of attention maps."""

from __future__ import annotations

from pathlib import Path

from vit_scale.errors import UserError
from vit_scale.format import percent
from vit_scale.inference.loaded_run import LoadedRun
from vit_scale.inference.prediction import Prediction, to_batch
from vit_scale.models.attention_weights import attention_maps
from vit_scale.tasks.classify.figures import attention_figure, save_figure


class AttentionFigures:
    """Writes figures to `folder`: an image as the model receives it next to its attention map of the last block."""

    def __init__(self, run: LoadedRun, folder: Path):
        self.run, self.folder = run, folder
        self.written: list[Path] = []

    def write(self, prediction: Prediction) -> None:
        """Write a PNG for a prediction that has pixels; raises `UserError` for a model without patch attention."""
        assert prediction.pixels is not None
        model = self.run.model
        maps = attention_maps(model, to_batch(self.run, [prediction.pixels], next(model.parameters()).device))
        if maps is None:
            raise UserError(f"--attention: {self.run.config.model.name} has no patch attention to show")
        best = prediction.classes[0]
        title = f"{prediction.path.name}: {best.name}, {percent(best.probability, 1)}"
        path = self._free_name(prediction.path.stem)
        self.folder.mkdir(parents=True, exist_ok=True)
        save_figure(attention_figure(prediction.pixels, maps[0].float().cpu().numpy(), title), path)
        self.written.append(path)

    def _free_name(self, stem: str) -> Path:
        """Return an unused path: images of the same name from two directories must not overwrite each other."""
        path, number = self.folder / f"{stem}-attention.png", 1
        while path in self.written:
            number += 1
            path = self.folder / f"{stem}-{number}-attention.png"
        return path
