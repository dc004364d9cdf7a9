"""Colors that everyone can read, and pages that cannot be broken by the names they show."""

from __future__ import annotations

import re

import pytest

from vit_scale.charts.figures import COLORS, matrix_figure
from vit_scale.charts.html import asset, for_script

BASE = asset("vit_scale.charts", "base.css")
LIGHT, DARK = (dict(re.findall(r"--(\w+): (#\w{6});", block)) for block in re.findall(r":root \{(.*?)\}", BASE, re.S))


def luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    """Contrast ratio of WCAG 2."""
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_curves_have_enough_contrast(scheme: dict[str, str]) -> None:
    for ground in (scheme["ground"], scheme["card"]):
        for name in ("text", "quiet", "accent", "good", "warn"):
            assert contrast(scheme[name], ground) >= 4.5, name
        for color in COLORS:
            assert contrast(color, ground) >= 3, color
    assert contrast("#ffffff", scheme["correct"]) >= 4.5
    assert contrast("#1b1f27", scheme["error"]) >= 4.5


def test_matrix_has_only_cells_that_occur() -> None:
    figure = matrix_figure(["a", "b"], [[3, 1], [0, 0]])
    assert figure["cells"] == [[0, 0, 3], [0, 1, 1]]


def test_json_cannot_close_its_script() -> None:
    assert "<" not in for_script({"</script>": "<b>"})
