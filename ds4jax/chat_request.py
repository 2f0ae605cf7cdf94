"""Chat requests as typed values, and everything that can be wrong with one.

Messages, tools and options in the terms of the prompt format, whatever wire they came over; strict
JSON for the arguments of calls. Putting a prompt together is `ds4jax.chat`, reading a request from
OpenAI-shaped JSON is `ds4jax.chat_json`. No JAX.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

Profile = Literal["v4-preview", "v4-0731", "v4.1"]
Role = Literal["system", "user", "assistant", "tool", "latest_reminder"]
Task = Literal["action", "query", "authority", "domain", "title", "read_url"]
ToolMode = Literal["auto", "none", "required", "named"]
FormatKind = Literal["text", "json_object", "json_schema", "regex"]
Placement = Literal["front", "as_user"]

PROFILES: tuple[str, ...] = get_args(Profile)
ROLES: tuple[str, ...] = get_args(Role)
TASKS: tuple[str, ...] = get_args(Task)
TOOL_MODES: tuple[str, ...] = get_args(ToolMode)
FORMAT_KINDS: tuple[str, ...] = get_args(FormatKind)
PLACEMENTS: tuple[str, ...] = get_args(Placement)

DEFAULT_EFFORT = "high"
EFFORT_ALIASES: Mapping[str, str] = {
    "low": "low",
    "high": "high",
    "max": "max",
    "minimal": "low",
    "medium": "low",
    "xhigh": "high",
}
"""Accepted names of the reasoning effort; `none` besides means thinking off."""

MAX_TOOLS = 128
MAX_TOOL_BYTES = 1 << 20
"""Limits on declared tools: how many, and bytes of their JSON altogether."""

_SURROGATE = re.compile("[\ud800-\udfff]")

INVALID = "INVALID_ARGUMENT"
NO_CALL = "TOOL_RESULT_WITHOUT_CALL"


class Violation(NamedTuple):
    """One thing wrong with a request."""

    path: str  # of the field, as in `messages[2].content`
    message: str  # what was found, what is allowed
    reason: str = INVALID


class ChatError(ValueError):
    """A request that cannot be rendered; `violations` lists every finding."""

    def __init__(self, violations: Iterable[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(f"{v.path} {v.message}".strip() for v in self.violations))


class ChatUnsupportedError(NotImplementedError):
    """A legal request that asks for what this version cannot do; `feature` names it."""

    def __init__(self, feature: str, message: str) -> None:
        self.feature = feature
        super().__init__(message)


# -- requests --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call made by the assistant in an earlier turn.

    `arguments` is the text of a JSON object; any other text is rendered as one string parameter
    named `arguments`.
    """

    name: str
    arguments: str = "{}"
    id: str = ""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message. Which fields may be set depends on the role; `problems` checks it."""

    role: Role
    content: str = ""
    reasoning: str = ""  # assistant
    tool_calls: tuple[ToolCall, ...] = ()  # assistant
    tool_call_id: str = ""  # tool
    prefix: bool = False  # last assistant message: continue it
    task: Task | None = None  # last user message: a quick instruction


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A declared tool: its name, and the line of JSON that the model is shown."""

    name: str
    declaration: str

    @classmethod
    def from_function(cls, function: Mapping[str, Any]) -> Tool:
        """From an OpenAI `function` object, rendered as given: no key added, removed or moved."""
        return cls(
            name=str(function.get("name", "")),
            declaration=dump_json(dict(function)),
        )

    @classmethod
    def from_parts(cls, name: str, description: str = "", parameters_json: str = "") -> Tool:
        """From name, description and a JSON schema in text form (key order and spacing are kept).

        Raises:
            ValueError: `parameters_json` is not the text of a JSON object.
        """
        parts = [f'"name": {json.dumps(name, ensure_ascii=False)}']
        if description:
            parts.append(f'"description": {json.dumps(description, ensure_ascii=False)}')
        if parameters_json:
            schema = strict_json(parameters_json)
            if not isinstance(schema, dict):
                raise ValueError("is not the text of a JSON object")
            if "\n" in parameters_json or "\r" in parameters_json:
                parameters_json = dump_json(schema)  # one line per tool
            parts.append(f'"parameters": {parameters_json}')
        return cls(name=name, declaration="{" + ", ".join(parts) + "}")


