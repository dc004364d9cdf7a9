"""Model metadata for export formats that do not store the options."""

from __future__ import annotations

import json

from vit_scale.inference.loaded_run import LoadedRun


def about_model(run: LoadedRun) -> dict[str, str]:
    """Return model name, image size, normalization and class names as strings; lists are JSON."""
    return {
        "model": run.config.model.name,
        "image_size": json.dumps(run.model.img_size),
        "mean": json.dumps(run.transform.mean),
        "std": json.dumps(run.transform.std),
        "eval_crop": json.dumps(run.config.augment.eval_crop),
        "eval_interpolation": run.config.augment.eval_interpolation,
        "class_names": json.dumps(run.class_names),
    }
