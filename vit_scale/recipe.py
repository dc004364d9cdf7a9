"""Read a recipe and command-line overrides into a validated `Config`, and write it back to YAML.

Layers, in merge order: defaults in config.py < the recipe's `base:` < the recipe < `a.b=value` on the command line.
pydantic validates types and ranges; this module parses strictly and turns every problem into a readable message.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from vit_scale.config import ALTERNATIVES, RENAMED, SCALED, TASK_SECTIONS, Config, current_name, with_current_names
from vit_scale.errors import UserError, nearest
from vit_scale.models.variants import check_model_name
from vit_scale.schedule import nearest_divisors

Tree = dict[str, Any]
_ADAPTER = TypeAdapter(Config)
RUN_CONFIG = "config.yaml"
"""Written into every run directory; it may use option names of earlier versions."""
_RENAMED_FLAGS = {"--by-number": "--match-by-index"}


# -------------------------------------------------------------------------------------------------------------- reading


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load the recipe at `path` and apply `overrides` (`a.b=value` or `--a.b=value`).

    A run directory's config.yaml may use option names of earlier versions.

    Raises `UserError` if the recipe or an override is invalid.
    """
    layers = _read_with_bases(Path(path), ())
    if Path(path).name == RUN_CONFIG:
        layers = [with_current_names(layer) for layer in layers]
    return _build([*layers, _read_overrides(overrides)])


def build_config(tree: Tree, overrides: Sequence[str] = ()) -> Config:
    """Validate `tree` (section -> option -> value) with `overrides` applied; raises `UserError`."""
    return _build([tree, _read_overrides(overrides)])


def _build(layers: Sequence[Tree]) -> Config:
    tree, written_for = merge_layers(layers)
    if unknown := next((key for key in tree if key not in _sections()), None):
        raise UserError(_unknown(unknown, tree[unknown]))
    try:
        config = _ADAPTER.validate_python(tree | {"written_for": written_for})
    except ValidationError as error:
        raise UserError(_describe(error)) from None
    check_model_name(config.model.name)
    _check_conflicts(config)
    return config


def _read_with_bases(path: Path, seen: tuple[Path, ...]) -> list[Tree]:
    """Return the recipe, after those that `base:` names."""
    resolved = path.resolve()
    if resolved in seen:
        chain = " -> ".join(p.name for p in (*seen, resolved))
        raise UserError(f"{path}: circular `base:`: {chain}")
    tree = _read_yaml(path)
    base = tree.pop("base", None)
    if base is None:
        return [tree]
    if not isinstance(base, str):
        raise UserError(f"{path}: base = {base!r} must be a recipe path relative to this file")
    return [*_read_with_bases(path.parent / base, (*seen, resolved)), tree]


