"""`ds4jax generate`: one prompt in, one answer (or several) out, on this machine."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from ds4jax.commands import common, interrupts, running

if TYPE_CHECKING:
    from ds4jax.answer import PromptIds, Result
    from ds4jax.local import Generation, LocalModel, Output
    from ds4jax.parser import Event
    from ds4jax.plan import TokenResult
    from ds4jax.tokenizer import Tokenizer

MAX_CANDIDATES = 8


def add(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "generate",
        help="one prompt, one answer",
        description="Answer one prompt. The text is one user message of a chat; --raw continues it"
        " as it is. The answer goes to stdout as it comes, reasoning and timings to stderr.",
    )
    common.add_model(parser)
    prompt = parser.add_argument_group("prompt")
    source = prompt.add_mutually_exclusive_group()
    source.add_argument(
        "-p", "--prompt", metavar="TEXT", help="the prompt; stdin if nothing is given"
    )
    source.add_argument("-f", "--prompt-file", metavar="FILE", help="file with it; - is stdin")
    source.add_argument("--ids", metavar="FILE", help="JSON list of token ids, used as they are")
    source.add_argument("--chat", metavar="FILE",
                        help="JSON file with messages, tools, ... as in OpenAI calls")  # fmt: skip
    prompt.add_argument("-sys", "--system", metavar="TEXT", help="system message")
    prompt.add_argument("--raw", action="store_true", help="continue the text as it is, no chat")
    prompt.add_argument("--markers", action="store_true",
                        help="with --raw: markers spelled in the text are markers")  # fmt: skip
    common.add_context(parser, "4096, or what the model allows")
    common.add_sampling(parser)
    common.add_runtime(parser)
    common.add_server(parser)
    common.add_output(parser)
    parser.add_argument("--candidates", type=common.integer(1, MAX_CANDIDATES), default=1,
                        metavar="N", help="answers to the same prompt")  # fmt: skip
    parser.add_argument("--logprobs", type=common.integer(0, 20), metavar="N",
                        help="log-probability of every token, and the N best")  # fmt: skip
    parser.add_argument("--dump-tokens", action="store_true",
                        help="one line per token on stdout instead of the text")  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Answer."""
    common.check_server_flags(args)
    if args.server is not None:
        from ds4jax.commands import remote

        return remote.run_generate(args)
    sampling, stopping = running.sampling_of(args), running.stopping_of(args)
    model = running.open_model(args)
    prompt = _prompt(args, model)
    cfg = model.file.model_config
    running.check_ids([i for i, _ in sampling.logit_bias], cfg.vocab_size, "--logit-bias")
    running.check_ids(stopping.stop_token_ids, cfg.vocab_size, "--stop-id")
    if stopping.stop_strings:
        model.need_tokenizer()
    ctx = running.context_of(args, model)
    running.check_length(len(prompt.ids), ctx, cfg.max_position_embeddings, stopping)
    with running.progress(args) as shown:
        loaded = running.load(args, model, ctx, shown, lanes=args.candidates)
        local = running.start(loaded, model, shown)
    generation = local.generate(prompt, sampling, stopping, candidates=args.candidates)
    printer = Printer(args, model.tokenizer)
    with interrupts.interruptible(generation) as was_interrupted:
        for output in generation:
            printer.show(output)
    printer.end(generation)
    if was_interrupted():
        raise KeyboardInterrupt
    if args.json:
        settings = running.settings_json(loaded, model, ctx)
        common.print_json(_as_json(generation, local, settings, len(prompt.ids), model.tokenizer))
    else:
        common.note(args, summary(generation, local, len(prompt.ids)))
    return 0


# -- prompt ----------------------------------------------------------------------------------------


def _prompt(args: argparse.Namespace, model: running.Opened) -> PromptIds:
    from ds4jax.answer import PromptIds, chat_prompt
    from ds4jax.chat_request import ChatError
    from ds4jax.tokenizer import TokenizerError

    check_prompt_flags(args)
    if args.ids is not None:
        return _given_ids(args, model)
    if args.chat is not None:
        return _chat_file(args, model)
    text = prompt_text(args)
    tokenizer = model.need_tokenizer()
    try:
        if args.raw:
            return PromptIds(ids=tuple(tokenizer.encode_completion(text, markers=args.markers)))
        from ds4jax import chat
        from ds4jax.chat_request import ChatRequest, Message

        messages = [Message(role="user", content=text)]
        if args.system is not None:
            messages.insert(0, Message(role="system", content=args.system))
        request = ChatRequest(messages=tuple(messages), effort=args.effort)
        return chat_prompt(chat.render(request, running.chat_profile(args, model)), tokenizer)
    except (ChatError, TokenizerError) as error:
        raise common.Failure(f"the prompt: {error}") from None


