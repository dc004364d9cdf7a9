"""Export a directory for the Hub: config.json and model.safetensors in timm's format, and a model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vit_scale.export.model_card import model_card
from vit_scale.export.timm_weights import TimmForm, save_state, to_timm
from vit_scale.export.verify import Exported, largest_difference, staged
from vit_scale.inference.loaded_run import LoadedRun


def export_hub_folder(run: LoadedRun, out: Path, *, repo: str | None = None) -> Exported:
    """Write the directory, load it with timm and verify it. `repo`: its Hub repository, for the model card."""
    import timm

    form = to_timm(run)
    with staged(out) as folder:
        folder.mkdir()
        save_state(form.state, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(hub_config(run, form), indent=2) + "\n")
        (folder / "README.md").write_text(model_card(run, form, repo=repo))
        loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        difference = largest_difference(run, loaded)
    usage = f"import timm\n\nmodel = timm.create_model({f'local-dir:{out}'!r}, pretrained=True)"
    return Exported(out, "loaded by timm.create_model('local-dir:...', pretrained=True)", difference, usage)


def hub_config(run: LoadedRun, form: TimmForm) -> dict[str, Any]:
    """Return config.json in the format of timm models on the Hub."""
    model: Any = run.model
    published: dict[str, Any] = getattr(model, "pretrained_cfg", {})
    config = {
        "architecture": form.architecture,
        "num_classes": model.num_classes,
        "num_features": model.embed_dim,
        "label_names": list(run.class_names),
        "model_args": form.options,
        "pretrained_cfg": {
            "custom_load": False,
            "input_size": [model.in_chans, *model.img_size],
            "fixed_input_size": published.get("fixed_input_size", True),
            "interpolation": run.config.augment.eval_interpolation,
            "crop_pct": run.config.augment.eval_crop,
            "crop_mode": "center",
            "mean": list(run.transform.mean),
            "std": list(run.transform.std),
            "num_classes": model.num_classes,
            "pool_size": published.get("pool_size"),
            # Otherwise timm would treat the weights as three-channel weights and convert them again.
            "first_conv": published.get("first_conv", "patch_embed.proj") if model.in_chans == 3 else None,
            "classifier": published.get("classifier", ["head", "head_dist"] if hasattr(model, "head_dist") else "head"),
            "license": "unknown",
        },
    }
    return config if run.class_names else {key: value for key, value in config.items() if key != "label_names"}
