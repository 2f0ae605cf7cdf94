"""Typed client of the service, sync and async: streams, a collecting helper, retries, deadlines.

    with Client("127.0.0.1:50051") as client:
        print(client.generate(messages=[{"role": "user", "content": "Hello"}]).text)

Messages and tools have the OpenAI shape. Calls that end with UNAVAILABLE before their first event
are tried again; one that has begun never is. Needs the extra `server` (grpcio); nothing of JAX.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ds4jax.config import SamplingParams, StoppingCriteria
from ds4jax.request import ServiceError

FinishName = Literal["stop", "length", "tool_calls", "time_limit"]
Effort = Literal["low", "high", "max", "none"]

_CHANNEL_OPTIONS = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


class RequestFailed(ServiceError):
    """A call that ended with a status. `violations`: (field, what is wrong) of bad requests."""

    def __init__(self, *args: Any, violations: tuple[tuple[str, str], ...] = (), **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.violations = violations


@dataclass(frozen=True, kw_only=True)
class Started:
    """The request has a lane. Times in seconds."""

    request_id: str
    model: str
    chat_profile: str
    numerics: str
    prompt_tokens: int
    cached_tokens: int
    seed: int
    max_output_tokens: int
    queue_time: float


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A sign of life: `state` is queued, prefill or decode."""

    state: str
    queue_position: int
    tokens_done: int
    tokens_total: int


