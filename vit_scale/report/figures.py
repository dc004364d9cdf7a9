"""Numbers for people."""

from __future__ import annotations


def significant(value: float, digits: int = 4) -> str:
    """`value` with so many significant digits and no exponent: 0.3646, 17.56, 1,784."""
    if value == 0:
        return "0"
    whole_digits = len(f"{abs(value):.0f}") if abs(value) >= 1 else 0
    return f"{value:,.{max(0, digits - whole_digits)}f}"


def giga(value: float) -> str:
    """In units of 1e9: 17,563,828,224 is 17.56."""
    return significant(value / 1e9)


def percent(share: float) -> str:
    """A share of 1: 0.336 is 33.6 %."""
    return f"{100 * share:.1f} %"


def memory(size: float) -> str:
    """Bytes with their unit: 1.2 GiB, 35 MiB."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{significant(size / factor, 3)} {unit}"
    return f"{size:,.0f} B"


def size(image: tuple[int, int]) -> str:
    """Height x width in pixels."""
    return f"{image[0]} x {image[1]}"