def _read_yaml(path: Path) -> Tree:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: recipe not found.{_nearby_recipes(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read recipe: {error}") from None
    try:
        tree = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 -- a subclass of the safe loader
    except yaml.YAMLError as error:
        raise UserError(f"{path}: invalid YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        raise UserError(f"{path}: the recipe is empty; set at least schedule.steps or schedule.epochs")
    if not isinstance(tree, dict):
        raise UserError(f"{path}: must be a mapping of sections ({', '.join(_sections())}), not a {_kind(tree)}")
    for section, options in tree.items():
        if options is None:  # all options of the section are commented out
            tree[section] = {}
        elif section in _sections() and not isinstance(options, dict):
            raise UserError(f"{path}: {section} = {options!r} must be a mapping of options, not a {_kind(options)}")
    return tree


def _nearby_recipes(path: Path) -> str:
    near = nearest(path.name, [p.name for p in path.parent.glob("*.yaml")], n=3, cutoff=0.4)
    return f" Did you mean {' or '.join(str(path.parent / name) for name in near)}?" if near else ""


def _kind(value: Any) -> str:
    return {list: "list", str: "string", bool: "boolean"}.get(type(value), "single value")


class _StrictLoader(yaml.SafeLoader):
    """Safe loader that rejects duplicate keys and reads `1e-3` as a number (PyYAML reads a string)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
            if not isinstance(key, str):
                raise yaml.YAMLError(f"key {key!r} on line {key_node.start_mark.line + 1} must be a string")
            if key in seen:
                raise yaml.YAMLError(f"duplicate key {key!r} on line {key_node.start_mark.line + 1}")
            seen.add(key)
        return super().construct_mapping(node, deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def merge(below: Tree, above: Tree) -> Tree:
    """Merge both trees recursively; values of `above` take precedence."""
    merged = dict(below)
    for key, value in above.items():
        both_mappings = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both_mappings else value
    return merged


def merge_layers(layers: Sequence[Tree]) -> tuple[Tree, dict[str, Tree]]:
    """Merge `layers`, the lowest first, and return `Config.written_for` with the result.

    An option of a layer replaces those below that exclude it.
    """
    tree: Tree = {}
    written_for: dict[str, Tree] = {}
    for layer in layers:
        length = _length(tree)
        for option in SCALED:
            if _has(layer, option):
                written_for.pop(option, None)
            elif length and _length(layer) and _get(tree, option):
                written_for.setdefault(option, length)
        tree = merge(_without_replaced(tree, layer), layer)
    return tree, written_for


def _without_replaced(tree: Tree, layer: Tree) -> Tree:
    """Unset the options of `tree` that exclude an option of `layer`."""
    for pair in ALTERNATIVES:
        for ours, theirs in (pair, pair[::-1]):
            if _get(layer, ours) not in (None, "") and _get(tree, theirs) is not None and not _has(layer, theirs):
                section, name = theirs.split(".")
                tree = merge(tree, {section: {name: "" if theirs == "augment.rand_augment" else None}})
    # One way only: smoothing can be switched off, a loss cannot.
    if _get(layer, "optim.loss") == "binary" and not _has(layer, "augment.label_smoothing"):
        tree = merge(tree, {"augment": {"label_smoothing": 0.0}})
    return tree


def _length(tree: Tree) -> Tree | None:
    values = {unit: _get(tree, f"schedule.{unit}") for unit in ("steps", "epochs")}
    valid = {unit: float(value) for unit, value in values.items() if isinstance(value, int | float) and value > 0}
    return valid or None


def _has(tree: Tree, option: str) -> bool:
    section, name = option.split(".")
    return isinstance(tree.get(section), dict) and name in tree[section]


def _get(tree: Tree, option: str) -> Any:
    section, name = option.split(".")
    return tree[section][name] if _has(tree, option) else None


# ------------------------------------------------------------------------------------------------------------ overrides


def _read_overrides(overrides: Sequence[str]) -> Tree:
    """Return the layer of the command line; a later override of the same option takes precedence."""
    layer: Tree = {}
    for override in overrides:
        for key, value in _parse_override(override):
            section, name = key.split(".")
            layer = merge(layer, {section: {name: value}})
    return layer


def _parse_override(text: str) -> Iterator[tuple[str, Any]]:
    """Yield (option, value) pairs; several for `section={name: value}`, the form of nested W&B sweep parameters."""
    key, equals, raw = text.removeprefix("--").partition("=")
    if not equals:
        if text in _RENAMED_FLAGS:
            raise UserError(f"{text}: this flag was renamed to {_RENAMED_FLAGS[text]}")
        raise UserError(f"{text}: invalid argument; set options as section.name=value; see --help for flags")
    try:
        value = yaml.load(raw, Loader=_StrictLoader) if raw else ""  # noqa: S506
    except yaml.YAMLError:
        value = raw
    if key in _sections() and isinstance(value, dict):
        for name, inner in value.items():
            if f"{key}.{name}" not in all_options():
                raise UserError(_unknown(f"{key}.{name}", inner))
            yield f"{key}.{name}", inner
        return
    if key not in all_options():
        raise UserError(_unknown(key, raw))
    if value is not None and not isinstance(value, str) and _accepts_text(key):
        value = raw  # `track.name=007` is a string, not the number 7
    yield key, value


def _accepts_text(key: str) -> bool:
    annotation = all_options()[key].annotation
    is_list = typing.get_origin(annotation) is tuple  # `track.tags=[a, b]` is a list of two tags
    return annotation is str or (str in typing.get_args(annotation) and not is_list)


# ------------------------------------------------------------------------------------------------------- error messages


def all_options() -> dict[str, Any]:
    """Map every option, `section.name`, to its pydantic field."""
    return {f"{section}.{name}": field for section in _sections() for name, field in _fields(section)}


def _sections() -> dict[str, type]:
    hints = typing.get_type_hints(Config)
    fields = Config.__pydantic_fields__  # type: ignore[attr-defined]
    return {name: hints[name] for name, field in fields.items() if not field.exclude}


def _fields(section: str) -> Iterator[tuple[str, Any]]:
    for name, field in _sections()[section].__pydantic_fields__.items():  # type: ignore[attr-defined]
        yield field.alias or name, field


def _unknown(key: str, value: Any) -> str:
    if key in RENAMED:
        return f"{key} = {value}: this option was renamed to {RENAMED[key]}"
    options = list(all_options())
    leaf = key.rsplit(".", 1)[-1]
    same_name = [option for option in options if option.rsplit(".", 1)[-1] == leaf]
    sections = [] if "." in key else nearest(key, _sections(), n=1)
    near = same_name or sections or nearest(key, options, n=1, cutoff=0.5) or _near_leaf(leaf, options)
    hint = f"did you mean {' or '.join(near)}?" if near else f"sections are {', '.join(_sections())}; see --help"
    return f"{key} = {value}: unknown option; {hint}"


def _near_leaf(leaf: str, options: list[str]) -> list[str]:
    near = nearest(leaf, {option.rsplit(".", 1)[-1] for option in options}, n=1, cutoff=0.6)
    return [option for option in options if option.rsplit(".", 1)[-1] in near]


_WORDING = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "finite_number": "a finite number",
    "tuple_type": "a list",
    "none_required": "null",
    "greater_than": "greater than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "{expected}",
    "missing": "a list of the right length",
    "too_long": "a list of the right length",
}


def _describe(error: ValidationError) -> str:
    """Describe the first problem on one line; list the other invalid keys on a second line."""
    by_key: dict[str, list[Any]] = {}
    for problem in error.errors(include_url=False):
        by_key.setdefault(".".join(str(part) for part in problem["loc"][:2]), []).append(problem)
    (key, problems), *others = by_key.items()
    if problems[0]["type"] == "unexpected_keyword_argument":
        message = _unknown(key, problems[0]["input"])
    elif (name := current_name(key, problems[0]["input"])) != key:
        message = f"{key} = {problems[0]['input']}: this option was renamed to {name}"
    else:
        allowed = dict.fromkeys(_WORDING.get(p["type"], p["msg"]).format(**p.get("ctx", {})) for p in problems)
        message = f"{key} = {problems[0]['input']!r}: must be {' or '.join(allowed)}{_nearest_choice(problems)}"
    return message if not others else f"{message}\nAlso invalid: {', '.join(dict(others))}"


def _nearest_choice(problems: list[Any]) -> str:
    choices = re.findall(r"'([^']+)'", " ".join(p.get("ctx", {}).get("expected", "") for p in problems))
    near = nearest(str(problems[0]["input"]), choices, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


# -------------------------------------------------------------------------------------------------- conflicting options


def _check_conflicts(config: Config) -> None:
    schedule, batch, augment = config.schedule, config.batch, config.augment
    if schedule.steps is not None and schedule.epochs is not None:
        raise UserError(
            f"schedule.steps = {schedule.steps} and schedule.epochs = {schedule.epochs:g} are both set: "
            "set exactly one (unset the other with schedule.epochs=null)"
        )
    if schedule.steps is None and schedule.epochs is None:
        raise UserError("schedule.steps or schedule.epochs: exactly one must be set, e.g. schedule.epochs=90")
    if schedule.warmup_steps is not None and schedule.warmup_epochs is not None:
        raise UserError("schedule.warmup_steps and schedule.warmup_epochs are both set: set at most one")
    _check_warmup(config)
    if schedule.final_lr > config.optim.lr:
        raise UserError(f"schedule.final_lr = {schedule.final_lr:g}: must be at most optim.lr = {config.optim.lr:g}")
    if batch.micro != "auto" and batch.global_ % batch.micro:
        raise UserError(
            f"batch.micro = {batch.micro}: does not divide batch.global = {batch.global_}; "
            f"nearest divisors: {nearest_divisors(batch.global_, batch.micro)}"
        )
    for key, (low, high) in {"crop_scale": augment.crop_scale, "crop_ratio": augment.crop_ratio}.items():
        if low > high:
            raise UserError(f"augment.{key} = [{low:g}, {high:g}]: the first value must not exceed the second")
    if augment.label_smoothing and config.optim.loss == "binary":
        raise UserError(
            f"augment.label_smoothing = {augment.label_smoothing:g}: optim.loss = 'binary' treats every class with a "
            "nonzero target as present, so label smoothing must be 0"
        )
    _check_balance(config)
    _check_task_sections(config)
    if augment.rand_augment and augment.rand_magnitude is not None:
        raise UserError("augment.rand_augment and augment.rand_magnitude are both set: use one of the two")


def _check_task_sections(config: Config) -> None:
    """Reject options of a task that is not selected, unless they have their default."""
    for section, task in TASK_SECTIONS.items():
        options, default = getattr(config, section), _sections()[section]()
        changed = next((name for name, _ in _fields(section) if getattr(options, name) != getattr(default, name)), None)
        if changed is None:
            continue
        key = f"{section}.{changed} = {getattr(options, changed)}"
        if config.task.name != task:
            raise UserError(f"{key}: requires task.name = {task}; task.name is {config.task.name}")
        if section == "distill" and config.distill.teacher is None:
            raise UserError(f"{key}: requires distill.teacher, e.g. distill.teacher=timm/resnet18")


def _check_balance(config: Config) -> None:
    if config.data.balance and config.data.streaming:
        raise UserError("data.balance = true: the classes of a stream are unknown until read; set data.streaming=false")
    if config.data.balance and config.optim.class_weights == "balanced":
        raise UserError("data.balance = true and optim.class_weights = balanced both even out the classes: use one")


def _check_warmup(config: Config) -> None:
    schedule = config.schedule
    pairs = (("steps", schedule.warmup_steps, schedule.steps), ("epochs", schedule.warmup_epochs, schedule.epochs))
    for unit, warmup, length in pairs:
        is_scaled = f"schedule.warmup_{unit}" in config.written_for
        if warmup is not None and length is not None and warmup > length and not is_scaled:
            raise UserError(f"schedule.warmup_{unit} = {warmup:g}: must be at most schedule.{unit} = {length:g}")


# -------------------------------------------------------------------------------------------------------------- writing


def to_tree(config: Config) -> Tree:
    """Convert `config` to plain mappings, lists, numbers and strings, with option names as in recipes."""
    return _ADAPTER.dump_python(config, mode="json", by_alias=True)


def to_yaml(config: Config) -> str:
    """Serialize `config` to YAML that `load_recipe` reads back to the same options."""
    return yaml.safe_dump(to_tree(config), sort_keys=False, allow_unicode=True, width=120)


def flatten(config: Config) -> dict[str, Any]:
    """Map every option, `section.name`, to its value."""
    return {f"{s}.{n}": value for s, options in to_tree(config).items() for n, value in options.items()}


def options_help(width: int = 100) -> str:
    """List every option with its default and description, by section."""
    import textwrap

    defaults = flatten(Config())
    lines: list[str] = []
    for section, cls in _sections().items():
        lines.append(f"\n{section}: {' '.join((cls.__doc__ or '').split())}")
        for name, field in _fields(section):
            default = yaml.safe_dump(defaults[f"{section}.{name}"], default_flow_style=True, width=1000)
            head = f"  {section}.{name}={default.splitlines()[0]}"
            lines.append(head)
            lines += textwrap.wrap(field.description, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) + "\n"
