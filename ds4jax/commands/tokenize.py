"""`ds4jax tokenize`: the ids of a text, or the exact prompt and ids of a chat. Reads no weights."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ds4jax.commands import common

if TYPE_CHECKING:
    from ds4jax.chat import Prompt
    from ds4jax.tokenizer import Tokenizer

_IGNORED = ("id", "description", "literal_specials_in_text", "reference_encoders")


def add(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "tokenize",
        help="ids of a text or of a chat prompt",
        description="Ids and pieces of a text (spellings of markers are plain text, nothing is"
        " added), or the rendered prompt of a chat. Weights are neither read nor needed.",
    )
    common.add_model(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", metavar="TEXT", help="the text")
    source.add_argument("-f", "--file", metavar="FILE", help="file with the text; - is stdin")
    source.add_argument(
        "--chat", metavar="FILE",
        help="JSON file with messages, tools, thinking, ... as in OpenAI requests; - is stdin",
    )  # fmt: skip
    parser.add_argument(
        "--markers", action="store_true", help="spellings of markers in the text become markers"
    )
    parser.add_argument("--bos", action="store_true", help="begin-of-sentence before the text")
    parser.add_argument(
        "--show-special", action="store_true",
        help="put markers into ⟦ ⟧, to tell them from text that spells them",
    )  # fmt: skip
    common.add_chat_profile(parser, ("v4-0731", "v4-preview", "v4.1"))
    common.add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the ids."""
    name = common.existing_model_of(args)
    if args.chat is not None:
        return _chat(args, name)
    if args.prompt is not None:
        text = args.prompt
    elif args.file is not None:
        text = common.read_text(args.file, "--file")
    elif not common.stdin_is_terminal():
        text = common.read_text("-", "stdin")
    else:
        raise common.UsageError("no text: give --prompt TEXT, --file FILE or --chat FILE")
    tokenizer = common.open_text_model(name).tokenizer
    if args.bos:
        ids = tokenizer.encode_completion(text, markers=args.markers)
    else:
        ids = tokenizer.encode(text, markers=args.markers)
    if args.json:
        common.print_json({"ids": ids, "pieces": [tokenizer.decode([i]) for i in ids]})
    else:
        _print_pieces(tokenizer, ids, args.show_special)
        common.note(args, f"{len(ids)} tokens, {len(text.encode())} bytes")
    return 0


def _print_pieces(tokenizer: Tokenizer, ids: list[int], mark: bool) -> None:
    special = set(tokenizer.specials.values())
    for token in ids:
        data = tokenizer.bytes_of(token)
        try:
            shown = repr(data.decode())
        except UnicodeDecodeError:
            shown = repr(data)  # part of a character
        print(f"{token:>7}  {'⟦' + shown[1:-1] + '⟧' if mark and token in special else shown}")


def _chat(args: argparse.Namespace, name: str) -> int:
    from ds4jax import chat
    from ds4jax.chat_json import chat_request_from_json
    from ds4jax.chat_request import PROFILES, ChatError

    case = common.read_json(args.chat, "--chat")
    if isinstance(case, dict):
        if "cases" in case and "messages" not in case:
            raise common.Failure(f"--chat {args.chat}: holds several cases, give a file with one")
        case = {k: v for k, v in case.items() if k not in _IGNORED and k[:8] != "expected"}
        wanted = case.pop("profile", None)
    else:
        wanted = None
    try:
        request = chat_request_from_json(case)
        model = common.open_text_model(name)
        option = args.chat_profile
        if wanted is not None and (option == "auto" or "chat_profile" in args.from_environment):
            option = wanted
        if option not in ("auto", *PROFILES):
            raise common.Failure(
                f"--chat {args.chat}: profile is {option!r}, must be one of {', '.join(PROFILES)}"
            )
        choice = chat.detect_profile(option, checkpoint=model.checkpoint, metadata=model.metadata)
        prompt = chat.render(request, choice.profile)
    except ChatError as error:
        raise common.Failure(f"--chat {args.chat}: {error}") from None
    if choice.warning:
        common.note(args, f"note: {choice.warning}")
    missing = {p.text for p in prompt.pieces if p.special} - set(model.tokenizer.specials)
    ids = None if missing else model.tokenizer.encode_pieces(prompt.pieces)
    if ids is None:
        common.note(
            args, f"note: no ids: this vocabulary has no {', '.join(sorted(missing))}"
            f" (profile {choice.profile})",
        )  # fmt: skip
    if args.json:
        common.print_json({"prompt": prompt.text, "ids": ids, "profile": choice.profile})
    else:
        print(_marked(prompt) if args.show_special else prompt.text)
        if ids is not None:
            common.note(args, f"{len(ids)} tokens, profile {choice.profile} ({choice.source})")
    return 0


def _marked(prompt: Prompt) -> str:
    return "".join(f"⟦{p.text}⟧" if p.special else p.text for p in prompt.pieces)
