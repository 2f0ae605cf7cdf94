"""`--server ADDR` of the commands generate and chat: the model runs behind a gRPC port.

Flags, prompts and printing are those of the local commands; only where the answer comes from
differs. Files are not opened and JAX is not imported.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ds4jax.commands import chat, common, generate, interrupts, running

if TYPE_CHECKING:
    from ds4jax.chat_request import Message
    from ds4jax.client import Connection, Options
    from ds4jax.config import SamplingParams, StoppingCriteria
    from ds4jax.remote import RemoteGeneration, RemoteModel
    from ds4jax.request import ServiceError

_CHAT_FIELDS = frozenset(("messages", "tools", "tool_choice", "reasoning_effort"))


def connection(args: argparse.Namespace) -> Connection:
    """How the flags say to reach the server.

    Raises:
        Failure: the packages for it are missing, or a file cannot be read.
    """
    common.silence_grpc(args)
    try:
        import ds4jax_server.pb.generation_pb2_grpc  # noqa: F401

        from ds4jax.client import Connection
    except ImportError as error:
        raise common.Failure(
            f"--server needs the extra packages of 'ds4jax[server]' ({error.name} is missing):"
            " pip install 'ds4jax[server]'"
        ) from None
    if args.server_ca is not None:
        _check_ca(args.server_ca)
    return Connection(address=args.server, token=common.server_token(args), ca=args.server_ca)


def _check_ca(name: str) -> None:
    """The library below takes anything, and then no server is the right one."""
    import ssl

    text = common.read_text(name, "--server-ca")
    try:
        ssl.create_default_context(cadata=text)
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise common.Failure(
            f"--server-ca {name}: holds no certificates in PEM form ({reason}): give the file of"
            " the authority that signed the server's"
        ) from None


def _told(args: argparse.Namespace, error: ServiceError) -> str:
    """What a server refused, in words of the flags."""
    found: list[str] = []
    for path, text in getattr(error, "violations", ()):
        group, _, rest = path.partition(".")
        if group == "chat":
            place = f"--chat: {rest}" if getattr(args, "chat", None) else "the prompt"
        elif path == "text":
            place = "the prompt"
        elif group == "tokens":
            place = "--ids: entry " + rest.strip("ids[]") if "[" in rest else "--ids"
        else:
            place = running.in_flags(path).replace("[", ": entry ").rstrip("]")
        text = running.in_flags(text)
        found.append(text if text.startswith(place) else f"{place} {text}")
    told = "; ".join(found[:20]) or running.in_flags(error.message)
    if error.code == "UNAUTHENTICATED":
        told += "; the flag is --server-token-file"
    elif error.code == "UNAVAILABLE" and not error.reason and args.server_ca is None:
        told += " (a server with TLS needs --server-ca)"
    return f"{error.code}: {told}"


def _open(args: argparse.Namespace) -> RemoteModel:
    from ds4jax.remote import RemoteModel

    return RemoteModel(connection(args))


# -- generate --------------------------------------------------------------------------------------


def run_generate(args: argparse.Namespace) -> int:
    """One prompt, one answer (or several), from a server."""
    from ds4jax.request import ServiceError

    sampling, stopping = running.sampling_of(args), running.stopping_of(args)
    model = _open(args)
    try:
        options = _options(args, model, sampling, stopping)
        generation: Any = model.generate(options)  # read like a local one
        printer = generate.Printer(args, None, has_text=True)
        with interrupts.interruptible(generation) as was_interrupted:
            for output in generation:
                printer.show(output)
        printer.end(generation)
    except ServiceError as error:
        raise common.Failure(f"{args.server}: {_told(args, error)}") from None
    except ValueError as error:  # text that has no UTF-8 form, values that no field holds
        raise common.Failure(f"the request cannot be sent: {error}") from None
    finally:
        model.close()
    if was_interrupted():
        raise KeyboardInterrupt
    if args.json:
        common.print_json(_as_json(generation, args.server))
    else:
        common.note(args, summary(generation))
    return 0


def _options(
    args: argparse.Namespace,
    model: RemoteModel,
    sampling: SamplingParams,
    stopping: StoppingCriteria,
) -> Options:
    from ds4jax.client import Options

    generate.check_prompt_flags(args)
    fields: dict[str, Any] = {
        "sampling": sampling, "stopping": stopping, "candidates": args.candidates,
        "effort": args.effort,
    }  # fmt: skip
    if args.ids is not None:
        where = f"--ids {args.ids}"
        value = common.read_json(args.ids, "--ids")
        ids = common.token_ids(value.get("ids") if isinstance(value, dict) else value, where)
        fields |= {"tokens": ids, "effort": None}
    elif args.chat is not None:
        fields |= _chat_file(args)
    else:
        text = generate.prompt_text(args)
        if args.raw and args.markers:
            fields |= {"tokens": model.client.tokenize(text, markers=True), "effort": None}
        elif args.raw:
            fields |= {"prompt": text, "effort": None}
        else:
            fields["messages"] = [{"role": "user", "content": text}]
    if args.system is not None and "messages" in fields:
        fields["messages"] = [{"role": "system", "content": args.system}, *fields["messages"]]
    try:
        return Options(**fields)
    except ValueError as error:
        raise common.Failure(f"the prompt: {error}") from None


def _chat_file(args: argparse.Namespace) -> dict[str, Any]:
    where = f"--chat {args.chat}"
    value = common.read_json(args.chat, "--chat")
    if not isinstance(value, dict) or not isinstance(value.get("messages"), list):
        raise common.Failure(f"{where}: must be a JSON object with messages")
    unknown = sorted(set(value) - _CHAT_FIELDS)
    if unknown:
        raise common.Failure(
            f"{where}: the field {unknown[0]!r} cannot be sent to a server; it takes"
            f" {', '.join(sorted(_CHAT_FIELDS))}"
        )
    out = {"messages": value["messages"], "tools": tuple(value.get("tools") or ())}
    if value.get("tool_choice") is not None:
        out["tool_choice"] = value["tool_choice"]
    if args.effort is None:
        out["effort"] = value.get("reasoning_effort")
    return out


def summary(generation: RemoteGeneration) -> str:
    """One line of figures about a finished call."""
    t, prompt = generation.timings, generation.prompt_tokens
    count = sum(len(r.tokens) for r in generation.results.values())
    reasons = ", ".join(r.finish_reason for _, r in sorted(generation.results.items()))
    rate = t.tokens_per_second
    speed = f" ({rate:.1f} tokens/s)" if rate is not None else ""
    return (
        f"[{reasons}] prompt {prompt} tokens, first token after {t.prefill:.2f} s; output {count}"
        f" tokens in {t.total - t.prefill:.2f} s{speed}; seed {generation.seed}"
    )


def _as_json(generation: RemoteGeneration, address: str) -> dict[str, Any]:
    t, results = generation.timings, [r for _, r in sorted(generation.results.items())]
    started = generation.started
    assert started is not None
    out = {
        **generate.candidate_json(results[0], None),
        "seed": generation.seed,
        "usage": {
            "prompt_tokens": generation.prompt_tokens,
            "cached_tokens": started.cached_tokens,
            "output_tokens": sum(len(r.tokens) for r in results),
            "reasoning_tokens": sum(r.reasoning_tokens for r in results),
        },
        "timings": {
            "first_token_seconds": t.prefill,
            "decode_seconds": t.decode,
            "total_seconds": t.total,
            "queue_seconds": started.queue_time,
            "decode_tokens_per_second": t.tokens_per_second,
        },
        "speculation": {
            "proposed": sum(r.proposed for r in results),
            "verified": sum(r.verified for r in results),
            "accepted": sum(r.accepted for r in results),
        },
        "settings": {
            "server": address,
            "model": started.model,
            "numerics": started.numerics,
            "chat_profile": started.chat_profile,
        },
    }
    if len(results) > 1:
        out["candidates"] = [generate.candidate_json(r, None) for r in results]
    return out


# -- chat ------------------------------------------------------------------------------------------


class RemoteSession(chat.Session):
    """A conversation whose answers come from a server; it renders and counts."""

    def __init__(
        self, args: argparse.Namespace, sampling: SamplingParams, stopping: StoppingCriteria
    ) -> None:
        from ds4jax.client import RequestFailed

        self.effort = args.effort or "high"
        self.messages: list[Message] = []
        self.local = None
        self._args = args
        self._sampling = sampling
        self._stopping = stopping
        self._remote = _open(args)
        try:
            self.ctx = int(self._remote.client.model().context_length)
        except RequestFailed as error:
            raise common.Failure(f"{args.server}: {_told(args, error)}") from None
        self.reset()

    @property
    def most(self) -> int:
        """Tokens that the server allows."""
        return self.ctx

    def start(self, ctx: int) -> None:
        """The context is the server's.

        Raises:
            Failure: always.
        """
        raise common.Failure(f"/ctx: the server's context is {self.ctx} tokens and cannot change")

    def ask(self, text: str) -> Any:
        """See `Session.ask`; that it fits is checked by the server."""
        from ds4jax.chat_request import Message
        from ds4jax.client import Options

        turn = [*self.messages, Message(role="user", content=text)]
        before, self.messages = self.messages, turn
        wire = self.as_json()
        self.messages = before
        options = Options(
            messages=wire, effort=self.effort, sampling=self._sampling, stopping=self._stopping
        )
        return _Turn(self, self._remote.generate(options), turn)

    def keep(self, generation: Any) -> None:
        """See `Session.keep`."""
        self.used = generation.prompt_tokens
        super().keep(generation)

    def summary(self, generation: Any, prompt: int) -> str:
        """See `Session.summary`."""
        return summary(generation)


class _Turn:
    """A generation that enters the conversation once the server has taken it."""

    def __init__(
        self, session: RemoteSession, generation: RemoteGeneration, turn: list[Message]
    ) -> None:
        self._session = session
        self._generation = generation
        self._turn = turn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generation, name)

    def __iter__(self) -> Any:
        from ds4jax.client import RequestFailed

        try:
            for output in self._generation:
                self._session.messages = self._turn
                yield output
        except RequestFailed as error:
            raise common.Failure(_told(self._session._args, error)) from None
        except ValueError as error:
            raise common.Failure(f"the message cannot be sent: {error}") from None
        self._session.messages = self._turn
