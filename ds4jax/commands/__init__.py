"""Commands of the command line, one module each.

A module has `add(subparsers)`, which declares the command and its flags, and `run(args) -> int`,
which does the work and returns the exit status (`add` names it with `set_defaults(run=run)`). What
a command needs beyond the standard library is imported inside `run`, because every start of the
program calls every `add`.
"""

from __future__ import annotations

COMMANDS: tuple[str, ...] = (
    "generate", "chat", "serve", "top", "score", "logits",
    "inspect", "tokenize", "detokenize", "parse",
    "convert", "download", "doctor",
)  # fmt: skip
"""Modules of this package that are commands, in the order of the help text."""
