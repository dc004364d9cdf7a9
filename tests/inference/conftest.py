"""Lets tests import the custom task of tests/tasks."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tasks"))  # mean_color.py
