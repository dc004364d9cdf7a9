"""Pictures of where a model looks."""

from __future__ import annotations

from pathlib import Path

from vit_scale.errors import UserError
from vit_scale.inference.loaded_run import LoadedRun
from vit_scale.inference.prediction import Prediction, batch_of
from vit_scale.models.attention_weights import attention_maps
from vit_scale.tasks.classify.figures import attention_figure, save_figure


class AttentionPictures:
    """Writes into `folder` an image as the model sees it, beside it the same under the last block's attention."""

    def __init__(self, run: LoadedRun, folder: Path):
        self.run, self.folder = run, folder
        self.written: list[Path] = []

    def write(self, prediction: Prediction) -> None:
        """A PNG for a prediction that has pixels. Raises `UserError` for a model without attention over patches."""
        assert prediction.pixels is not None
        model = self.run.model
        maps = attention_maps(model, batch_of(self.run, [prediction.pixels], next(model.parameters()).device))
        if maps is None:
            raise UserError(f"--attention: {self.run.config.model.name} has no attention over patches to show")
        best = prediction.guesses[0]
        title = f"{prediction.path.name}: {best.name}, {100 * best.probability:.1f} %"
        path = self._free_name(prediction.path.stem)
        self.folder.mkdir(parents=True, exist_ok=True)
        save_figure(attention_figure(prediction.pixels, maps[0].float().cpu().numpy(), title), path)
        self.written.append(path)

    def _free_name(self, stem: str) -> Path:
        """Pictures of one name from two folders do not overwrite one another."""
        path, number = self.folder / f"{stem}-attention.png", 1
        while path in self.written:
            number += 1
            path = self.folder / f"{stem}-{number}-attention.png"
        return path
