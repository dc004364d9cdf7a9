"""DeepSpeed settings, generated from the recipe, and what the launcher may add to them.

The recipe determines strategy, batch, accumulation, clipping and precision. All other DeepSpeed settings of the
launcher (`accelerate launch --use_deepspeed ...`, `--deepspeed_config_file FILE`) are used: offload, buckets, overlap.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vit_scale.config import Config
from vit_scale.cost.memory import ZERO3_LIVE, ZERO_BUCKET, zero_bucket
from vit_scale.errors import UserError
from vit_scale.recipe import merge

if TYPE_CHECKING:
    from vit_scale.schedule import Plan

Settings = dict[str, Any]

# accelerate's launcher passes its flags in these variables.
LAUNCHER_VARIABLES = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "zero_optimization.stage",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "zero_optimization.offload_optimizer.device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "zero_optimization.offload_param.device",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping",
}
# Built by the recipe, so those in the launcher's file are ignored.
BUILT_BY_THE_RECIPE = ("optimizer", "scheduler")
HALF_PRECISION = {"bf16": {"bf16"}, "fp16": {"fp16"}, "torch_autocast": {"bf16", "fp16"}}
"""DeepSpeed's sections for half precision, and the precisions of a recipe that they agree with."""
DEVICES_TO_OFFLOAD_TO = ("none", "cpu")


