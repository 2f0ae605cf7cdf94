"""A model behind a server, in the shape of `ds4jax.local`: for commands with `--server ADDR`.

`RemoteModel.generate` gives an object that is iterated, cancelled and read like a local
`Generation`, so that printing and JSON need not know where the model runs. No JAX.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from ds4jax import client as client_lib
from ds4jax import parser
from ds4jax.answer import Result
from ds4jax.client import Client, Delta, Finished, Options, Started
from ds4jax.plan import TokenResult
from ds4jax.request import ServiceError
from ds4jax.tool_markup import TruncatedCall

CANCEL_SECONDS = 0.5
"""A call that is cancelled ends at its next event; the server sends one at least this often."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """What one event added to one candidate (as `local.Output`)."""

    candidate: int
    tokens: tuple[TokenResult, ...] = ()
    events: tuple[parser.Event, ...] = ()


@dataclass(kw_only=True)
class Timings:
    """Seconds as this side saw them (as `local.Timings`)."""

    prefill: float = 0.0
    decode: float = 0.0
    total: float = 0.0
    decode_tokens: int = 0

    @property
    def tokens_per_second(self) -> float | None:
        """Rate of decoding, first tokens left out; None if there was only one."""
        return self.decode_tokens / self.decode if self.decode > 0 else None


@dataclass
class _Candidate:
    tokens: list[TokenResult] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)  # index: id, name, pieces...
    complete: set[int] = field(default_factory=set)


class RemoteGeneration:
    """One call. Iterate for the output as it comes; afterwards read `results` and `timings`.

    Attributes:
        started: what the server said first, or None before it did.
        results: by candidate, each as soon as it has ended.
        timings: complete when the iteration has ended.
    """

    def __init__(self, client: Client, options: Options, timeout: float | None = None) -> None:
        self.started: Started | None = None
        self.results: dict[int, Result] = {}
        self.timings = Timings()
        self._client = client
        self._options = options
        self._timeout = timeout
        self._cancelled = False
        self._candidates: dict[int, _Candidate] = {}

    @property
    def seed(self) -> int:
        """In use, drawn by the server if none was given; 0 before the call has started."""
        return self.started.seed if self.started is not None else 0

    @property
    def prompt_tokens(self) -> int:
        """As the server counted them."""
        return self.started.prompt_tokens if self.started is not None else 0

    def cancel(self) -> None:
        """End it soon; the iteration then raises ServiceError CANCELLED. For signal handlers."""
        self._cancelled = True

    def partial(self, candidate: int = 0) -> Result:
        """What a candidate has said, where the call was cancelled before its end."""
        if candidate not in self.results:
            c = self._candidates.setdefault(candidate, _Candidate())
            self.results[candidate] = _result(c, None)
        return self.results[candidate]

    def __iter__(self) -> Iterator[Output]:
        """Run it.

        Raises:
            RequestFailed, ServiceError: it failed, or was cancelled.
        """
        began = time.monotonic()
        first = last = None
        stream = self._client.stream(self._options, timeout=self._timeout)
        try:
            for event in stream:
                if self._cancelled:
                    raise ServiceError("CANCELLED", "INTERRUPTED", "interrupted")
                if isinstance(event, Started):
                    self.started = event
                elif isinstance(event, Delta):
                    last = time.monotonic()
                    first = first or last
                    yield self._delta(event)
                elif isinstance(event, Finished):
                    c = self._candidates.setdefault(event.candidate, _Candidate())
                    self.results[event.candidate] = _result(c, event)
        finally:
            stream.close()  # type: ignore[attr-defined]
            now = time.monotonic()
            counts = [len(c.tokens) for c in self._candidates.values()]
            self.timings = Timings(
                prefill=(first or now) - began,
                decode=last - first if first and last else 0.0,
                total=now - began,
                decode_tokens=sum(max(0, n - 1) for n in counts),
            )

    def _delta(self, delta: Delta) -> Output:
        c = self._candidates.setdefault(delta.candidate, _Candidate())
        nothing: tuple[client_lib.TokenLogprob | None, ...] = (None,) * len(delta.token_ids)
        by_place = delta.logprobs or nothing
        tokens = tuple(
            TokenResult(t, row.logprob, row.top) if row is not None else TokenResult(t)
            for t, row in zip(delta.token_ids, by_place, strict=True)
        )
        c.tokens += tokens
        events: list[parser.Event] = []
        if delta.reasoning:
            c.reasoning.append(delta.reasoning)
            events.append(parser.Reasoning(delta.reasoning))
        if delta.content:
            c.content.append(delta.content)
            events.append(parser.Content(delta.content))
        for piece in delta.tool_calls:
            events.append(_call_event(c, piece))
        return Output(candidate=delta.candidate, tokens=tokens, events=tuple(events))


def _call_event(c: _Candidate, piece: client_lib.CallPiece) -> parser.Event:
    if piece.end:
        c.complete.add(piece.index)
        return parser.CallEnd(piece.index)
    if piece.name:
        c.calls[piece.index] = [piece.id, piece.name]
        return parser.CallStart(piece.index, piece.id, piece.name)
    c.calls[piece.index].append(piece.arguments)
    return parser.CallArguments(piece.index, piece.arguments)


def _result(c: _Candidate, end: Finished | None) -> Result:
    """The answer in the form of a local one; `end` None: it was cut off."""
    calls = [
        parser.ParsedCall(id=v[0], name=v[1], arguments="".join(v[2:]))
        for i, v in sorted(c.calls.items())
        if i in c.complete
    ]
    usage = end.usage if end is not None else client_lib.Usage()
    cut = end.truncated_call if end is not None else None
    parsed = parser.ParsedOutput(
        reasoning="".join(c.reasoning),
        content="".join(c.content),
        tool_calls=tuple(calls),
        truncated_call=None if cut is None else TruncatedCall(cut or None),
        matched_stop=end.stop_string if end is not None else None,
        anomalies={},
    )
    return Result(
        finish_reason=end.finish_reason if end is not None else "stop",
        tokens=tuple(c.tokens),
        parsed=parsed,
        stop_string=parsed.matched_stop,
        stop_token=end.stop_token_id if end is not None else None,
        reasoning_tokens=usage.reasoning_tokens,
        proposed=usage.draft_proposed_tokens,
        verified=usage.draft_proposed_tokens,
        accepted=usage.draft_accepted_tokens,
    )


class RemoteModel:
    """A served model. Token ids are always asked for, as the commands show and count them."""

    def __init__(self, connection: client_lib.Connection) -> None:
        self.client = Client(connection)

    def generate(self, options: Options, timeout: float | None = None) -> RemoteGeneration:
        """A call; nothing is sent before it is iterated."""
        interval = options.progress_interval or CANCEL_SECONDS
        options = dataclasses.replace(options, token_ids=True, progress_interval=interval)
        return RemoteGeneration(self.client, options, timeout)

    def close(self) -> None:
        """Close the connection."""
        self.client.close()
