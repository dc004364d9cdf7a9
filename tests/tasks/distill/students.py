"""Teachers with random weights, and recipes of students that learn from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vit_scale.data.batch import Batch, DataInfo
from vit_scale.models import create_model
from vit_scale.recipe import build_config, to_yaml
from vit_scale.schedule import make_plan
from vit_scale.tasks import task_class
from vit_scale.tasks.distill.distillation import Distillation

TEACHER = {"name": "vit_mu", "img_size": 12, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2}
DIGITS = tuple(map(str, range(10)))


def make_teacher(
    folder: Path, *, seed: int = 0, names: tuple[str, ...] = DIGITS, in_chans: int = 1, **options: Any
) -> Path:
    """Write the directory of a finished run whose weights are random, and large enough for its classes to differ."""
    model = TEACHER | options
    torch.manual_seed(seed)
    weights = create_model(**model, num_classes=len(names), in_chans=in_chans).state_dict()
    weights = {name: 4 * tensor if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    sections = {"model": model, "data": {"mean": [0.3] * in_chans, "std": [0.4] * in_chans}, "schedule": {"steps": 1}}
    (folder / "config.yaml").write_text(to_yaml(build_config(sections)))
    summary = {"finished": True, "class_names": list(names), "in_chans": in_chans}
    (folder / "summary.json").write_text(json.dumps(summary | {"task": {"name": "classify"}}))
    return folder


def student(teacher: object, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a small student of 8x8 digits."""
    recipe: dict[str, dict[str, Any]] = {
        "model": {"name": "vit_mu", "img_size": 8, "patch_size": 2, "embed_dim": 16, "depth": 2, "num_heads": 2},
        "data": {"source": "embedded:digits", "workers": 0},
        "augment": {"hflip": 0.0, "mixup": 0.8, "cutmix": 1.0},
        "schedule": {"steps": 8, "shape": "constant"},
        "optim": {"lr": 3e-3},
        "batch": {"global": 32, "micro": 16},
        "ema": {"decay": 0.9},
        "run": {"log_every": 1, "eval_every": 8, "save_every": 4, "eval_images": 64},
        "track": {"wandb": "disabled", "images": "never"},
        "distill": {"teacher": str(teacher)},
    }
    for name, options in sections.items():
        recipe[name] = recipe.get(name, {}) | options
    return recipe


def prepared(teacher: object, in_chans: int = 1, names: tuple[str, ...] = DIGITS, **sections: dict) -> Distillation:
    """Return the task of a student's recipe with its teacher, as training does."""
    config = build_config(student(teacher, **sections))
    plan = make_plan(config, train_images=100, processes=1, device="cpu")
    task = task_class(config)(config, DataInfo(100, in_chans, names), plan)
    assert isinstance(task, Distillation)
    task.prepare(None)  # type: ignore[arg-type]
    return task


def example(channels: int = 1, size: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (4, channels, size, size), dtype=torch.uint8, generator=generator)
    return Batch(pixels, {"label": torch.arange(4)}, torch.arange(4))


def losses(folder: Path) -> list[dict[str, float]]:
    """Return the logged losses of each step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k.startswith("train/loss")} for line in lines if "train/loss" in line]