def deepspeed_settings(
    config: Config, plan: Plan, strategy: str, precision: str, *, params: int = 4 * ZERO_BUCKET
) -> Settings:
    """Return DeepSpeed's configuration for a model of `params` trained parameters."""
    bucket = zero_bucket(params)
    defaults = {
        "zero_optimization": {
            "overlap_comm": True,
            "memory_efficient_linear": precision == "fp32",  # zero_forward.py has one for autocast
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket,
            # DeepSpeed's 10^9 would gather most models in full and keep them until their backward pass.
            "stage3_max_live_parameters": ZERO3_LIVE,
            "stage3_max_reuse_distance": ZERO3_LIVE,
        },
        # torch's fused AdamW works on offloaded state; DeepSpeed's own optimizer would be compiled first.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    launcher = launcher_settings()
    for name in BUILT_BY_THE_RECIPE:
        launcher.pop(name, None)
    if strategy != "zero3":
        launcher.get("zero_optimization", {}).pop("offload_param", None)
    # Half precision is autocast around the model, of which DeepSpeed knows nothing: zero_forward.py.
    in_fp32 = {"data_types": {"grad_accum_dtype": "fp32"}} | {name: {"enabled": False} for name in HALF_PRECISION}
    return merge(merge(defaults, launcher), _recipe_settings(config, plan, strategy) | in_fp32)


def _recipe_settings(config: Config, plan: Plan, strategy: str) -> Settings:
    """Return the settings that the recipe determines, except precision."""
    return {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "gradient_clipping": config.optim.clip_norm,
        "zero_optimization": {"stage": int(strategy[-1])} | _offload_settings(config.parallel.offload),
    }


def _offload_settings(offload: str) -> Settings:
    if offload == "none":  # the launcher may still set it
        return {}
    to_cpu = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {"offload_optimizer": to_cpu} | ({"offload_param": to_cpu} if offload == "params" else {})


def check_offload(offload: str, strategy: str) -> None:
    """Raise `UserError` if `strategy` does not support this offload."""
    needed = {"none": "", "optimizer": "zero", "params": "zero3"}[offload]
    if not strategy.startswith(needed):
        stages = "zero3" if needed == "zero3" else "zero1, zero2 or zero3"
        raise UserError(
            f"parallel.offload = {offload!r}: not supported by strategy {strategy!r}; set parallel.strategy to {stages}"
        )


def check_compile(compile_blocks: bool, strategy: str) -> None:
    """Raise `UserError` if `strategy` does not support compiled blocks."""
    if compile_blocks and strategy == "zero3":
        raise UserError(
            "parallel.compile = true: not supported by strategy 'zero3', which interrupts each compiled block at every "
            "layer to gather its weights; set parallel.compile=false or parallel.strategy=zero2"
        )


# ---------------------------------------------------------------------------------------------------- the launcher


def launcher_settings() -> Settings:
    """Return the settings of the launcher's flags and its DeepSpeed file, without those that are `auto`."""
    flags: Settings = {}
    for variable, key in LAUNCHER_VARIABLES.items():
        if (value := os.environ.get(variable)) is not None:
            flags = merge(flags, _nested(key, _number_or_word(value)))
    path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    settings = merge(flags, _without_auto(_read_file(path)) if path != "none" else {})
    for part in ("offload_optimizer", "offload_param"):
        device = settings.get("zero_optimization", {}).get(part, {}).get("device", "none")
        if device not in DEVICES_TO_OFFLOAD_TO:
            raise UserError(f"Launcher setting {part}.device = {device!r}: not supported; must be one of none, cpu")
    return settings


def launcher_stage() -> int:
    """Return the ZeRO stage of a launcher that uses DeepSpeed; accelerate's default is 2."""
    stage = launcher_settings().get("zero_optimization", {}).get("stage", 2)
    if stage not in (0, 1, 2, 3):
        raise UserError(f"Launcher ZeRO stage {stage!r}: must be one of 0, 1, 2, 3")
    return stage


def overridden_settings(config: Config, plan: Plan, strategy: str, precision: str) -> list[str]:
    """Return `key = value (recipe: value)` per launcher setting that the recipe overrides, except the stage."""
    launcher = _flat(launcher_settings())
    recipe = _flat(_recipe_settings(config, plan, strategy))
    recipe["data_types.grad_accum_dtype"] = "fp32"
    recipe |= {f"{section}.enabled": precision in agreeing for section, agreeing in HALF_PRECISION.items()}
    if config.batch.micro == "auto":
        recipe |= dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    recipe.pop("zero_optimization.stage")
    overridden = [
        f"{key} = {launcher[key]} (recipe: {value})"
        for key, value in recipe.items()
        if key in launcher and launcher[key] != value
    ]
    return overridden + [f"its {name}" for name in BUILT_BY_THE_RECIPE if any(k.startswith(name) for k in launcher)]


def _read_file(path: str) -> Settings:
    try:
        settings = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot read the launcher's DeepSpeed file {path}: {error}") from None
    if not isinstance(settings, dict):
        raise UserError(f"The launcher's DeepSpeed file {path}: must be a JSON object")
    return settings


def _number_or_word(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _nested(key: str, value: Any) -> Settings:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _flat(settings: Settings, prefix: str = "") -> Settings:
    flat: Settings = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _without_auto(settings: Settings) -> Settings:
    kept = {k: _without_auto(v) if isinstance(v, dict) else v for k, v in settings.items()}
    return {key: value for key, value in kept.items() if value != "auto"}


# --------------------------------------------------------------------------------------------------------- DeepSpeed


def import_deepspeed() -> Any:
    """Import DeepSpeed with the device set, without compiling ops that training never calls, and without its logs."""
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if on_cpu:
        # Otherwise the first run on a host compiles shared-memory collectives for minutes; only inference uses them.
        deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    return deepspeed


def check_engine(engine: Any, config: Config, plan: Plan) -> None:
    """Raise `UserError` if the engine that DeepSpeed built does not match the plan."""
    pairs = {
        "batch.global": (plan.global_batch, engine.train_batch_size()),
        "batch.micro": (plan.micro_batch, engine.train_micro_batch_size_per_gpu()),
        "accumulation": (plan.accumulation, engine.gradient_accumulation_steps()),
        "optim.clip_norm": (config.optim.clip_norm, engine.gradient_clipping()),
    }
    wrong = [f"{name} = {ours}, but {theirs} in DeepSpeed" for name, (ours, theirs) in pairs.items() if ours != theirs]
    if wrong:
        raise UserError(f"DeepSpeed's engine does not match the recipe: {'; '.join(wrong)}")
