"""Errors that a user can fix, and hints that help to fix them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Invalid input or environment. The message says what is wrong, where, and how to fix it; no traceback is shown."""


class RankError(UserError):
    """A `UserError` of one rank: printed by that rank. Any other is raised on all ranks and printed by rank 0."""


def nearest(name: str, known: Iterable[str], *, n: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return up to `n` names of `known` that resemble `name`, the most similar first."""
    return difflib.get_close_matches(name, list(known), n=n, cutoff=cutoff)


def did_you_mean(name: str, known: Iterable[str], *, n: int = 1, cutoff: float = 0.6) -> str:
    """Return `did you mean X?`, or an empty string if no name of `known` resembles `name`."""
    near = nearest(name, known, n=n, cutoff=cutoff)
    return f"did you mean {', '.join(near)}?" if near else ""


def first_line(error: BaseException) -> str:
    """Return the message of `error` as one line without a full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
