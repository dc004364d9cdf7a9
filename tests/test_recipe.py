"""Recipes and command lines: valid input is parsed exactly, invalid input gets a clear error message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from vit_scale.config import RENAMED, Config, with_current_names
from vit_scale.errors import UserError
from vit_scale.recipe import (
    all_options,
    build_config,
    flatten,
    load_recipe,
    options_help,
    to_yaml,
)

RECIPE = "schedule: {epochs: 2}\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_nested_sweep_parameters_are_section_options(recipe: Path) -> None:
    config = load_recipe(recipe, ["--optim={'lr': 0.002, 'weight_decay': 0.1}"])
    assert (config.optim.lr, config.optim.weight_decay) == (0.002, 0.1)
    with pytest.raises(UserError, match="optim.lrr"):
        load_recipe(recipe, ["--optim={'lrr': 0.002}"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=1", "optim.lr"),
        ("optm.lr=1", "optim.lr"),
        ("lr=1", "optim.lr"),
        ("--optim.wieght_decay=1", "optim.weight_decay"),
        ("batch.globall=4", "batch.global"),
        ("nonsense.key=4", "unknown option"),
        ("justaword", "section.name=value"),
        ("model.attention=flash", "model.attention = flash: this option was renamed to model.kernel"),
        ("--unknown-flag", "--help"),
        ("optim.lr=fast", "optim.lr = 'fast': must be a number"),
        ("optim.lr=true", "optim.lr = True: must be a number"),
        ("optim.lr=0", "greater than 0"),
        ("optim.lr=.inf", "finite"),
        ("optim.betas=[0.9]", "right length"),
        ("optim.betas=[0.9, 1.5]", "less than 1"),
        ("batch.global=0", "batch.global = 0: must be at least 1"),
        ("batch.global=2.5", "an integer"),
        ("batch.global=many", "an integer"),
        ("batch.micro=some", "an integer or 'auto'"),
        ("batch.micro=5", "nearest divisors: 4 and 8"),
        ("model.drop_path=1", "less than 1"),
        ("model.drop_path=-0.1", "at least 0"),
        ("model.name=vit_smal_patch16_224", "vit_small_patch16_224"),
        ("model.name=timm/resnet5", "resnet50"),
        ("model.pos_embed=rop", "did you mean 'rope'?"),
        ("model.img_size=wide", "model.img_size"),
        ("data.on_error=ignore", "'raise' or 'skip'"),
        ("data.workers=-1", "at least 0 or 'auto'"),
        ("augment.crop_scale=[1.0, 0.5]", "the first value must not exceed the second"),
        ("schedule.epochs=null", "exactly one must be set"),
        ("schedule.epochs=0", "greater than 0"),
        ("schedule.warmup_epochs=3", "at most schedule.epochs = 2"),
        ("schedule.final_lr=1", "at most optim.lr"),
        ("parallel.strategy=zero4", "zero3"),
        ("parallel.precision=float16", "'fp16'"),
        ("track.wandb=off", "'disabled'"),
        ("ema.warmup=1", "true or false"),
        ("run.seed=-1", "at least 0"),
    ],
)
def test_invalid_option_error_names_key_and_allowed_values(recipe: Path, override: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load_recipe(recipe, [override])
    assert message in str(error.value)
    assert 1 <= len(str(error.value).splitlines()) <= 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("# only a comment\n", "empty"),
        ("- a\n- b\n", "must be a mapping of sections"),
        ("just text\n", "must be a mapping of sections"),
        ("a: [1\n", "invalid YAML"),
        ("\tx: 1\n", "invalid YAML"),
        ("optim: {lr: 1e-3}\noptim: {lr: 2e-3}\n", "duplicate key 'optim' on line 2"),
        ("optim:\n  lr: 1e-3\n  lr: 2e-3\n", "duplicate key 'lr' on line 3"),
        ("optim: [1, 2]\n", "optim = [1, 2] must be a mapping of options, not a list"),
        ("optim: fast\n", "optim = 'fast' must be a mapping"),
        ("optimm: {lr: 1e-3}\n", "optim"),
        ("1: 2\n", "must be a string"),
        ("base: [a]\n", "base = ['a'] must be a recipe path"),
        ("base: nowhere.yaml\n", "recipe not found"),
        ("optim: !!python/object/apply:os.system ['true']\n", "invalid YAML"),
    ],
)
def test_invalid_recipe_error_names_its_path(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, "invalid.yaml", text)
    with pytest.raises(UserError) as error:
        load_recipe(path)
    assert message in str(error.value)


def test_missing_recipe_error_suggests_similar_names(recipe: Path) -> None:
    with pytest.raises(UserError, match=r"Did you mean .*recipe\.yaml"):
        load_recipe(recipe.with_name("recpie.yaml"))


def test_binary_recipe_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(UserError, match="cannot read recipe"):
        load_recipe(path)


def test_circular_base_error_shows_the_chain(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "base: b.yaml\n")
    write(tmp_path, "b.yaml", "base: a.yaml\n")
    with pytest.raises(UserError, match=r"a\.yaml -> b\.yaml -> a\.yaml"):
        load_recipe(tmp_path / "a.yaml")


def test_merge_order_is_defaults_base_recipe_command_line(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "optim: {lr: 0.1, weight_decay: 0.1, clip_norm: 3.0}\nschedule: {steps: 5}\n")
    top = write(tmp_path, "top.yaml", "base: base.yaml\noptim: {weight_decay: 0.2, clip_norm: 4.0}\n")
    config = load_recipe(top, ["--optim.clip_norm=5"])
    assert (config.optim.lr, config.optim.weight_decay, config.optim.clip_norm) == (0.1, 0.2, 5.0)
    assert config.optim.eps == Config().optim.eps


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.0e-3", "0.001"])
def test_scientific_notation_is_a_number(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, "r.yaml", f"optim: {{lr: {text}}}\nschedule: {{steps: 1}}\n")
    assert load_recipe(path).optim.lr == 0.001
    assert load_recipe(path, [f"optim.weight_decay={text}"]).optim.weight_decay == 0.001


def test_string_options_are_not_parsed_as_numbers(recipe: Path) -> None:
    config = load_recipe(recipe, ["track.name=007", "run.dir=1e-3", "augment.rand_augment=", "track.group=null"])
    assert (config.track.name, config.run.dir, config.augment.rand_augment) == ("007", "1e-3", "")
    assert config.track.group is None


def test_empty_section_means_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "r.yaml", "optim:\n  # lr: 1e-3\nschedule: {steps: 1}\n")
    assert load_recipe(path).optim == Config().optim


def test_printed_config_round_trips(recipe: Path, tmp_path: Path) -> None:
    overrides = ["optim.lr=3e-5", "model.img_size=[32,64]", "batch.global=96", "data.mean=[0.1,0.2,0.3]"]
    config = load_recipe(recipe, overrides)
    assert load_recipe(write(tmp_path, "again.yaml", to_yaml(config))) == config


def test_one_error_lists_all_invalid_options() -> None:
    with pytest.raises(UserError, match="Also invalid: optim.eps"):
        build_config({"schedule": {"steps": 1}, "optim": {"lr": "x", "eps": -1.0}})


def test_every_option_is_documented_in_help() -> None:
    text = options_help()
    for key, field in all_options().items():
        assert field.description, key
        assert f"  {key}=" in text


OLD_NAMES = {
    "optim": {"other_lr": 0.003},
    "augment": {"mix_off_epochs": 2.0},
    "run": {"max_bad_steps": 7},
    "track": {"pictures": "never"},
    "model": {"attention": "math"},
    "schedule": {"steps": 1},
}


@pytest.mark.parametrize(("old", "new"), [*RENAMED.items(), ("--by-number", "--match-by-index")])
def test_old_option_name_error_names_the_new_one(recipe: Path, old: str, new: str) -> None:
    with pytest.raises(UserError, match=f"{old}.*was renamed to {new}"):
        load_recipe(recipe, [old if old.startswith("--") else f"{old}=1"])


def test_recipe_with_old_option_name_is_rejected_with_the_new_one(tmp_path: Path) -> None:
    path = write(tmp_path, "recipe.yaml", "optim: {other_lr: 0.1}\nschedule: {steps: 1}\n")
    with pytest.raises(UserError, match=r"optim\.other_lr = 0\.1: this option was renamed to optim\.adamw_lr"):
        load_recipe(path)


def test_config_of_an_old_run_directory_still_loads(tmp_path: Path) -> None:
    config = load_recipe(write(tmp_path, "config.yaml", yaml.safe_dump(OLD_NAMES)))
    assert (config.optim.adamw_lr, config.augment.no_mix_epochs) == (0.003, 2.0)
    assert (config.run.max_skipped_steps, config.track.images, config.model.kernel) == (7, "never", "math")
    assert build_config(with_current_names(OLD_NAMES)) == config, "meta.json of an old checkpoint"


def test_old_run_directory_can_be_resumed_loaded_and_shown(tmp_path: Path) -> None:
    from vit_scale.inference.loaded_run import _read_config
    from vit_scale.page.runs import read_options
    from vit_scale.train.open_run import differing_options

    path = write(tmp_path, "config.yaml", yaml.safe_dump(OLD_NAMES))
    current = build_config(with_current_names(OLD_NAMES))
    assert differing_options(tmp_path, current) == {}
    assert _read_config(tmp_path, []) == current
    assert read_options(path)["optim.adamw_lr"] == 0.003
    write(tmp_path, "meta.json", json.dumps({"config": OLD_NAMES}))
    assert _read_config(tmp_path, []) == current, "a checkpoint"


def test_current_names_are_left_unchanged() -> None:
    tree = {"optim": {"lr": 0.1, "unknown": 1}, "not a section": 3}
    assert with_current_names(tree) == tree


def test_contract_names_exist() -> None:
    names = [
        "model.name",
        "data.source",
        "batch.global",
        "batch.micro",
        "schedule.steps",
        "schedule.epochs",
        "parallel.strategy",
        "parallel.precision",
        "run.dir",
        "run.seed",
        "run.resume",
        "run.save_every",
        "run.eval_every",
        "run.log_every",
        "model.drop_path",
        "model.dropout",
        "model.attn_dropout",
        "model.layer_scale",
        "model.weights",
        "augment.rand_augment",
        "augment.mixup",
        "augment.cutmix",
        "augment.label_smoothing",
        "optim.name",
        "optim.lr",
        "optim.weight_decay",
        "optim.clip_norm",
        "optim.layer_decay",
        "ema.decay",
        "track.wandb",
        "distill.teacher",
        "distill.kind",
        "distill.alpha",
        "distill.temperature",
        "distill.features",
        "distill.cache",
        "mae.mask_ratio",
        "mae.norm_pixels",
        "mae.decoder_dim",
        "mae.decoder_depth",
        "mae.decoder_heads",
    ]
    assert set(names) <= set(flatten(Config()))
    sections = list(dict.fromkeys(key.split(".")[0] for key in flatten(Config())))
    assert sections == [
        "task",
        "model",
        "data",
        "augment",
        "optim",
        "schedule",
        "batch",
        "ema",
        "parallel",
        "run",
        "track",
        "distill",
        "mae",
    ]
