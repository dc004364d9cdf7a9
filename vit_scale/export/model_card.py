"""Write a model card from a run: model, usage, data, results, recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from vit_scale.config import Config
from vit_scale.export.timm_weights import TimmForm
from vit_scale.inference.loaded_run import LoadedRun
from vit_scale.recipe import to_tree

_PRIVATE = ("run", "track")
"""Sections that describe a system or an account."""
_MAX_CLASSES = 20


def model_card(run: LoadedRun, form: TimmForm, *, repo: str | None = None) -> str:
    """Return the README.md of a Hub repository: a YAML header, then text. `repo`: its name on the Hub."""
    name = (repo or (run.folder.resolve().name if run.folder else form.architecture)).split("/")[-1]
    sections = {
        "Model": _model(run, form),
        "Use": _use(run, f"hf-hub:{repo}" if repo else "local-dir:path/to/this/directory"),
        "Data": _data(run),
        "Results": _results(run),
        "Recipe": f"Options changed from the defaults:\n\n```yaml\n{recipe_of(run.config)}```",
        "Environment": _environment(run.record),
    }
    text = "\n\n".join(f"## {title}\n\n{content}" for title, content in sections.items() if content)
    return f"---\n{_header(run, name)}---\n\n# {name}\n\n{_summary(run)}\n\n{text}\n"


def _header(run: LoadedRun, name: str) -> str:
    card, metric, value = run.task.card(), run.task.metrics[0], _best_metric(run)
    header: dict[str, Any] = {
        "library_name": "timm",
        "pipeline_tag": card.pipeline_tag,
        "license": "unknown",
        "tags": [card.pipeline_tag, "timm", "vit_scale"],
    }
    source = _public_source(run.config)
    if _is_hub_id(run.config.data.source):
        header["datasets"] = [source]
    if value is not None:
        shown = {"value": round(100 * value, 3), "name": f"{metric.heading} (%)"} if metric.percent else {}
        result = {
            "task": {"type": card.pipeline_tag},
            "dataset": {"name": source, "type": source, "split": run.config.data.val_split or "validation"},
            "metrics": [{"type": card.metric_type, "value": value, "name": metric.heading} | shown],
        }
        header["model-index"] = [{"name": name, "results": [result]}]
    return yaml.safe_dump(header, sort_keys=False, allow_unicode=True)


def _best_metric(run: LoadedRun) -> float | None:
    """Return the first metric of the exported weights, if the run has evaluated them."""
    value = run.record.get(f"{'val_ema' if run.is_ema else 'val'}/{run.task.metrics[0].name}")
    return value if isinstance(value, int | float) else None


def _summary(run: LoadedRun) -> str:
    metric, value = run.task.metrics[0], _best_metric(run)
    result = f" {metric.heading}: {metric.text(value)}." if value is not None else ""
    source = _public_source(run.config)
    return f"`{run.config.model.name}`, trained with vit_scale on {source} {run.task.card().summary}.{result}"


def _model(run: LoadedRun, form: TimmForm) -> str:
    backbone = run.backbone
    rows = {
        "architecture": f"timm `{form.architecture}`" + (f" with `{form.options}`" if form.options else ""),
        "parameters": f"{sum(p.numel() for p in run.model.parameters()):,}",
        "input": f"{backbone.in_chans} x {backbone.img_size[0]} x {backbone.img_size[1]}",
        "normalization": f"mean {list(run.transform.mean)}, std {list(run.transform.std)}",
        "weights": "EMA" if run.is_ema else "raw",
    }
    if "macs" in run.record:
        rows["MACs"] = f"{run.record['macs']:,} per image"
    return "\n".join(f"- {name}: {value}" for name, value in rows.items())


def _use(run: LoadedRun, place: str) -> str:
    """Return code that loads the model, and for a classifier prints the class of an image."""
    if run.task.card().pipeline_tag != "image-classification":
        return f"""```python
import timm

model = timm.create_model("{place}", pretrained=True).eval()
```"""
    mode = "L" if run.backbone.in_chans == 1 else "RGB"
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
    some = ", ".join(names[:_MAX_CLASSES]) + (", ..." if len(names) > _MAX_CLASSES else "")
    split = run.config.data.val_split
    held_out = f"the split `{split}`" if split else "its validation split, or held-out images if it has none"
    return f"Trained on {_public_source(run.config)}, evaluated on {held_out}." + (
        f" Classes: {some}." if names else ""
    )


def _results(run: LoadedRun) -> str:
    """Return a table of all metrics of the task, of EMA and raw weights, that the run has evaluated."""
    kinds = {"val_ema": "EMA weights", "val": "raw weights"}
    rows = [
        f"| {metric.heading}, {weights} | {metric.text(run.record[key])} |"
        for kind, weights in kinds.items()
        for metric in run.task.metrics
        if metric.shown and isinstance(run.record.get(key := f"{kind}/{metric.name}"), int | float)
    ]
    if not rows:
        return "Not evaluated yet."
    when = f" at step {run.record['step']:,}" if "step" in run.record else ""
    return "\n".join([f"On the validation images{when}:", "", "| metric | value |", "| --- | --- |", *rows])


def recipe_of(config: Config) -> str:
    """Return the options that differ from the defaults as YAML, without those that describe a system or an account."""
    defaults = to_tree(Config())
    changed = {
        section: {key: value for key, value in options.items() if value != defaults[section][key]}
        for section, options in to_tree(config).items()
        if section not in _PRIVATE
    }
    if "source" in changed["data"]:
        changed["data"]["source"] = _public_source(config)
    changed["data"].pop("cache_dir", None)
    if config.model.weights:
        changed["model"]["weights"] = _last_part(config.model.weights)
    if config.distill.teacher:
        changed["distill"]["teacher"] = _last_part(config.distill.teacher)
    changed["run"] = {"seed": config.run.seed}
    return yaml.safe_dump({s: options for s, options in changed.items() if options}, sort_keys=False, width=100)


def _public_source(config: Config) -> str:
    return _last_part(config.data.source)


def _last_part(source: str) -> str:
    """Return the name of a directory without its parents; Hub ids are unchanged."""
    return Path(source).name if Path(source).expanduser().exists() or source.startswith(("/", "~", ".")) else source


def _is_hub_id(source: str) -> bool:
    return _last_part(source) == source and ":" not in source and source != "synthetic"


def _environment(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in (record.get("versions") or {}).items())
    commit = f"\n\nGit commit: `{record['git_commit']}`." if record.get("git_commit") else ""
    count = record.get("processes")
    processes = (
        f"{count} process{'es' if count > 1 else ''} ({record['strategy']}), {record['precision']}; " if count else ""
    )
    return f"{processes}{versions}.{commit}" if versions else ""