def check_prompt_flags(args: argparse.Namespace) -> None:
    """Refuse flags that contradict each other.

    Raises:
        UsageError: naming them.
    """
    if args.markers and not args.raw:
        raise common.UsageError("--markers goes with --raw: text of a chat is never a marker")
    if args.raw and (args.system is not None or args.chat is not None):
        other = "--system" if args.system is not None else "--chat"
        raise common.UsageError(f"--raw and {other} exclude each other: {other} makes a chat")


def prompt_text(args: argparse.Namespace) -> str:
    """The prompt as text, from a flag, a file or stdin.

    Raises:
        UsageError: there is none.
    """
    if args.prompt is not None:
        text = args.prompt
    elif args.prompt_file is not None:
        text = common.read_text(args.prompt_file, "--prompt-file")
    elif not common.stdin_is_terminal():
        text = common.read_text("-", "stdin")
    else:
        raise common.UsageError("no prompt: give --prompt TEXT or --prompt-file FILE")
    if not text and not args.raw:
        raise common.UsageError(
            "the prompt is empty: give some text, or --raw to start from nothing"
        )
    return str(text)


def _given_ids(args: argparse.Namespace, model: running.Opened) -> PromptIds:
    from ds4jax.answer import PromptIds

    where = f"--ids {args.ids}"
    if args.raw or args.system is not None:
        raise common.UsageError("--ids is the whole prompt: leave out --raw and --system")
    value = common.read_json(args.ids, "--ids")
    ids = common.token_ids(value.get("ids") if isinstance(value, dict) else value, where)
    if not ids:
        raise common.Failure(f"{where}: holds no ids, a prompt needs one at least")
    running.check_ids(ids, model.file.model_config.vocab_size, where)
    opens = model.tokenizer is not None and ids[-1] == model.tokenizer.markers.think_open
    return PromptIds(ids=tuple(ids), start="reasoning" if opens else "content")


def _chat_file(args: argparse.Namespace, model: running.Opened) -> PromptIds:
    """A request in JSON; flags add to it or take the place of its fields."""
    import dataclasses

    from ds4jax import chat
    from ds4jax.answer import chat_prompt
    from ds4jax.chat_json import chat_request_from_json
    from ds4jax.chat_request import ChatError, ChatUnsupportedError, Message, unsupported_features
    from ds4jax.tokenizer import TokenizerError

    try:
        request = chat_request_from_json(common.read_json(args.chat, "--chat"))
        if args.system is not None:
            messages = (Message(role="system", content=args.system), *request.messages)
            request = dataclasses.replace(request, messages=messages)
        if args.effort is not None:
            request = dataclasses.replace(request, effort=args.effort, thinking=None)
        if features := unsupported_features(request):
            raise common.Failure(
                f"--chat {args.chat}: {', '.join(features)}: decoding is not constrained yet, and a"
                " prompt alone is no promise; leave it out"
            )
        rendered = chat.render(request, running.chat_profile(args, model))
        return chat_prompt(rendered, model.need_tokenizer())
    except (ChatError, ChatUnsupportedError, TokenizerError) as error:
        raise common.Failure(f"--chat {args.chat}: {error}") from None


# -- output ----------------------------------------------------------------------------------------


class Dim:
    """Reasoning on stderr, dim where that is a terminal, apart from the answer."""

    def __init__(self) -> None:
        self._color = common.is_terminal(sys.stderr)
        self._open = False

    def write(self, text: str) -> None:
        """More reasoning."""
        if not self._open and self._color:
            sys.stderr.write("\x1b[2m")
        self._open = True
        sys.stderr.write(text)
        sys.stderr.flush()

    def close(self) -> None:
        """The reasoning is over, for now."""
        if self._open:
            sys.stderr.write("\x1b[0m\n" if self._color else "\n")
            sys.stderr.flush()
            self._open = False


