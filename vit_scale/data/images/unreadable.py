"""Images that could not be read: counted, and the first ten reported by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Problem(NamedTuple):
    """One image that could not be read."""

    number: int
    name: str
    reason: str


@dataclass
class Problems:
    """Skipped images. An image that is met again in a later epoch counts once."""

    numbers: set[int] = field(default_factory=set)
    first: list[Problem] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.numbers)

    def add(self, problems: Iterable[Problem]) -> None:
        """Count these images."""
        for problem in problems:
            if problem.number not in self.numbers:
                self.numbers.add(problem.number)
                if len(self.first) < 10:
                    self.first.append(problem)

    def summary(self) -> str:
        """Return their number and the names of the first ten as text; empty if there were none."""
        if not self.numbers:
            return ""
        lines = [f"{len(self):,} images could not be read and were replaced or skipped:"]
        lines += [f"  {problem.name}: {problem.reason}" for problem in self.first]
        if len(self) > len(self.first):
            lines.append(f"  ... and {len(self) - len(self.first):,} more")
        return "\n".join(lines)
