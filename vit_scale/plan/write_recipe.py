"""Write suggested options as a commented recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from vit_scale.errors import UserError
from vit_scale.files import write_text
from vit_scale.format import option_value
from vit_scale.plan.suggest import Choice
from vit_scale.recipe import Tree

WIDTH = 120


def recipe_text(choices: Sequence[Choice], header: Sequence[str]) -> str:
    """Return YAML with the header and the reason of each section as comments."""
    lines = [f"# {line}" for line in header]
    for choice in choices:
        line = (
            f"{choice.section}: {{{', '.join(f'{name}: {_value(value)}' for name, value in choice.options.items())}}}"
        )
        short = len(line) + len(choice.reason) + 4 <= WIDTH
        lines += (
            [f"{line}  # {choice.reason}"]
            if short
            else [f"# {choice.reason[0].upper()}{choice.reason[1:]}", *_wrapped(choice, line)]
        )
    return "\n".join(lines) + "\n"


def recipe_tree(choices: Sequence[Choice]) -> Tree:
    """Return the options as `load_recipe` reads them from the text."""
    return {choice.section: dict(choice.options) for choice in choices}


def write_recipe(path: Path, text: str) -> None:
    """Write the recipe; raises `UserError` if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise UserError(f"--out {path}: cannot write: {error.strerror}") from error


def _wrapped(choice: Choice, line: str) -> list[str]:
    if len(line) <= WIDTH:
        return [line]
    return [f"{choice.section}:", *(f"  {name}: {_value(value)}" for name, value in choice.options.items())]


def _value(value: Any) -> str:
    """Format a value as YAML on one line; text is quoted only if YAML would read it as something else."""
    if not isinstance(value, str):
        return option_value(value)
    return yaml.safe_dump([value], default_flow_style=True, width=10_000, allow_unicode=True).strip()[1:-1]
