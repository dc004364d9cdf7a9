"""What a run would be, without touching data, devices or disk: `launch/train.py RECIPE --dry-run`."""

from __future__ import annotations

import json
from typing import cast

from vit_scale.config import Config
from vit_scale.models import create_from_config
from vit_scale.models.interface import ImageModel
from vit_scale.report.count import count_model
from vit_scale.report.meta import build_on_meta
from vit_scale.report.timm_check import check_against_timm
from vit_scale.train.describe import length_in_words, model_in_words, strategy_in_words
from vit_scale.train.plan import learning_rate, make_plan
from vit_scale.train.screen import Screen
from vit_scale.train.strategy import deepspeed_settings, resolve_strategy, world_size

# Training images, classes and channels of sources that everybody uses, from their dataset cards.
KNOWN_SOURCES = {
    "ILSVRC/imagenet-1k": (1_281_167, 1000, 3),
    "timm/imagenet-1k-wds": (1_281_167, 1000, 3),
    "uoft-cs/cifar10": (50_000, 10, 3),
    "uoft-cs/cifar100": (50_000, 100, 3),
    "embedded:digits": (1_617, 10, 1),
}


def dry_run(config: Config, recipe: str, gpus: int | None = None) -> int:
    """Print the plan of `config` on `gpus` processes (default: as many as were launched)."""
    processes = gpus or world_size()
    images, classes, channels = KNOWN_SOURCES.get(config.data.source, (0, 1000, 3))
    if config.data.source == "synthetic":
        images, classes = config.data.synthetic_images, config.data.synthetic_classes
    plan = make_plan(config, train_images=images, processes=processes, device="cuda" if gpus else "cpu")
    strategy, note = resolve_strategy(config.parallel.strategy)
    if processes > 1 and strategy == "single":
        strategy = "ddp"
    precision = config.parallel.precision if config.parallel.precision != "auto" else "bf16" if gpus else "fp32"
    classes, channels = config.model.num_classes or classes, config.model.in_chans or channels
    model = cast(
        ImageModel,
        build_on_meta(lambda: create_from_config(config.model, num_classes=classes, in_chans=channels)),
    )
    count = count_model(model)
    lr = learning_rate(config, plan)
    screen = Screen(enabled=True)
    known = "" if images else " (how many images it has is not known here, so epochs cannot be counted)"
    rows = {
        "model": model_in_words(config.model.name, count),
        "timm": check_against_timm(config.model, num_classes=classes, in_chans=channels).summary(),
        "data": f"{config.data.source}{known}",
        "batch": plan.batch_in_words(),
        "length": length_in_words(plan) if images or config.schedule.steps else "not known",
        "learning rate": f"{lr.at(0):.2e} at first, {lr.peak:.2e} at the peak, {lr.at(plan.steps - 1):.2e} at last",
        "precision": precision,
        "strategy": strategy_in_words(strategy, config.parallel.offload),
    }
    screen.table(f"Plan of {recipe} (nothing is read or written)", rows)
    if note:
        screen.say(note)
    if strategy.startswith("zero"):
        screen.say("DeepSpeed's settings, generated from the recipe:")
        settings = deepspeed_settings(config, plan, strategy, precision, params=count.params)
        screen.say(json.dumps(settings, indent=2))
    return 0
