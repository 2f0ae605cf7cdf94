"""From a wire request to lanes: every check, all violations at once, and the prompt.

What a field may hold is stated in the proto; the rules of chats are `ds4jax.chat_request`'s and
those of sampling and stopping `ds4jax.config`'s. Nothing is dropped or clamped: what cannot be
honoured is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any, Literal, cast

from google.protobuf import unknown_fields

from ds4jax import answer, chat, chat_request, config, refusals
from ds4jax.answer import PromptIds
from ds4jax.plan import ExecutorLimits, LaneSpec
from ds4jax.tokenizer import TokenizerError
from ds4jax_server.errors import InvalidRequest, Violation, unsupported
from ds4jax_server.pb import generation_pb2 as pb
from ds4jax_server.settings import MAX_CANDIDATES, ServedModel, ServerConfig

MAX_ID_CHARACTERS = 128
MAX_COUNTED = 4 << 20
"""Characters (or ids) of an input of CountTokens, Tokenize and Detokenize."""
MAX_SECONDS = 315_576_000_000
"""Of a google.protobuf.Duration."""
_MAX_VIOLATIONS = 100
_LEAST_ITEMS = 10_000
_SHOWN_UNKNOWN = 64 << 10
"""Bytes of unknown fields up to which each of them is named."""

ReasoningMode = Literal["separate", "omit", "inline"]
_OPAQUE = ("google.protobuf.",)  # messages whose inside is checked where they are used
_CONSTRAINED = "decoding is not constrained yet, and a prompt alone is no promise"


@dataclass(frozen=True, kw_only=True)
class OutputPlan:
    """How the answer is to be sent. Times in seconds."""

    token_ids: bool
    logprobs: bool
    echo: bool
    include_stop: bool
    reasoning: ReasoningMode
    min_delta: float
    progress: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """A checked request."""

    lanes: tuple[LaneSpec, ...]
    prompt: PromptIds
    prompt_text: str
    stopping: config.StoppingCriteria
    output: OutputPlan


class Converter:
    """Conversions for one model and one executor. Safe to use from several threads."""

    def __init__(self, model: ServedModel, limits: ExecutorLimits, server: ServerConfig) -> None:
        self.model = model
        self.limits = limits
        self.server = server

    # ---- prompts -------------------------------------------------------------------------------

    def check(self, request: Any) -> list[Violation]:
        """What is wrong with the form and the input of a request of CountTokens or Tokenize."""
        many = self._too_many_items(request)
        if many:
            return many
        size = self._input_size(request)
        if size > MAX_COUNTED:
            text = f"has {size} characters or ids or more, at most {MAX_COUNTED} are counted"
            return [Violation(request.WhichOneof("input"), text)]
        found = chain(_form(request), self._check_input(request))
        return list(islice(found, _MAX_VIOLATIONS))

    def _too_many_items(self, request: Any) -> list[Violation]:
        """A chat that is not looked at any further: every item costs time, whatever is in it."""
        most = max(_LEAST_ITEMS, 2 * self.limits.max_ctx)
        if request.WhichOneof("input") != "chat" or _chat_items(request.chat, most) <= most:
            return []
        return [Violation("chat", f"has more than {most} messages, parts, calls and tools")]

    def _input_size(self, request: Any) -> int:
        """Characters of the input (ids, if it is ids), or fewer, without looking at them."""
        kind = request.WhichOneof("input")
        if kind == "tokens":
            return len(request.tokens.ids)
        if kind == "text":
            return len(request.text)
        return 0 if kind is None else _chat_size(request.chat)

    def _least_tokens(self, request: Any) -> int:
        """Tokens that the prompt has at least, known without making it."""
        size, tokenizer = self._input_size(request), self.model.tokenizer
        if request.WhichOneof("input") == "tokens":
            return size
        return 0 if tokenizer is None else -(-size // tokenizer.longest_token)

    def _check_input(self, request: Any) -> Iterator[Violation]:
        kind = request.WhichOneof("input")
        if kind is None:
            names = ", ".join(f.name for f in request.DESCRIPTOR.oneofs_by_name["input"].fields)
            yield Violation("input", f"is missing: set one of {names}", "EMPTY_PROMPT")
        elif kind == "chat":
            yield from self._check_chat(request.chat)
        elif kind == "text" and not request.text:
            yield Violation("text", "is empty, must hold a prompt", "EMPTY_PROMPT")
        elif kind == "tokens":
            yield from self._check_ids(request.tokens.ids, "tokens.ids")
            if not request.tokens.ids:
                yield Violation("tokens.ids", "is empty, must hold a prompt", "EMPTY_PROMPT")

    def _check_chat(self, wire: Any) -> Iterator[Violation]:
        parsed, found = _chat_request(wire)
        yield from found
        for v in chat_request.problems(parsed, self._profile):
            reason = "INVALID_REQUEST" if v.reason == chat_request.INVALID else v.reason
            yield Violation(_wire_path(v.path), v.message, reason)

    def _check_ids(self, ids: Any, path: str) -> Iterator[Violation]:
        size = self.model.vocab_size
        if not ids or max(ids) < size:
            return
        for i, t in enumerate(ids):
            if t >= size:
                text = f"is {t}, must be in 0..{size - 1}"
                yield Violation(f"{path}[{i}]", text, "INVALID_TOKEN_ID")

    def unsupported_input(self, request: Any) -> dict[str, str]:
        """Features of the input that cannot be honoured."""
        kind = request.WhichOneof("input")
        if kind in ("chat", "text") and self.model.tokenizer is None:
            return {f"{kind}": "the model has no tokenizer: send token ids"}
        if kind == "chat":
            mode = request.chat.tool_choice.mode
            for name in ("REQUIRED", "NAMED"):
                if mode == getattr(pb.ToolChoice, f"MODE_{name}"):
                    return {f"tool_choice.{name.lower()}": _CONSTRAINED}
        return {}

    def prompt(self, request: Any, *, text: bool = True) -> tuple[PromptIds, str]:
        """Ids and text of the input of a request that passed `check`.

        Args:
            text: False if nobody will look at the text; it may then be empty.

        Raises:
            InvalidRequest: a text that cannot be encoded.
        """
        kind = request.WhichOneof("input")
        if kind == "tokens":
            return self._token_prompt(tuple(request.tokens.ids), text)
        tokenizer = self.model.tokenizer
        assert tokenizer is not None
        try:
            if kind == "text":
                ids = tokenizer.encode_completion(request.text)
                return PromptIds(ids=tuple(ids)), request.text
            parsed, _ = _chat_request(request.chat)
            rendered = chat.render(parsed, self._profile)
            return answer.chat_prompt(rendered, tokenizer), rendered.text
        except TokenizerError as error:
            told = str(error).removeprefix(f"{tokenizer.source}: ")  # no path of this machine
            raise InvalidRequest([Violation(kind, told)]) from None

    def _token_prompt(self, ids: tuple[int, ...], text: bool) -> tuple[PromptIds, str]:
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            return PromptIds(ids=ids), ""
        inside = ids[-1] == tokenizer.markers.think_open
        prompt = PromptIds(ids=ids, start="reasoning" if inside else "content")
        return prompt, tokenizer.decode(ids) if text else ""

    @property
    def _profile(self) -> chat_request.Profile:
        return cast(chat_request.Profile, self.model.chat_profile)

    # ---- generate ------------------------------------------------------------------------------

    def call(self, request: Any, found: Iterable[Violation] = ()) -> Call:
        """Everything of a GenerateRequest; `found`: violations known before.

        Raises:
            ServiceError: wrong (InvalidRequest, with every violation), unsupported, or too long.
        """
        many = self._too_many_items(request)
        if many:
            raise InvalidRequest([*found, *many])
        least, most = self._least_tokens(request), self.limits.max_ctx
        too_long = least > most  # then nothing of the prompt is looked at
        everything = (
            found,
            _form(request, ("chat",) if too_long else ()),
            () if too_long else self._check_input(request),
            self._check_generate(request),
        )
        violations = list(islice(chain.from_iterable(everything), _MAX_VIOLATIONS))
        if violations:
            raise InvalidRequest(violations)
        features = self.unsupported_input(request) | _unsupported_options(request)
        if features:
            raise unsupported(features)
        if too_long:
            asked = request.stopping.max_output_tokens
            known = asked if request.stopping.HasField("max_output_tokens") else None
            raise refusals.context_length_exceeded(least, known, most, at_least=True)
        shown = request.output.echo or self.server.log_prompts
        prompt, text = self.prompt(request, text=shown)
        stopping = config.StoppingCriteria(**vars(_stopping(request)))
        budget = self._budget(prompt, stopping)
        try:
            lanes = answer.lane_specs(
                prompt,
                config.SamplingParams(**vars(_sampling(request))),
                replace(stopping, max_output_tokens=budget),
                limits=self.limits,
                tokenizer=self.model.tokenizer,
                candidates=request.candidate_count if request.HasField("candidate_count") else 1,
            )
        except config.ConfigError as error:  # what a field alone does not show
            text = error.problems[0]
            raise InvalidRequest([Violation("sampling.logit_bias", text)]) from None
        if request.speculation == pb.SPECULATION_OFF:
            lanes = tuple(replace(lane, speculate=False) for lane in lanes)
        return Call(
            lanes=lanes,
            prompt=prompt,
            prompt_text=text if shown else "",
            stopping=stopping,
            output=_output_plan(request.output),
        )

    def _budget(self, prompt: PromptIds, stopping: config.StoppingCriteria) -> int:
        """Output tokens allowed; what was not asked for is capped by the server."""
        try:
            budget = answer.output_budget(len(prompt.ids), stopping, self.limits)
        except config.ConfigError as error:
            text = error.problems[0]
            raise InvalidRequest([Violation("stopping.min_output_tokens", text)]) from None
        cap = self.server.default_max_tokens
        if stopping.max_output_tokens is None and cap is not None:
            budget = min(budget, max(cap, stopping.min_output_tokens))
        return budget

    def _check_generate(self, request: Any) -> Iterator[Violation]:
        for name, text in config.sampling_problems(cast(Any, _sampling(request))):
            group = "output" if "logprobs" in name else "sampling"
            yield Violation(f"{group}.{name}", text)
        for name, text in config.stopping_problems(cast(Any, _stopping(request))):
            yield Violation(f"stopping.{name}", text)
        for group, name, limit in _LISTS:
            count = len(getattr(getattr(request, group), name))
            if count > limit:
                yield Violation(f"{group}.{name}", f"has {count} entries, at most {limit}")
        yield from self._check_ids(sorted(_bias_ids(request)), "sampling.logit_bias")
        yield from self._check_ids(_stop_ids(request), "stopping.stop_token_ids")
        most = min(MAX_CANDIDATES, self.limits.num_slots)
        if request.HasField("candidate_count") and not 1 <= request.candidate_count <= most:
            yield Violation(
                "candidate_count", f"is {request.candidate_count}, must be in 1..{most}"
            )
        if request.request_id and not is_request_id(request.request_id):
            text = f"must be at most {MAX_ID_CHARACTERS} printable ASCII characters"
            yield Violation("request_id", text)
        if request.output.echo and request.WhichOneof("input") == "chat":
            yield Violation("output.echo", "goes with text or tokens, the input is a chat")
        yield from _check_durations(request)


def is_request_id(text: str) -> bool:
    """Whether a text can name a request."""
    return 0 < len(text) <= MAX_ID_CHARACTERS and text.isascii() and text.isprintable()


# ---- groups of fields --------------------------------------------------------------------------

_LISTS = (
    ("sampling", "logit_bias", config.MAX_LOGIT_BIAS),
    ("stopping", "stop_strings", config.MAX_STOP_STRINGS),
    ("stopping", "stop_token_ids", config.MAX_STOP_IDS),
)
"""Lists with a limit; what is over it is refused and never looked at."""


def _bias_ids(request: Any) -> list[int]:
    return list(islice(request.sampling.logit_bias, config.MAX_LOGIT_BIAS))


def _stop_ids(request: Any) -> list[int]:
    return list(request.stopping.stop_token_ids[: config.MAX_STOP_IDS])


def _sampling(request: Any) -> SimpleNamespace:
    """Fields of `config.SamplingParams`, defaults where absent, not checked."""
    p, out = request.sampling, SimpleNamespace()
    for f in fields(config.SamplingParams):
        setattr(out, f.name, f.default)
    for name in (
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty",
        "presence_penalty", "penalty_window", "seed",
    ):  # fmt: skip
        if p.HasField(name):
            setattr(out, name, getattr(p, name))
    out.logit_bias = tuple((i, p.logit_bias[i]) for i in sorted(_bias_ids(request)))
    if request.output.HasField("top_logprobs"):
        out.top_logprobs = request.output.top_logprobs
    out.logprobs_after_sampling = request.output.logprobs_after_sampling
    return out


def _stopping(request: Any) -> SimpleNamespace:
    """Fields of `config.StoppingCriteria`, not checked."""
    s, out = request.stopping, SimpleNamespace()
    for f in fields(config.StoppingCriteria):
        setattr(out, f.name, f.default)
    for name in ("max_output_tokens", "min_output_tokens", "max_reasoning_tokens"):
        if s.HasField(name):
            setattr(out, name, getattr(s, name))
    out.stop_strings = tuple(s.stop_strings[: config.MAX_STOP_STRINGS])
    out.stop_token_ids = tuple(_stop_ids(request))
    out.ignore_eos = s.ignore_eos
    out.time_limit = _time_limit(s)
    return out


def _seconds(duration: Any) -> float:
    return float(duration.seconds + duration.nanos * 1e-9)


def _time_limit(stopping: Any) -> float | None:
    return _seconds(stopping.time_limit) if stopping.HasField("time_limit") else None


def _check_durations(request: Any) -> Iterator[Violation]:
    stopping, output = request.stopping, request.output
    for group, name, value in (
        ("stopping", "time_limit", stopping.time_limit),
        ("output", "min_delta_interval", output.min_delta_interval),
        ("output", "progress_interval", output.progress_interval),
    ):
        mixed = value.seconds * value.nanos < 0
        if mixed or abs(value.nanos) > 999_999_999 or abs(value.seconds) > MAX_SECONDS:
            yield Violation(
                f"{group}.{name}", "is no duration: seconds and nanos do not go together"
            )
    for name, low, high in (("min_delta_interval", 0.0, 60.0), ("progress_interval", 0.1, 3600.0)):
        if request.output.HasField(name):
            value = _seconds(getattr(request.output, name))
            if not low <= value <= high:
                yield Violation(f"output.{name}", f"is {value:g} s, must be in {low:g}..{high:g} s")


def _output_plan(output: Any) -> OutputPlan:
    modes: dict[int, ReasoningMode] = {
        pb.OutputOptions.REASONING_OMIT: "omit",
        pb.OutputOptions.REASONING_INLINE: "inline",
    }
    interval = _seconds(output.progress_interval) if output.HasField("progress_interval") else 2.0
    return OutputPlan(
        token_ids=output.token_ids,
        logprobs=output.HasField("top_logprobs"),
        echo=output.echo,
        include_stop=output.include_stop_string,
        reasoning=modes.get(output.reasoning, "separate"),
        min_delta=_seconds(output.min_delta_interval),
        progress=interval,
    )


def _unsupported_options(request: Any) -> dict[str, str]:
    out: dict[str, str] = {}
    kind = request.response_format.WhichOneof("format")
    if kind not in (None, "text"):
        out[f"response_format.{kind}"] = _CONSTRAINED
    if request.priority in (pb.PRIORITY_LOW, pb.PRIORITY_HIGH):
        out["priority"] = "order is strictly by arrival"
    if request.cache.mode in (pb.CacheOptions.MODE_USE, pb.CacheOptions.MODE_READ_ONLY):
        out["cache.mode"] = "there is no prefix cache"
    if request.cache.session_id:
        out["cache.session_id"] = "there is no prefix cache"
    if request.output.prompt_logprobs:
        out["output.prompt_logprobs"] = "the commands logits and score give them"
    if request.speculation == pb.SPECULATION_REJECTION:
        out["speculation.rejection"] = "use AUTO, whose tokens are those of OFF"
    return out


# ---- chats -------------------------------------------------------------------------------------

_ROLES: dict[int, chat_request.Role] = {
    pb.Message.ROLE_SYSTEM: "system",
    pb.Message.ROLE_USER: "user",
    pb.Message.ROLE_ASSISTANT: "assistant",
    pb.Message.ROLE_TOOL: "tool",
    pb.Message.ROLE_LATEST_REMINDER: "latest_reminder",
    pb.Message.ROLE_DEVELOPER: "system",
}
_TOOL_MODES: dict[int, chat_request.ToolMode] = {
    pb.ToolChoice.MODE_NONE: "none",
    pb.ToolChoice.MODE_REQUIRED: "required",
    pb.ToolChoice.MODE_NAMED: "named",
}


def _chat_request(wire: Any) -> tuple[chat_request.ChatRequest, list[Violation]]:
    """The chat in terms of the prompt format, and what has no place in them."""
    violations: list[Violation] = []
    messages = tuple(
        _message(m, f"chat.messages[{i}]", violations) for i, m in enumerate(wire.messages)
    )
    tools = []
    for i, tool in enumerate(wire.tools):
        try:
            tools.append(
                chat_request.Tool.from_parts(tool.name, tool.description, tool.parameters_json)
            )
        except ValueError as error:
            path = f"chat.tools[{i}].parameters_json"
            violations.append(Violation(path, f"is not a JSON object: {error}"))
    thinking = {pb.Thinking.MODE_ON: True, pb.Thinking.MODE_OFF: False}.get(wire.thinking.mode)
    effort = {1: "low", 2: "high", 3: "max"}.get(wire.thinking.effort)
    drop = wire.thinking.drop_thinking if wire.thinking.HasField("drop_thinking") else True
    as_user = wire.system_placement == pb.SYSTEM_PLACEMENT_AS_USER
    request = chat_request.ChatRequest(
        messages=messages,
        tools=tuple(tools),
        tool_choice=chat_request.ToolChoice(
            mode=_TOOL_MODES.get(wire.tool_choice.mode, "auto"), name=wire.tool_choice.name
        ),
        thinking=thinking,
        effort=effort,
        drop_thinking=drop,
        system_placement="as_user" if as_user else "front",
    )
    return request, violations


def _chat_items(wire: Any, most: int) -> int:
    """Messages, parts, calls and tools together; counting ends above `most`."""
    count = len(wire.messages) + len(wire.tools)
    if count <= most:
        for message in wire.messages:
            count += len(message.parts) + len(message.tool_calls)
    return count


def _chat_size(wire: Any) -> int:
    """Characters that the messages put into the prompt, or fewer."""
    size = 0
    for message in wire.messages:
        size += sum(len(part.text) for part in message.parts)
        for call in message.tool_calls:
            size += len(call.arguments_json) + call.arguments_struct.ByteSize() // 12
    return size


def _message(wire: Any, path: str, violations: list[Violation]) -> chat_request.Message:
    if wire.role == pb.Message.ROLE_UNSPECIFIED:
        violations.append(Violation(f"{path}.role", "is missing"))
    for i, part in enumerate(wire.parts):
        if part.WhichOneof("data") is None:
            violations.append(Violation(f"{path}.parts[{i}]", "is empty, must hold text"))
    task = None
    if wire.task in pb.Message.Task.values() and wire.task:
        task = pb.Message.Task.Name(wire.task).removeprefix("TASK_").lower()
    return chat_request.Message(
        role=_ROLES.get(wire.role, "user"),
        content=chat_request.join_parts(part.text for part in wire.parts),
        reasoning=wire.reasoning,
        tool_calls=tuple(
            _tool_call(c, f"{path}.tool_calls[{i}]", violations)
            for i, c in enumerate(wire.tool_calls)
        ),
        tool_call_id=wire.tool_call_id,
        prefix=wire.prefix,
        task=cast(Any, task),
    )


def _tool_call(wire: Any, path: str, violations: list[Violation]) -> chat_request.ToolCall:
    arguments = wire.arguments_json or "{}"
    if wire.WhichOneof("arguments") == "arguments_struct":
        try:
            arguments = chat_request.dump_json(_plain(wire.arguments_struct))
        except ValueError:
            text = "holds NaN, infinity or too deep a nesting, which JSON cannot hold"
            violations.append(Violation(f"{path}.arguments_struct", text))
    return chat_request.ToolCall(name=wire.name, arguments=arguments, id=wire.id)


def _plain(value: Any) -> Any:
    """A Struct (or a value in one) as Python values: keys sorted, whole numbers as integers."""
    name = value.DESCRIPTOR.name
    if name == "Struct":
        return {k: _plain(value.fields[k]) for k in sorted(value.fields)}
    if name == "ListValue":
        return [_plain(v) for v in value.values]
    kind = value.WhichOneof("kind")
    if kind in ("struct_value", "list_value"):
        return _plain(getattr(value, kind))
    if kind == "number_value":
        number = value.number_value
        return int(number) if number.is_integer() and abs(number) < 2**53 else number
    return None if kind in (None, "null_value") else getattr(value, kind)


def _wire_path(path: str) -> str:
    """Path of a chat field as in the proto."""
    path = path.replace(".content", ".parts")
    path = "thinking.effort" if path == "effort" else path
    return "chat" if not path else f"chat.{path}"


def _form(message: Any, skip: Iterable[str] = ()) -> Iterator[Violation]:
    """Unknown fields and unknown enum values anywhere in a request, but in the fields `skip`."""
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    extra = message.ByteSize() - known.ByteSize()
    if extra > _SHOWN_UNKNOWN:
        text = f"holds {extra} bytes of fields that do not exist"
        yield Violation(message.DESCRIPTOR.name, text)
    yield from _walk(message, "", skip, 0 < extra <= _SHOWN_UNKNOWN)


def _walk(message: Any, path: str, skip: Iterable[str], has_unknown: bool) -> Iterator[Violation]:
    if has_unknown:
        unknown = unknown_fields.UnknownFieldSet(message)
        for number in sorted({unknown[i].field_number for i in range(len(unknown))}):
            where = path.rstrip(".") or message.DESCRIPTOR.name
            yield Violation(where, f"holds field number {number}, which does not exist")
    for descriptor, value in message.ListFields():
        name = f"{path}{descriptor.name}"
        if descriptor.name in skip:
            continue
        if descriptor.enum_type is not None:
            if value not in descriptor.enum_type.values_by_number:
                known = ", ".join(descriptor.enum_type.values_by_name)
                yield Violation(name, f"is {value}, must be one of {known}")
        elif descriptor.message_type is not None:
            kind = descriptor.message_type
            if kind.full_name.startswith(_OPAQUE) or kind.GetOptions().map_entry:
                continue
            if descriptor.is_repeated:
                for i, item in enumerate(value):
                    yield from _walk(item, f"{name}[{i}].", (), has_unknown)
            else:
                yield from _walk(value, f"{name}.", (), has_unknown)
