"""Build the command of a trial from the sweep's `command:` with W&B's macros."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vit_scale.errors import UserError
from vit_scale.sweep.spec import Sweep

MACRO = re.compile(r"^\$\{([a-z_]+)\}$")
VARIABLE = re.compile(r"\$\{envvar:([A-Z0-9_]*)\}")


def build_command(sweep: Sweep, values: Mapping[str, Any], options: Sequence[str] = ()) -> list[str]:
    """Return the command for `values`, as W&B's agent builds it, with `options` (`a.b=value`) appended."""
    words: list[str] = []
    macros = _macros(sweep, values)
    for part in sweep.command:
        macro = MACRO.match(part)
        if macro is None:
            words.append(VARIABLE.sub(lambda found: os.environ.get(found[1], found[1]), part))
        elif macro[1] in macros:
            words += macros[macro[1]]
        else:
            raise UserError(
                f"{sweep.path}: ${{{macro[1]}}} in command is not supported; supported: {', '.join(macros)}"
            )
    return [*words, *options]


def _macros(sweep: Sweep, values: Mapping[str, Any]) -> dict[str, list[str]]:
    pairs = [f"{key}={value}" for key, value in values.items()]
    switches = {key: f"--{key}" if value is True else f"--{key}={value}" for key, value in values.items()}
    return {
        "env": [] if platform.system() == "Windows" else ["/usr/bin/env"],
        "interpreter": ["python"],
        "program": [sweep.program],
        "args": [f"--{pair}" for pair in pairs],
        "args_no_hyphens": pairs,
        "args_no_equals": [word for key, value in values.items() for word in (f"--{key}", str(value))],
        "args_no_boolean_flags": [switches[key] for key, value in values.items() if value is not False],
        "args_json": [json.dumps(dict(values))],
    }


def command_for_recipe(sweep: Sweep, recipe: Path) -> str:
    """Return the shell command that trains `recipe` with the sweep's launcher."""
    words = [word for word in build_command(sweep, {}) if word not in ("/usr/bin/env", "{}")]
    return shlex.join(str(recipe) if Path(word) == sweep.recipe else word for word in words)
