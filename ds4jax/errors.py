"""What is wrong with a model file, as data: the one exception of all readers and checks.

A reader goes on as long as it can and raises once, with everything it found. Nothing here reads a
file, and nothing here knows a format.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MAX_PRINTED = 40
"""Problems spelled out in the text of a `ModelFileError`; `problems` holds all of them."""

MAX_KEPT = 2000
"""Problems a reader collects from one file before it stops looking (bounded memory)."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One finding: where it is, what stands there, what should, and what to do about it."""

    file: str
    where: str  # tensor, key or section; empty: the file itself
    found: str
    expected: str
    fix: str = ""

    def __str__(self) -> str:
        place = f"{self.file}: {self.where}" if self.where else self.file
        text = f"{place}: found {self.found}, expected {self.expected}"
        return f"{text}; {self.fix}" if self.fix else text

    def as_dict(self) -> dict[str, str]:
        """The five fields as JSON-ready text."""
        return {
            "file": self.file,
            "where": self.where,
            "found": self.found,
            "expected": self.expected,
            "fix": self.fix,
        }


class ModelFileError(ValueError):
    """A model file that cannot be used. `problems` lists every finding, in file order."""

    def __init__(self, path: str, problems: Iterable[Problem]) -> None:
        self.path = path
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = [str(p) for p in self.problems[:MAX_PRINTED]]
        if count > MAX_PRINTED:
            lines.append(f"... and {count - MAX_PRINTED} more")
        head = f"{path}: {count} problem{'s' if count != 1 else ''}"
        super().__init__("\n  ".join([head, *lines]))


def printable(text: str, limit: int = 120) -> str:
    """`text` as one line of visible characters, cut to `limit`: names come from untrusted files."""
    cut = text if len(text) <= limit else text[:limit] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
