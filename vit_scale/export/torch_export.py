"""Export with `torch.export`: graph and weights in one .pt2 file that requires only torch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from vit_scale.export.about import about_model
from vit_scale.export.verify import BATCHES, Exported, largest_difference, staged
from vit_scale.inference.loaded_run import LoadedRun


def export_torch(run: LoadedRun, out: Path) -> Exported:
    """Write `out` and verify it. Its extra files (`mean`, `class_names`, ...) describe the expected images."""
    with staged(out) as path, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        example = torch.zeros(2, run.model.in_chans, *run.model.img_size)
        program: Any = torch.export.export(run.model, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        torch.export.save(program, path, extra_files=about_model(run))
        loaded = torch.export.load(path).module()
        difference = largest_difference(run, loaded)
    batches = " and ".join(map(str, BATCHES))
    usage = (
        f"import torch\n\nmodel = torch.export.load({str(out)!r}).module()\n"
        "logits = model(images)  # float32, normalized"
    )
    return Exported(out, f"loaded by torch.export.load at batch sizes {batches}", difference, usage)