@dataclass(frozen=True, kw_only=True)
class ToolChoice:
    """Whether the model may call tools; `name` goes with `named` only."""

    mode: ToolMode = "auto"
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class ResponseFormat:
    """Wanted form of the answer; `text` of the schema is one line of JSON, for `json_schema`."""

    kind: FormatKind = "text"
    schema: str = ""


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A conversation and how to answer it.

    `thinking` None means on, unless the effort is `none`. `effort` is a name, or for V4.1 an
    integer from 1 to 100. `drop_thinking` leaves out the reasoning of past turns; declared tools
    switch that off. `system_placement` says where system messages after the first user turn go.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    response_format: ResponseFormat = field(default_factory=ResponseFormat)
    thinking: bool | None = None
    effort: str | int | None = None
    drop_thinking: bool = True
    system_placement: Placement = "front"

    @property
    def thinks(self) -> bool:
        """Whether thinking is on."""
        return self.effort != "none" if self.thinking is None else self.thinking

    @property
    def declared_tools(self) -> tuple[Tool, ...]:
        """The tools that the prompt declares."""
        return () if self.tool_choice.mode == "none" else self.tools


def join_parts(parts: Iterable[str]) -> str:
    """Text of a message whose content came in parts."""
    return "\n\n".join(parts)


# -- JSON ------------------------------------------------------------------------------------------


class _Number(str):
    """Literal of a JSON number that Python cannot hold exactly (too many digits, or too large)."""


def _integer(literal: str) -> int | _Number:
    return int(literal) if len(literal) < 4000 else _Number(literal)


def _float(literal: str) -> float | _Number:
    value = float(literal)
    return value if math.isfinite(value) else _Number(literal)


def _no_constant(literal: str) -> Any:
    raise ValueError(f"{literal} is not JSON")


def strict_json(text: str) -> Any:
    """Value of a JSON text, read strictly (no NaN, no Infinity), integers of any size exact.

    Raises:
        ValueError: not JSON, or nested too deeply to be read.
    """
    try:
        return json.loads(text, parse_int=_integer, parse_float=_float, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


def dump_json(value: Any) -> str:
    """A value of `strict_json` as one line, spaced as Python spaces it, not escaped to ASCII.

    Raises:
        ValueError: NaN, infinity, or nested too deeply to be written.
    """
    try:
        return _dump(value)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


def _dump(value: Any) -> str:
    if isinstance(value, _Number):
        return str(value)
    if isinstance(value, dict):
        pairs = (f"{json.dumps(k, ensure_ascii=False)}: {_dump(v)}" for k, v in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_dump, value)) + "]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def call_parameters(arguments: str) -> list[tuple[str, bool, str]]:
    """(key, value is a string, text) for each parameter of a call's arguments."""
    try:
        value = strict_json(arguments)
        if isinstance(value, dict):
            return [
                (k, type(v) is str, v if type(v) is str else dump_json(v)) for k, v in value.items()
            ]
    except ValueError:
        pass
    return [("arguments", True, arguments)]


def is_valid_name(name: str) -> bool:
    """Whether a tool or parameter name can stand in a tag, where nothing is escaped."""
    return bool(name) and not any(c in '"<>' or ord(c) < 32 or 127 <= ord(c) < 160 for c in name)


# -- checking --------------------------------------------------------------------------------------

_NAME_RULE = 'must be non-empty without ", <, > or control characters'


def problems(request: ChatRequest, profile: Profile) -> list[Violation]:
    """Every reason why `request` cannot be rendered; empty when it can."""
    out: list[Violation] = []
    if profile not in PROFILES:
        out.append(Violation("profile", f"is {profile!r}, must be one of {', '.join(PROFILES)}"))
    if not request.messages:
        out.append(Violation("messages", "is empty, must hold at least one message"))
    called = False
    last = len(request.messages) - 1
    for i, message in enumerate(request.messages):
        out += _message_problems(message, f"messages[{i}]", is_last=i == last, called=called)
        called = called or bool(message.tool_calls)
    out += _tool_problems(request)
    if request.response_format.kind not in FORMAT_KINDS:
        out.append(
            Violation(
                "response_format",
                f"is {request.response_format.kind!r}, must be one of {', '.join(FORMAT_KINDS)}",
            )
        )
    if request.response_format.kind == "json_schema" and not request.response_format.schema:
        out.append(Violation("response_format.schema", "is missing, must be a JSON object"))
    if request.system_placement not in PLACEMENTS:
        out.append(
            Violation(
                "system_placement",
                f"is {request.system_placement!r}, must be one of {', '.join(PLACEMENTS)}",
            )
        )
    return out + _effort_problems(request, profile)