class Printer:
    """Shows one candidate as it comes, several one after the other at the end."""

    def __init__(
        self, args: argparse.Namespace, tokenizer: Tokenizer | None, *, has_text: bool = False
    ) -> None:
        self._quiet = args.json
        self._table = args.dump_tokens or args.logprobs is not None
        self._table = self._table or (tokenizer is None and not has_text)
        self._many = args.candidates > 1
        self._tokenizer = tokenizer
        self._dim = Dim()
        self._ends_line = True
        self._index = 0

    def show(self, output: Output) -> None:
        if self._quiet or self._many:
            return
        for token in output.tokens if self._table else ():
            self._row(token)
        for event in () if self._table else output.events:
            self._event(event)

    def end(self, generation: Generation) -> None:
        self._dim.close()
        if not self._quiet and not self._ends_line:
            running.write_out("\n")
        if self._quiet or not self._many:
            return
        for candidate, result in sorted(generation.results.items()):
            running.write_out(f"--- candidate {candidate}\n")
            self._index = 0
            for token in result.tokens if self._table else ():
                self._row(token)
            if not self._table and result.parsed is not None:
                running.write_out(result.parsed.content + "\n")

    def _event(self, event: Event) -> None:
        from ds4jax import parser

        if isinstance(event, parser.Reasoning):
            self._dim.write(event.text)
            return
        self._dim.close()
        if isinstance(event, parser.Content):
            text = event.text
        elif isinstance(event, parser.CallStart):
            text = f"{'' if self._ends_line else chr(10)}--- call {event.name}\n"
        elif isinstance(event, parser.CallArguments):
            text = event.text
        else:
            text = "\n"
        running.write_out(text)
        self._ends_line = text.endswith("\n") if text else self._ends_line

    def _row(self, token: TokenResult) -> None:
        cells = [f"{self._index:>6}", f"{token.token:>7}"]
        self._index += 1
        if token.logprob is not None:
            cells.append(f"{token.logprob:9.4f}")
        if self._tokenizer is not None:
            cells.append(_piece(self._tokenizer, token.token))
        for other, logprob in token.top:
            name = _piece(self._tokenizer, other) if self._tokenizer is not None else str(other)
            cells.append(f"{name} {logprob:.4f}")
        running.write_out("  ".join(cells) + "\n")


def _piece(tokenizer: Tokenizer, token: int) -> str:
    data = tokenizer.bytes_of(token)
    try:
        return repr(data.decode())
    except UnicodeDecodeError:
        return repr(data)


def summary(generation: Generation, local: LocalModel, prompt: int) -> str:
    """One line of figures about a finished request."""
    t = generation.timings
    count = sum(len(r.tokens) for r in generation.results.values())
    reasons = ", ".join(r.finish_reason for _, r in sorted(generation.results.items()))
    rate = t.tokens_per_second
    speed = f" ({rate:.1f} tokens/s)" if rate is not None else ""
    pace = f", {prompt / t.prefill:.1f} tokens/s" if t.prefill > 0 else ""
    return (
        f"[{reasons}] prompt {prompt} tokens in {t.prefill:.2f} s{pace}; output {count} tokens in"
        f" {t.total - t.prefill:.2f} s{speed}; load {local.loaded.seconds:.1f} s, compile"
        f" {local.compile_seconds:.1f} s; seed {generation.seed}"
    )


def _as_json(
    generation: Generation,
    local: LocalModel,
    settings: dict[str, Any],
    prompt: int,
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    t, results = generation.timings, [r for _, r in sorted(generation.results.items())]
    first = candidate_json(results[0], tokenizer)
    out = {
        **first,
        "seed": generation.seed,
        "usage": {
            "prompt_tokens": prompt,
            "cached_tokens": 0,
            "output_tokens": sum(len(r.tokens) for r in results),
            "reasoning_tokens": sum(r.reasoning_tokens for r in results),
        },
        "timings": {
            "load_seconds": local.loaded.seconds,
            "compile_seconds": local.compile_seconds,
            "first_token_seconds": t.prefill,
            "decode_seconds": t.decode,
            "total_seconds": t.total,
            "prefill_tokens_per_second": prompt / t.prefill if t.prefill > 0 else None,
            "decode_tokens_per_second": t.tokens_per_second,
        },
        "speculation": {
            "proposed": sum(r.proposed for r in results),
            "verified": sum(r.verified for r in results),
            "accepted": sum(r.accepted for r in results),
        },
        "settings": settings,
    }
    if len(results) > 1:
        out["candidates"] = [candidate_json(r, tokenizer) for r in results]
    return out


def candidate_json(result: Result, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """One answer, JSON-ready."""
    from ds4jax.chat_request import strict_json

    parsed = result.parsed
    out: dict[str, Any] = {
        "text": parsed.content if parsed is not None else None,
        "reasoning": parsed.reasoning if parsed is not None else None,
        "ids": list(result.ids),
        "finish_reason": result.finish_reason,
        "stop_string": result.stop_string,
        "stop_token": result.stop_token,
        "tool_calls": [],
        "truncated_call": None,
    }
    if parsed is not None:
        out["tool_calls"] = [
            {"id": c.id, "name": c.name, "arguments": strict_json(c.arguments)}
            for c in parsed.tool_calls
        ]
        cut = parsed.truncated_call
        out["truncated_call"] = None if cut is None else {"name": cut.name}
    if any(t.logprob is not None for t in result.tokens):
        out["logprobs"] = [
            {
                "id": t.token,
                "piece": tokenizer.decode([t.token]) if tokenizer is not None else None,
                "logprob": t.logprob,
                "top": [[i, x] for i, x in t.top],
            }
            for t in result.tokens
        ]
    return out