@dataclass(frozen=True, kw_only=True)
class CallPiece:
    """A piece of a tool call: its name (at the start), some arguments, or its end."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    end: bool = False


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Natural logarithms; `top` as (id, logprob)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Delta:
    """A piece of one candidate's answer."""

    candidate: int = 0
    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[CallPiece, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A complete call; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Token counts."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    draft_proposed_tokens: int = 0
    draft_accepted_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Timings:
    """The server's, in seconds; None where it does not apply."""

    queue: float
    total: float
    prefill: float | None = None
    first_token: float | None = None


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The end of one candidate."""

    candidate: int
    finish_reason: FinishName
    usage: Usage
    timings: Timings
    tool_calls: tuple[ToolCall, ...] = ()
    truncated_call: str | None = None
    stop_string: str | None = None
    stop_token_id: int | None = None


Event = Started | Progress | Delta | Finished


@dataclass(frozen=True, kw_only=True)
class Result:
    """One whole answer."""

    started: Started
    finished: Finished
    text: str
    reasoning: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def finish_reason(self) -> FinishName:
        """Why it ended."""
        return self.finished.finish_reason

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The complete calls."""
        return self.finished.tool_calls

    @property
    def seed(self) -> int:
        """The seed that makes it again."""
        return self.started.seed


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to generate and how. Exactly one of `prompt`, `tokens` and `messages`.

    Raises:
        ValueError: none, or more than one, of the three.
    """

    prompt: str | None = None
    tokens: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] = ()  # OpenAI tools, or their `function` objects
    tool_choice: Literal["auto", "none", "required"] = "auto"
    effort: Effort | None = None  # of the reasoning; "none": no thinking
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stopping: StoppingCriteria = field(default_factory=StoppingCriteria)
    candidates: int = 1
    model: str = ""
    request_id: str = ""
    token_ids: bool = False
    reasoning: Literal["separate", "omit", "inline"] = "separate"
    include_stop_string: bool = False
    echo: bool = False
    speculate: bool = True
    min_delta_interval: float = 0.0  # seconds
    progress_interval: float | None = None  # seconds

    def __post_init__(self) -> None:
        given = sum(x is not None for x in (self.prompt, self.tokens, self.messages))
        if given != 1:
            raise ValueError(f"{given} of prompt, tokens and messages are given, must be one")


# ---- to the wire -------------------------------------------------------------------------------


def build_request(o: Options) -> Any:
    """The wire message of `o`.

    Raises:
        ValueError: a message or tool that has no place on the wire.
    """
    from ds4jax_server.pb import generation_pb2 as pb

    request = pb.GenerateRequest(model=o.model, request_id=o.request_id)
    if o.prompt is not None:
        request.text = o.prompt
    elif o.tokens is not None:
        request.tokens.ids.extend(o.tokens)
        request.tokens.SetInParent()
    else:
        request.chat.CopyFrom(build_chat(o))
    if o.candidates != 1:
        request.candidate_count = o.candidates
    if not o.speculate:
        request.speculation = pb.SPECULATION_OFF
    _put_sampling(request.sampling, o.sampling)
    _put_stopping(request.stopping, o.stopping)
    out = request.output
    out.token_ids, out.echo = o.token_ids, o.echo
    out.include_stop_string = o.include_stop_string
    out.reasoning = getattr(pb.OutputOptions, f"REASONING_{o.reasoning.upper()}")
    if o.sampling.top_logprobs is not None:
        out.top_logprobs = o.sampling.top_logprobs
    out.logprobs_after_sampling = o.sampling.logprobs_after_sampling
    if o.min_delta_interval:
        out.min_delta_interval.FromNanoseconds(round(o.min_delta_interval * 1e9))
    if o.progress_interval is not None:
        out.progress_interval.FromNanoseconds(round(o.progress_interval * 1e9))
    return request


def _put_sampling(wire: Any, p: SamplingParams) -> None:
    for name in (
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty",
        "presence_penalty", "penalty_window", "seed",
    ):  # fmt: skip
        value = getattr(p, name)
        if value is not None:
            setattr(wire, name, value)
    for token, bias in p.logit_bias:
        wire.logit_bias[token] = bias


def _put_stopping(wire: Any, s: StoppingCriteria) -> None:
    for name in ("max_output_tokens", "max_reasoning_tokens"):
        value = getattr(s, name)
        if value is not None:
            setattr(wire, name, value)
    if s.min_output_tokens:
        wire.min_output_tokens = s.min_output_tokens
    wire.stop_strings.extend(s.stop_strings)
    wire.stop_token_ids.extend(s.stop_token_ids)
    wire.ignore_eos = s.ignore_eos
    if s.time_limit is not None:
        wire.time_limit.FromNanoseconds(round(s.time_limit * 1e9))


def build_chat(o: Options) -> Any:
    """The chat of `o` as a wire message."""
    from ds4jax_server.pb import generation_pb2 as pb

    chat = pb.ChatInput()
    for i, message in enumerate(o.messages or ()):
        chat.messages.append(_message(message, f"messages[{i}]"))
    for i, tool in enumerate(o.tools):
        chat.tools.append(_tool(tool, f"tools[{i}]"))
    if o.tool_choice != "auto":
        chat.tool_choice.mode = getattr(pb.ToolChoice, f"MODE_{o.tool_choice.upper()}")
    if o.effort == "none":
        chat.thinking.mode = pb.Thinking.MODE_OFF
    elif o.effort is not None:
        chat.thinking.effort = getattr(pb.Thinking, f"EFFORT_{o.effort.upper()}")
    return chat


_MESSAGE_FIELDS = frozenset(
    ("role", "content", "reasoning_content", "reasoning", "tool_calls", "tool_call_id", "prefix",
     "task")
)  # fmt: skip


def _message(m: Mapping[str, Any], path: str) -> Any:
    from ds4jax_server.pb import generation_pb2 as pb

    unknown = sorted(set(m) - _MESSAGE_FIELDS)
    if unknown:
        raise ValueError(f"{path} has the unknown field {unknown[0]!r}")
    role = str(m.get("role", ""))
    if f"ROLE_{role.upper()}" not in pb.Message.Role.keys():  # noqa: SIM118 (not a dict)
        raise ValueError(f"{path}.role is {role!r}")
    out = pb.Message(
        role=f"ROLE_{role.upper()}",
        reasoning=m.get("reasoning_content") or m.get("reasoning") or "",
        tool_call_id=m.get("tool_call_id") or "",
        prefix=bool(m.get("prefix")),
    )
    content = m.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or ()
    for j, part in enumerate(parts):
        if part.get("type") != "text":
            raise ValueError(f"{path}.content[{j}] is of type {part.get('type')!r}, must be text")
        out.parts.add(text=part["text"])
    for call in m.get("tool_calls") or ():
        function = call["function"]
        out.tool_calls.add(
            id=call.get("id") or "", name=function["name"], arguments_json=function["arguments"]
        )
    if m.get("task"):
        out.MergeFrom(pb.Message(task=f"TASK_{str(m['task']).upper()}"))
    return out


def _tool(tool: Mapping[str, Any], path: str) -> Any:
    from ds4jax_server.pb import generation_pb2 as pb

    from ds4jax.chat_request import dump_json

    function = tool.get("function", tool)
    extra = sorted(set(function) - {"name", "description", "parameters"})
    if extra:
        raise ValueError(f"{path} has the field {extra[0]!r}, which has no place on the wire")
    parameters = function.get("parameters")
    return pb.Tool(
        name=function["name"],
        description=function.get("description") or "",
        parameters_json="" if parameters is None else dump_json(dict(parameters)),
    )


# ---- from the wire -----------------------------------------------------------------------------


def read_event(message: Any) -> Event:
    """A response as a typed event."""
    from ds4jax_server.pb import generation_pb2 as pb

    kind = message.WhichOneof("event")
    wire = getattr(message, kind)
    if kind == "delta":
        return _delta(wire)
    if kind == "progress":
        state = pb.Progress.State.Name(wire.state).removeprefix("STATE_").lower()
        return Progress(
            state=state, queue_position=wire.queue_position, tokens_done=wire.tokens_done,
            tokens_total=wire.tokens_total,
        )  # fmt: skip
    if kind == "started":
        return Started(
            request_id=wire.request_id, model=wire.model, chat_profile=wire.chat_profile,
            numerics=wire.numerics, prompt_tokens=wire.prompt_tokens,
            cached_tokens=wire.cached_tokens, seed=wire.seed,
            max_output_tokens=wire.max_output_tokens, queue_time=_seconds(wire.queue_time),
        )  # fmt: skip
    return _finished(wire, pb)


def _delta(wire: Any) -> Delta:
    return Delta(
        candidate=wire.candidate,
        reasoning=wire.reasoning,
        content=wire.content,
        tool_calls=tuple(
            CallPiece(
                index=p.index, id=p.start.id, name=p.start.name, arguments=p.arguments,
                end=p.HasField("end"),
            )
            for p in wire.tool_calls
        ),
        token_ids=tuple(wire.token_ids),
        logprobs=tuple(
            TokenLogprob(
                token=r.token_id, logprob=r.logprob,
                top=tuple((t.token_id, t.logprob) for t in r.top),
            )
            for r in wire.logprobs
        ),
    )  # fmt: skip


def _finished(wire: Any, pb: Any) -> Finished:
    u, t = wire.usage, wire.timings
    stop = wire.WhichOneof("matched_stop")
    return Finished(
        candidate=wire.candidate,
        finish_reason=pb.FinishReason.Name(wire.finish_reason)
        .removeprefix("FINISH_REASON_")
        .lower(),
        usage=Usage(**{f.name: getattr(u, f.name) for f in u.DESCRIPTOR.fields}),
        timings=Timings(
            queue=_seconds(t.queue), total=_seconds(t.total),
            prefill=_seconds(t.prefill) if t.HasField("prefill") else None,
            first_token=_seconds(t.first_token) if t.HasField("first_token") else None,
        ),
        tool_calls=tuple(
            ToolCall(id=c.id, name=c.name, arguments=c.arguments_json) for c in wire.tool_calls
        ),
        truncated_call=wire.truncated_call if wire.HasField("truncated_call") else None,
        stop_string=wire.stop_string if stop == "stop_string" else None,
        stop_token_id=wire.stop_token_id if stop == "stop_token_id" else None,
    )  # fmt: skip


def _seconds(duration: Any) -> float:
    return float(duration.ToNanoseconds() / 1e9)


def read_error(error: Any) -> RequestFailed:
    """A gRPC error with its typed details."""
    from google.rpc import error_details_pb2
    from grpc_status import rpc_status

    reason, metadata, retry = "", {}, None
    violations: list[tuple[str, str]] = []
    try:
        status = rpc_status.from_call(_CallView(error))
    except ValueError:  # a status that contradicts the call: keep what the call says
        status = None
    for detail in status.details if status is not None else ():
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        again = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(bad):
            violations = [(v.field, v.description) for v in bad.field_violations]
        elif detail.Unpack(again):
            retry = again.retry_delay.ToNanoseconds() / 1e9
    return RequestFailed(
        error.code().name, reason, error.details() or "no details", metadata=metadata,
        retry_after=retry, violations=tuple(violations),
    )  # fmt: skip


class _CallView:
    """An error of either API in the form that grpc_status reads."""

    def __init__(self, error: Any) -> None:
        self._error = error

    def code(self) -> Any:
        return self._error.code()

    def details(self) -> Any:
        return self._error.details()

    def trailing_metadata(self) -> Any:
        return tuple(self._error.trailing_metadata() or ())


class Collector:
    """Adds up the events of a call."""

    def __init__(self) -> None:
        self.started: Started | None = None
        self._pieces: dict[int, list[Delta]] = {}
        self._finished: dict[int, Finished] = {}

    def add(self, event: Event) -> None:
        """Take one more event."""
        if isinstance(event, Started):
            self.started = event
        elif isinstance(event, Delta):
            self._pieces.setdefault(event.candidate, []).append(event)
        elif isinstance(event, Finished):
            self._finished[event.candidate] = event

    def results(self) -> list[Result]:
        """One result per candidate.

        Raises:
            RequestFailed: the stream ended without its last events.
        """
        if self.started is None or not self._finished:
            raise RequestFailed("INTERNAL", "STREAM_INCOMPLETE", "the stream ended too early")
        return [self._result(c, end) for c, end in sorted(self._finished.items())]

    def _result(self, candidate: int, end: Finished) -> Result:
        assert self.started is not None
        pieces = self._pieces.get(candidate, [])
        return Result(
            started=self.started,
            finished=end,
            text="".join(p.content for p in pieces),
            reasoning="".join(p.reasoning for p in pieces),
            token_ids=tuple(t for p in pieces for t in p.token_ids),
            logprobs=tuple(r for p in pieces for r in p.logprobs),
        )


# ---- connections -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Connection:
    """How to reach a server. Files are PEM; times in seconds.

    `ca` (or `tls`) encrypts; `cert` and `key` identify the client (mutual TLS).
    """

    address: str  # host:port or unix:path
    token: str | None = None
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    server_name: str | None = None  # expected name, if the address is not it
    timeout: float | None = None  # of every call, tries included; None: no limit
    retries: int = 3  # after UNAVAILABLE

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    @property
    def options(self) -> list[tuple[str, Any]]:
        """Options of the channel."""
        name = [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []
        return [*_CHANNEL_OPTIONS, *name]

    def channel(self, library: Any) -> Any:
        """A channel made by `grpc` or `grpc.aio`."""
        import grpc

        if not (self.tls or self.ca or self.cert):
            return library.insecure_channel(self.address, options=self.options)
        read = [Path(p).read_bytes() if p else None for p in (self.ca, self.key, self.cert)]
        credentials = grpc.ssl_channel_credentials(*read)
        return library.secure_channel(self.address, credentials, options=self.options)


class _Attempts:
    """Counts tries and says how long to wait before the next."""

    def __init__(self, connection: Connection, timeout: float | None) -> None:
        timeout = connection.timeout if timeout is None else timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._left = connection.retries
        self._pause = 0.1

    def timeout(self) -> float | None:
        """Seconds left for the call."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def pause(self, error: RequestFailed) -> float:
        """Seconds to wait before another try.

        Raises:
            RequestFailed: `error` itself, if there is to be none.
        """
        wait = error.retry_after or self._pause * random.uniform(0.75, 1.25)
        left = self.timeout()
        if error.code != "UNAVAILABLE" or not self._left or (left is not None and wait >= left):
            raise error
        self._left -= 1
        self._pause = min(5.0, 2 * self._pause)
        return wait


def _options(options: Options | None, fields: Mapping[str, Any]) -> Options:
    if options is not None and fields:
        raise ValueError("give an Options value or fields, not both")
    return Options(**fields) if options is None else options


class Client:
    """Blocking client. One channel; safe to use from several threads.

    Args:
        address: "host:port" or "unix:path", or a `Connection`.
        fields: those of `Connection`, if `address` is text.
    """

    def __init__(self, address: str | Connection, **fields: Any) -> None:
        import grpc
        from ds4jax_server.pb import generation_pb2_grpc

        made = address if isinstance(address, Connection) else None
        self.connection = made or Connection(address=str(address), **fields)
        self._grpc = grpc
        self._channel = self.connection.channel(grpc)
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._models = generation_pb2_grpc.ModelServiceStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel; calls in progress end."""
        self._channel.close()

    def stream(
        self, options: Options | None = None, *, timeout: float | None = None, **fields: Any
    ) -> Iterator[Event]:
        """Events of one call (`fields`: those of `Options`). Closing the iterator cancels the call.

        Raises:
            RequestFailed: the call ended with a status.
        """
        request = build_request(_options(options, fields))
        attempts = _Attempts(self.connection, timeout)
        while True:
            call = self._generation.Generate(
                request, timeout=attempts.timeout(), metadata=self.connection.metadata
            )
            begun = False
            try:
                for message in call:
                    begun = True
                    yield read_event(message)
                return
            except self._grpc.RpcError as error:
                failed = read_error(error)
                if begun:
                    raise failed from None
                time.sleep(attempts.pause(failed))
            finally:
                call.cancel()

    def generate(self, options: Options | None = None, **fields: Any) -> Result:
        """One whole answer; see `stream`."""
        return self.generate_all(options, **fields)[0]

    def generate_all(
        self, options: Options | None = None, *, timeout: float | None = None, **fields: Any
    ) -> list[Result]:
        """All candidates, whole; see `stream`."""
        collector = Collector()
        for event in self.stream(options, timeout=timeout, **fields):
            collector.add(event)
        return collector.results()

    def _unary(self, method: Any, request: Any, timeout: float | None = None) -> Any:
        attempts = _Attempts(self.connection, timeout)
        while True:
            try:
                return method(
                    request, timeout=attempts.timeout(), metadata=self.connection.metadata
                )
            except self._grpc.RpcError as error:
                time.sleep(attempts.pause(read_error(error)))

    def model(self) -> Any:
        """The served model, as the wire message `ds4jax.v1.Model`."""
        from ds4jax_server.pb import generation_pb2 as pb

        return self._unary(self._models.ListModels, pb.ListModelsRequest()).models[0]

    def count_tokens(self, options: Options | None = None, **fields: Any) -> int:
        """Prompt tokens of an input."""
        request = _count_request(_options(options, fields))
        return int(self._unary(self._generation.CountTokens, request).prompt_tokens)

    def tokenize(self, text: str, *, markers: bool = False) -> list[int]:
        """Ids of a text, begin-of-sentence first; `markers`: spelled markers are markers."""
        from ds4jax_server.pb import generation_pb2 as pb

        request = pb.TokenizeRequest(text=text, parse_markers=markers)
        return list(self._unary(self._generation.Tokenize, request).ids)

    def detokenize(self, ids: Iterable[int]) -> str:
        """Text of ids."""
        from ds4jax_server.pb import generation_pb2 as pb

        request = pb.DetokenizeRequest(ids=list(ids))
        return str(self._unary(self._generation.Detokenize, request).text)

    def healthy(self, service: str = "") -> bool:
        """Whether the server says SERVING; False also if it cannot be reached."""
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        request = health_pb2.HealthCheckRequest(service=service)
        try:
            reply = health_pb2_grpc.HealthStub(self._channel).Check(request, timeout=5.0)
        except self._grpc.RpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def _count_request(o: Options) -> Any:
    from ds4jax_server.pb import generation_pb2 as pb

    full = build_request(o)
    request = pb.CountTokensRequest(model=full.model)
    kind = full.WhichOneof("input")
    if kind == "text":
        request.text = full.text
    else:
        getattr(request, kind).CopyFrom(getattr(full, kind))
    return request


class AsyncClient:
    """The same for asyncio. Made and used in one event loop."""

    def __init__(self, address: str | Connection, **fields: Any) -> None:
        import grpc
        from ds4jax_server.pb import generation_pb2_grpc

        made = address if isinstance(address, Connection) else None
        self.connection = made or Connection(address=str(address), **fields)
        self._grpc = grpc
        self._channel = self.connection.channel(grpc.aio)
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._models = generation_pb2_grpc.ModelServiceStub(self._channel)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel; calls in progress end."""
        await self._channel.close()

    async def stream(
        self, options: Options | None = None, *, timeout: float | None = None, **fields: Any
    ) -> AsyncIterator[Event]:
        """See `Client.stream`."""
        request = build_request(_options(options, fields))
        attempts = _Attempts(self.connection, timeout)
        while True:
            call = self._generation.Generate(
                request, timeout=attempts.timeout(), metadata=self.connection.metadata
            )
            begun = False
            try:
                async for message in call:
                    begun = True
                    yield read_event(message)
                return
            except self._grpc.RpcError as error:
                failed = read_error(error)
                if begun:
                    raise failed from None
                await asyncio.sleep(attempts.pause(failed))
            finally:
                call.cancel()

    async def generate(self, options: Options | None = None, **fields: Any) -> Result:
        """See `Client.generate`."""
        return (await self.generate_all(options, **fields))[0]

    async def generate_all(
        self, options: Options | None = None, *, timeout: float | None = None, **fields: Any
    ) -> list[Result]:
        """See `Client.generate_all`."""
        collector = Collector()
        async for event in self.stream(options, timeout=timeout, **fields):
            collector.add(event)
        return collector.results()

    async def _unary(self, method: Any, request: Any, timeout: float | None = None) -> Any:
        attempts = _Attempts(self.connection, timeout)
        while True:
            try:
                return await method(
                    request, timeout=attempts.timeout(), metadata=self.connection.metadata
                )
            except self._grpc.RpcError as error:
                await asyncio.sleep(attempts.pause(read_error(error)))

    async def model(self) -> Any:
        """See `Client.model`."""
        from ds4jax_server.pb import generation_pb2 as pb

        return (await self._unary(self._models.ListModels, pb.ListModelsRequest())).models[0]

    async def count_tokens(self, options: Options | None = None, **fields: Any) -> int:
        """See `Client.count_tokens`."""
        request = _count_request(_options(options, fields))
        return int((await self._unary(self._generation.CountTokens, request)).prompt_tokens)