def _message_problems(m: Message, path: str, *, is_last: bool, called: bool) -> list[Violation]:
    out: list[Violation] = []

    def add(name: str, text: str, reason: str = INVALID) -> None:
        out.append(Violation(f"{path}.{name}" if name else path, text, reason))

    if m.role not in ROLES:
        add("role", f"is {m.role!r}, must be one of {', '.join(ROLES)}")
    for name, text in (("content", m.content), ("reasoning", m.reasoning)):
        if bad := _SURROGATE.search(text):
            add(name, f"holds a lone surrogate at character {bad.start()}, must be valid Unicode")
    if m.role == "tool" and not called:
        add("", "is a tool result, but no assistant message before it calls a tool", NO_CALL)
    if m.role != "tool" and m.tool_call_id:
        add("tool_call_id", f"belongs to a tool message, this one is of role {m.role}")
    if m.role != "assistant":
        for name in ("reasoning", "tool_calls", "prefix"):
            if getattr(m, name):
                add(name, f"belongs to an assistant message, this one is of role {m.role}")
    elif m.prefix:
        if not is_last:
            add("prefix", "continues the last message only, this is not the last one")
        if m.tool_calls:
            add("tool_calls", "cannot be continued: not allowed in a message with prefix")
    if m.task is not None:
        if m.task not in TASKS:
            add("task", f"is {m.task!r}, must be one of {', '.join(TASKS)}")
        if m.role != "user" or not is_last:
            add("task", "belongs to the last message, which must be of role user")
    for j, call in enumerate(m.tool_calls):
        if not is_valid_name(call.name):
            add(f"tool_calls[{j}].name", f"is {call.name!r}, {_NAME_RULE}")
        for key, _, text in call_parameters(call.arguments):
            if not is_valid_name(key):
                add(f"tool_calls[{j}].arguments", f"has the key {key!r}, {_NAME_RULE}")
            if _SURROGATE.search(text):
                add(f"tool_calls[{j}].arguments", f"has a lone surrogate in {key!r}")
    return out


def _tool_problems(request: ChatRequest) -> list[Violation]:
    out = []
    for i, tool in enumerate(request.tools):
        if not is_valid_name(tool.name):
            out.append(Violation(f"tools[{i}].name", f"is {tool.name!r}, {_NAME_RULE}"))
        if _SURROGATE.search(tool.declaration):
            out.append(Violation(f"tools[{i}]", "holds a lone surrogate, must be valid Unicode"))
    if len(request.tools) > MAX_TOOLS:
        out.append(Violation("tools", f"has {len(request.tools)} entries, at most {MAX_TOOLS}"))
    size = sum(len(t.declaration.encode("utf-8", "surrogatepass")) for t in request.tools)
    if size > MAX_TOOL_BYTES:
        out.append(Violation("tools", f"has {size} bytes of JSON, at most {MAX_TOOL_BYTES}"))
    choice = request.tool_choice
    if choice.mode not in TOOL_MODES:
        out.append(
            Violation("tool_choice", f"is {choice.mode!r}, must be one of {', '.join(TOOL_MODES)}")
        )
    elif choice.mode == "required" and not request.tools:
        out.append(Violation("tool_choice", "is required, but no tools are declared"))
    elif choice.mode == "named" and choice.name not in {t.name for t in request.tools}:
        out.append(Violation("tool_choice", f"names {choice.name!r}, which is not a declared tool"))
    return out


def _effort_problems(request: ChatRequest, profile: Profile) -> list[Violation]:
    effort = request.effort
    accepted = f"must be one of {', '.join([*EFFORT_ALIASES, 'none'])}"
    if effort is None or (isinstance(effort, str) and effort in EFFORT_ALIASES):
        return []
    if effort == "none":
        if request.thinking:
            return [Violation("effort", "is none, which contradicts thinking on")]
        return []
    if profile == "v4.1":
        if isinstance(effort, int) and not isinstance(effort, bool) and 1 <= effort <= 100:
            return []
        accepted += " or an integer from 1 to 100"
    return [Violation("effort", f"is {effort!r}, {accepted}")]


def unsupported_features(request: ChatRequest) -> list[str]:
    """Features that a prompt can be rendered for but that decoding does not enforce yet.

    `render` shows such prompts; whoever generates must refuse them, because a prompt alone is no
    promise of the form of the answer.
    """
    kind = request.response_format.kind
    return [] if kind == "text" else [f"response_format.{kind}"]
