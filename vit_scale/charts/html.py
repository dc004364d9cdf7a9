"""Self-contained HTML pages: templates, styles and scripts of a package's `assets`, with nothing to fetch."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any


def render(package: str, template: str, figures: dict[str, Any], **values: Any) -> str:
    """Render `assets/<template>` of a package; `figures` are drawn by charts.js.

    The template may use `style` and `charts` (of this package), `figures` (JSON) and `asset(package, name)`.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    # Autoescape: class names, options and directory names are foreign data and may contain HTML.
    environment = Environment(
        loader=PackageLoader(package, "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    common = {
        "style": asset("vit_scale.charts", "base.css"),
        "charts": asset("vit_scale.charts", "charts.js"),
        "figures": for_script(figures),
        "asset": asset,
    }
    return environment.get_template(template).render(**common, **values)


def for_script(value: Any) -> str:
    """Return JSON for a <script> element, without any `<` that could close it."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def asset(package: str, name: str) -> str:
    """Return the text of a file in the `assets` of a package."""
    return (resources.files(package) / "assets" / name).read_text(encoding="utf-8")
