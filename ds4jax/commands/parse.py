"""`ds4jax parse`: reasoning, content and tool calls of a model's output. Reads no weights."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ds4jax.commands import common

if TYPE_CHECKING:
    from ds4jax.chat import StartState
    from ds4jax.parser import ParsedOutput

_CASE_FIELDS = (
    "id", "description", "thinking", "tools_declared", "finish", "raw", "ids", "chunks", "expected",
    "agrees_with",
)  # fmt: skip


def add(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "parse",
        help="reasoning, content and tool calls of an output",
        description="Take a model's output apart: token ids, where only real markers count, or"
        " text, where their spellings do. Weights are neither read nor needed.",
    )
    common.add_model(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--ids", metavar="FILE",
        help="JSON file with a list of ids, or with one case (ids, thinking, tools_declared)",
    )  # fmt: skip
    source.add_argument(
        "--text", metavar="FILE",
        help="file with the text; if its name ends in .json, one case (raw, thinking, ...)",
    )  # fmt: skip
    parser.add_argument(
        "--thinking", action="store_true", help="the output starts inside the reasoning"
    )
    parser.add_argument("--tools", action="store_true", help="the prompt declared tools")
    common.add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the parts."""
    if args.ids is None and args.text is None:
        raise common.UsageError("no output to parse: give --ids FILE or --text FILE")
    output = _parse_ids(args) if args.ids is not None else _parse_text(args)
    for reason, count in output.anomalies.items():
        common.note(args, f"note: {reason.replace('_', ' ')}: {count}")
    if args.json:
        common.print_json(_as_json(output))
    else:
        _print(output)
    return 0


def _parse_ids(args: argparse.Namespace) -> ParsedOutput:
    from ds4jax.parser import TokenParser

    where = f"--ids {args.ids}"
    value, start, tools = _case(common.read_json(args.ids, "--ids"), "ids", where, args)
    ids = common.token_ids(value, where)
    tokenizer = common.open_text_model(common.existing_model_of(args)).tokenizer
    parser = TokenParser(tokenizer, start=start, tools_declared=tools)
    for token in ids:
        parser.push(token)
    parser.finish()
    return parser.output


def _parse_text(args: argparse.Namespace) -> ParsedOutput:
    from ds4jax.parser import TextParser

    where = f"--text {args.text}"
    if args.text.endswith(".json"):
        value = common.read_json(args.text, "--text")
        text, start, tools = _case(value, "raw", where, args)
        if type(text) is not str:
            raise common.Failure(f"{where}: raw must be a string")
    else:
        text, start, tools = _case(common.read_text(args.text, "--text"), "raw", where, args)
    parser = TextParser(start=start, tools_declared=tools)
    parser.push(text)
    parser.finish()
    return parser.output


def _case(
    value: Any, payload: str, where: str, args: argparse.Namespace
) -> tuple[Any, StartState, bool]:
    """(payload, start state, whether tools were declared) of a case or of a bare payload."""
    thinking, tools = args.thinking, args.tools
    if isinstance(value, dict):
        if "cases" in value:
            raise common.Failure(f"{where}: holds several cases, give a file with one")
        unknown = [k for k in value if k not in _CASE_FIELDS]
        if unknown or payload not in value:
            wrong = f"has the unknown field {unknown[0]!r}" if unknown else "has no such field"
            raise common.Failure(
                f"{where}: {wrong}; a case has {payload}, thinking and tools_declared"
            )
        for name in ("thinking", "tools_declared"):
            if not isinstance(value.get(name, False), bool):
                raise common.Failure(f"{where}: {name} is {value[name]!r}, must be true or false")
        thinking = thinking or value.get("thinking", False)
        tools = tools or value.get("tools_declared", False)
        value = value[payload]
    return value, "reasoning" if thinking else "content", tools


def _as_json(output: ParsedOutput) -> dict[str, Any]:
    from ds4jax.chat_request import strict_json

    cut = output.truncated_call
    return {
        "reasoning": output.reasoning,
        "content": output.content,
        "tool_calls": [
            {"name": call.name, "arguments": strict_json(call.arguments)}
            for call in output.tool_calls
        ],
        "truncated_call": None if cut is None else {"name": cut.name},
    }


def _print(output: ParsedOutput) -> None:
    if output.reasoning:
        print(f"--- reasoning\n{output.reasoning}")
    print(f"--- content\n{output.content}")
    for call in output.tool_calls:
        print(f"--- call {call.name}\n{call.arguments}")
    if output.truncated_call is not None:
        print(f"--- truncated call {output.truncated_call.name or '(name cut off)'}")
