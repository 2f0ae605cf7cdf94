"""Requests and events of the service as plain typed values, and their wire forms.

What `ds4jax.client` sends and gives. Messages and tools have the OpenAI shape. The generated code
is imported inside the functions that need it, so that these types cost nothing without grpcio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ds4jax.config import SamplingParams, StoppingCriteria
from ds4jax.request import ServiceError

FinishName = Literal["stop", "length", "tool_calls", "time_limit"]
Effort = Literal["low", "high", "max", "none"]


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
