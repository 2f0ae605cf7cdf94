"""`ds4jax detokenize`: the text of token ids. Reads no weights."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ds4jax.commands import common


def add(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "detokenize",
        help="text of token ids",
        description="Text of token ids, markers spelled out, invalid UTF-8 as U+FFFD, nothing added"
        " or cleaned up. Weights are neither read nor needed.",
    )
    common.add_model(parser)
    parser.add_argument(
        "--ids", metavar="FILE", default="-",
        help="JSON file with a list of ids (or an object with such a list as ids); - is stdin",
    )  # fmt: skip
    parser.add_argument(
        "--show-special", action="store_true",
        help="put markers into ⟦ ⟧, to tell them from text that spells them",
    )  # fmt: skip
    common.add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the text."""
    if args.ids == "-" and common.stdin_is_terminal():
        raise common.UsageError("no ids: give --ids FILE")
    where = f"--ids {args.ids}"
    value = common.read_json(args.ids, "--ids")
    ids = common.token_ids(value.get("ids") if isinstance(value, dict) else value, where)
    tokenizer = common.open_text_model(common.existing_model_of(args)).tokenizer
    special = set(tokenizer.specials.values()) if args.show_special else set()
    stream = tokenizer.detokenizer()
    pieces = []
    for token in ids:
        if token in special:
            pieces.append(f"{stream.finish()}⟦{tokenizer.decode([token])}⟧")
        else:
            pieces.append(stream.push(token))
    tail = stream.finish()
    text = "".join(pieces) + tail
    if args.json:
        common.print_json({"text": text, "pieces": pieces, "tail": tail})
    else:
        sys.stdout.write(text + ("\n" if sys.stdout.isatty() else ""))
    return 0
