"""Recipes and command lines: what is right is read exactly, what is wrong is told plainly."""

from __future__ import annotations

from pathlib import Path

import pytest

from vit_scale.config import Config, with_current_names
from vit_scale.errors import UserError
from vit_scale.recipe import all_options, build_config, flatten, load_recipe, options_help, to_yaml

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


def test_nested_parameters_of_a_sweep_are_options_of_a_section(recipe: Path) -> None:
    config = load_recipe(recipe, ["--optim={'lr': 0.002, 'weight_decay': 0.1}"])
    assert (config.optim.lr, config.optim.weight_decay) == (0.002, 0.1)
    with pytest.raises(UserError, match="optim.lrr"):
        load_recipe(recipe, ["--optim={'lrr': 0.002}"])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optim.lrr=1", "optim.lr"),
        ("optm.lr=1", "optim.lr"),
        ("lr=1", "optim.lr"),
        ("--optim.wieght_decay=1", "optim.weight_decay"),
        ("batch.globall=4", "batch.global"),
        ("nonsense.key=4", "no such option"),
        ("justaword", "section.name=value"),
        ("model.attention=flash", "model.attention = flash: this option is now called model.kernel"),
        ("--unknown-flag", "--help"),
        ("optim.lr=fast", "optim.lr = 'fast': must be a number"),
        ("optim.lr=true", "optim.lr = True: must be a number"),
        ("optim.lr=0", "greater than 0"),
        ("optim.lr=.inf", "finite"),
        ("optim.betas=[0.9]", "right length"),
        ("optim.betas=[0.9, 1.5]", "less than 1"),
        ("batch.global=0", "batch.global = 0: must be at least 1"),
        ("batch.global=2.5", "a whole number"),
        ("batch.global=many", "a whole number"),
        ("batch.micro=some", "a whole number or 'auto'"),
        ("batch.micro=5", "nearest that do: 4 and 8"),
        ("model.drop_path=1", "less than 1"),
        ("model.drop_path=-0.1", "at least 0"),
        ("model.name=vit_smal_patch16_224", "vit_small_patch16_224"),
        ("model.name=timm/resnet5", "resnet50"),
        ("model.pos_embed=rop", "did you mean 'rope'?"),
        ("model.img_size=wide", "model.img_size"),
        ("data.on_error=ignore", "'raise' or 'skip'"),
        ("data.workers=-1", "at least 0 or 'auto'"),
        ("augment.crop_scale=[1.0, 0.5]", "the first must be at most the second"),
        ("schedule.steps=5", "schedule.steps = 5 and schedule.epochs = 2 are both given"),
        ("schedule.epochs=null", "exactly one must be given"),
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
def test_bad_option_is_told_with_key_and_what_is_allowed(recipe: Path, override: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        load_recipe(recipe, [override])
    message = str(error.value)
    assert said in message
    assert 1 <= len(message.splitlines()) <= 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("# only a comment\n", "empty"),
        ("- a\n- b\n", "must be a mapping of sections"),
        ("just text\n", "must be a mapping of sections"),
        ("a: [1\n", "not valid YAML"),
        ("\tx: 1\n", "not valid YAML"),
        ("optim: {lr: 1e-3}\noptim: {lr: 2e-3}\n", "duplicate key 'optim' in line 2"),
        ("optim:\n  lr: 1e-3\n  lr: 2e-3\n", "duplicate key 'lr' in line 3"),
        ("optim: [1, 2]\n", "optim = [1, 2] must be a mapping of options, not a list"),
        ("optim: fast\n", "optim = 'fast' must be a mapping"),
        ("optimm: {lr: 1e-3}\n", "optim"),
        ("1: 2\n", "must be text"),
        ("base: [a]\n", "base = ['a'] must be the path of a recipe"),
        ("base: nowhere.yaml\n", "there is no such recipe"),
        ("optim: !!python/object/apply:os.system ['true']\n", "not valid YAML"),
    ],
)
def test_bad_recipe_is_told_with_its_path(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, "bad.yaml", text)
    with pytest.raises(UserError) as error:
        load_recipe(path)
    assert said in str(error.value)


def test_missing_recipe_names_its_neighbours(recipe: Path) -> None:
    with pytest.raises(UserError, match=r"Did you mean .*recipe\.yaml"):
        load_recipe(recipe.with_name("recpie.yaml"))


def test_binary_recipe_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(UserError, match="cannot be read"):
        load_recipe(path)


def test_cyclic_base_is_told_with_the_chain(tmp_path: Path) -> None:
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
def test_numbers_with_an_exponent_are_numbers(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, "r.yaml", f"optim: {{lr: {text}}}\nschedule: {{steps: 1}}\n")
    assert load_recipe(path).optim.lr == 0.001
    assert load_recipe(path, [f"optim.weight_decay={text}"]).optim.weight_decay == 0.001


def test_text_options_keep_what_was_typed(recipe: Path) -> None:
    config = load_recipe(recipe, ["track.name=007", "run.dir=1e-3", "augment.rand_augment=", "track.group=null"])
    assert (config.track.name, config.run.dir, config.augment.rand_augment) == ("007", "1e-3", "")
    assert config.track.group is None


def test_section_with_nothing_in_it_is_the_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "r.yaml", "optim:\n  # lr: 1e-3\nschedule: {steps: 1}\n")
    assert load_recipe(path).optim == Config().optim


def test_printed_config_reads_back_to_the_same(recipe: Path, tmp_path: Path) -> None:
    overrides = ["optim.lr=3e-5", "model.img_size=[32,64]", "batch.global=96", "data.mean=[0.1,0.2,0.3]"]
    config = load_recipe(recipe, overrides)
    assert load_recipe(write(tmp_path, "again.yaml", to_yaml(config))) == config


def test_several_mistakes_are_named_at_once() -> None:
    with pytest.raises(UserError, match="Also wrong: optim.eps"):
        build_config({"schedule": {"steps": 1}, "optim": {"lr": "x", "eps": -1.0}})


def test_every_option_has_a_doc_string_that_help_shows() -> None:
    text = options_help()
    for key, field in all_options().items():
        assert field.description, key
        assert f"  {key}=" in text


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
    ]
    assert set(names) <= set(flatten(Config()))
    sections = list(dict.fromkeys(key.split(".")[0] for key in flatten(Config())))
    assert sections == ["model", "data", "augment", "optim", "schedule", "batch", "ema", "parallel", "run", "track"]


def test_a_recipe_with_a_renamed_option_is_rejected_and_a_run_of_an_earlier_version_loads(tmp_path: Path) -> None:
    text = "model: {attention: math}\nschedule: {steps: 1}\n"
    with pytest.raises(UserError, match="model.attention = math: this option is now called model.kernel"):
        load_recipe(write(tmp_path, "recipe.yaml", text))
    written_by_a_run = write(tmp_path, "config.yaml", text)
    assert load_recipe(written_by_a_run).model.kernel == "math"
    assert load_recipe(written_by_a_run, ["model.kernel=auto"]).model.kernel == "auto"


def test_current_names_leave_other_options_and_the_tree_itself_alone() -> None:
    tree = {"model": {"attention": "math", "name": "vit_mu"}, "schedule": {"steps": 1}}
    assert with_current_names(tree) == {"model": {"kernel": "math", "name": "vit_mu"}, "schedule": {"steps": 1}}
    assert tree["model"] == {"attention": "math", "name": "vit_mu"}
    current = {"model": {"kernel": "math"}}
    assert with_current_names(current) == current
