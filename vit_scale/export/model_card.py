"""A model card written from the run: data, recipe, results, how to load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from vit_scale.config import Config
from vit_scale.export.timm_weights import TimmForm
from vit_scale.inference.loaded_run import LoadedRun
from vit_scale.recipe import to_tree

_RESULTS = {
    "val_ema/top1": "top-1, averaged weights",
    "val_ema/top5": "top-5, averaged weights",
    "val_ema/loss": "loss, averaged weights",
    "val/top1": "top-1, raw weights",
    "val/top5": "top-5, raw weights",
    "val/loss": "loss, raw weights",
}
_NOT_FOR_OTHERS = ("run", "track")
"""Sections that tell of a machine or an account."""
_EMBEDDED_CLASSES = 20


def model_card(run: LoadedRun, form: TimmForm, *, repo: str | None = None) -> str:
    """README.md of the folder: a YAML header for the hub, then text. `repo`: where it will be on the hub."""
    name = (repo or (run.folder.resolve().name if run.folder else form.architecture)).split("/")[-1]
    sections = {
        "Model": _model(run, form),
        "Use": _use(run, f"hf-hub:{repo}" if repo else "local-dir:path/of/this/folder"),
        "Data": _data(run),
        "Results": _results(run.record),
        "Recipe": f"What differs from the defaults:\n\n```yaml\n{recipe_of(run.config)}```",
        "Made with": _made_with(run.record),
    }
    text = "\n\n".join(f"## {title}\n\n{content}" for title, content in sections.items() if content)
    return f"---\n{_header(run, name)}---\n\n# {name}\n\n{_summary(run)}\n\n{text}\n"


def _header(run: LoadedRun, name: str) -> str:
    header: dict[str, Any] = {
        "library_name": "timm",
        "pipeline_tag": "image-classification",
        "license": "unknown",
        "tags": ["image-classification", "timm", "vit_scale"],
    }
    source, top1 = _public_source(run.config), _top1(run)
    if _is_hub_id(run.config.data.source):
        header["datasets"] = [source]
    if top1 is not None:
        result = {
            "task": {"type": "image-classification"},
            "dataset": {"name": source, "type": source, "split": run.config.data.val_split or "validation"},
            "metrics": [{"type": "accuracy", "value": round(100 * top1, 3), "name": "top-1 (%)"}],
        }
        header["model-index"] = [{"name": name, "results": [result]}]
    return yaml.safe_dump(header, sort_keys=False, allow_unicode=True)


def _top1(run: LoadedRun) -> float | None:
    """Of the weights in the folder, where the run has evaluated them."""
    return run.record.get("val_ema/top1" if run.averaged else "val/top1")


def _summary(run: LoadedRun) -> str:
    top1 = _top1(run)
    result = f" It reaches {100 * top1:.2f} % top-1." if top1 is not None else ""
    return (
        f"`{run.config.model.name}`, trained with vit_scale on {_public_source(run.config)} to tell "
        f"{run.model.num_classes:,} classes apart.{result}"
    )


def _model(run: LoadedRun, form: TimmForm) -> str:
    model = run.model
    rows = {
        "architecture": f"`{form.architecture}` of timm" + (f" with `{form.options}`" if form.options else ""),
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "images": f"{model.in_chans} x {model.img_size[0]} x {model.img_size[1]}",
        "normalisation": f"mean {list(run.transform.mean)}, std {list(run.transform.std)}",
        "weights": "averaged over training (EMA)" if run.averaged else "of the last step",
    }
    if "macs" in run.record:
        rows["MACs"] = f"{run.record['macs']:,} for a forward pass of one image"
    return "\n".join(f"- {name}: {value}" for name, value in rows.items())


def _use(run: LoadedRun, place: str) -> str:
    mode = "L" if run.model.in_chans == 1 else "RGB"
    return f"""```python
import timm
from PIL import Image

model = timm.create_model("{place}", pretrained=True).eval()
config = timm.data.resolve_data_config({{}}, model=model)
transform = timm.data.create_transform(**config)
probabilities = model(transform(Image.open("image.png").convert("{mode}"))[None]).softmax(1)
print(model.pretrained_cfg["label_names"][probabilities.argmax()])
```"""


def _data(run: LoadedRun) -> str:
    names = run.class_names
    some = ", ".join(names[:_EMBEDDED_CLASSES]) + (", ..." if len(names) > _EMBEDDED_CLASSES else "")
    split = run.config.data.val_split
    held_out = f"the split `{split}`" if split else "its validation split, or a hold-out where it has none"
    return f"Trained on {_public_source(run.config)}, evaluated on {held_out}." + (
        f" Classes: {some}." if names else ""
    )


def _results(record: dict[str, Any]) -> str:
    rows = [
        f"| {words} | {record[key]:.4f} |" if key.endswith("loss") else f"| {words} | {100 * record[key]:.2f} % |"
        for key, words in _RESULTS.items()
        if isinstance(record.get(key), int | float)
    ]
    if not rows:
        return "Not evaluated yet."
    when = f" after {record['step']:,} steps" if "step" in record else ""
    return "\n".join([f"On the validation images{when}:", "", "| figure | value |", "| --- | --- |", *rows])


def recipe_of(config: Config) -> str:
    """The options that differ from the defaults, without what tells of a machine or an account, as YAML."""
    defaults = to_tree(Config())
    changed = {
        section: {key: value for key, value in options.items() if value != defaults[section][key]}
        for section, options in to_tree(config).items()
        if section not in _NOT_FOR_OTHERS
    }
    if "source" in changed["data"]:
        changed["data"]["source"] = _public_source(config)
    changed["data"].pop("cache_dir", None)
    if config.model.weights:
        changed["model"]["weights"] = _last_part(config.model.weights)
    changed["run"] = {"seed": config.run.seed}
    return yaml.safe_dump({s: options for s, options in changed.items() if options}, sort_keys=False, width=100)


def _public_source(config: Config) -> str:
    return _last_part(config.data.source)


def _last_part(source: str) -> str:
    """A folder's own name, without the folders above it; hub ids stay whole."""
    return Path(source).name if Path(source).expanduser().exists() or source.startswith(("/", "~", ".")) else source


def _is_hub_id(source: str) -> bool:
    return _last_part(source) == source and ":" not in source and source != "synthetic"


def _made_with(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in (record.get("versions") or {}).items())
    commit = f"\n\nCommit of the code: `{record['git_commit']}`." if record.get("git_commit") else ""
    count = record.get("processes")
    processes = (
        f"{count} process{'es' if count > 1 else ''} ({record['strategy']}), {record['precision']}; " if count else ""
    )
    return f"{processes}{versions}.{commit}" if versions else ""
