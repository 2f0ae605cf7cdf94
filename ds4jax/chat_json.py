"""OpenAI-shaped JSON to `ChatRequest`.

Reads the fields that the prompt format has a place for, and refuses everything else by name: an
option that is dropped without a word is an answer to another question. A field that is null counts
as absent. What the values mean is checked by `ds4jax.chat_request.problems`. No JAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ds4jax.chat_request import (
    ChatError,
    ChatRequest,
    FormatKind,
    Message,
    Placement,
    ResponseFormat,
    Role,
    Task,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
    Violation,
    dump_json,
    join_parts,
)

REQUEST_FIELDS = (
    "messages", "tools", "tool_choice", "response_format", "thinking", "reasoning_effort",
    "drop_thinking", "system_placement",
)  # fmt: skip
"""Fields of a request; all but `messages` may be absent."""

_MESSAGE_FIELDS = (
    "role", "content", "reasoning_content", "reasoning", "tool_calls", "tool_call_id", "prefix",
    "task",
)  # fmt: skip
_THINKING_TYPES = {"enabled": True, "on": True, "disabled": False, "off": False}
_JSON_TYPES = {dict: "object", list: "array", str: "string", bool: "true or false"}


def chat_request_from_json(data: Any) -> ChatRequest:
    """A request from parsed JSON (`chat_request.strict_json` keeps large numbers exact).

    `developer` is another name of the role `system`; a content of several text parts is joined by
    blank lines; `thinking` is true, false, or an object with `type` enabled or disabled.

    Raises:
        ChatError: unknown fields and wrong types, all of them at once.
    """
    reader = _Reader()
    request = reader.request(data)
    if reader.found:
        raise ChatError(reader.found)
    return request


class _Reader:
    """Collects violations and goes on with harmless values."""

    def __init__(self) -> None:
        self.found: list[Violation] = []

    def add(self, path: str, message: str) -> None:
        self.found.append(Violation(path, message))

    def object(self, value: Any, path: str, known: tuple[str, ...]) -> dict[str, Any]:
        """`value` without its null fields; unknown ones are reported."""
        if not isinstance(value, Mapping):
            self.add(path, f"is {_kind(value)}, must be an object")
            return {}
        for name, item in value.items():
            if item is not None and name not in known:
                where = f"{path}.{name}" if path else str(name)
                self.add(where, f"is not a known field; known are {', '.join(known)}")
        return {k: v for k, v in value.items() if v is not None and k in known}

    def typed(self, value: Any, path: str, kind: type, default: Any) -> Any:
        if type(value) is kind:
            return value
        self.add(path, f"is {_kind(value)}, must be {_JSON_TYPES[kind]}")
        return default

    def get(self, fields: dict[str, Any], name: str, path: str, kind: type, default: Any) -> Any:
        if name not in fields:
            return default
        return self.typed(fields[name], f"{path}.{name}" if path else name, kind, default)

    # -- parts of a request --

    def request(self, data: Any) -> ChatRequest:
        fields = self.object(data, "", REQUEST_FIELDS)
        messages = self.get(fields, "messages", "", list, [])
        tools = self.get(fields, "tools", "", list, [])
        effort = fields.get("reasoning_effort")
        if effort is not None and type(effort) not in (str, int):
            self.add("reasoning_effort", f"is {_kind(effort)}, must be a name")
            effort = None
        placement = self.get(fields, "system_placement", "", str, "front")
        return ChatRequest(
            messages=tuple(self.message(m, f"messages[{i}]") for i, m in enumerate(messages)),
            tools=tuple(self.tool(t, f"tools[{i}]") for i, t in enumerate(tools)),
            tool_choice=self.tool_choice(fields.get("tool_choice", "auto")),
            response_format=self.response_format(fields.get("response_format")),
            thinking=self.thinking(fields.get("thinking")),
            effort=effort,
            drop_thinking=self.get(fields, "drop_thinking", "", bool, True),
            system_placement=cast(Placement, placement),
        )

    def message(self, data: Any, path: str) -> Message:
        known: tuple[str, ...] = _MESSAGE_FIELDS
        if isinstance(data, Mapping) and data.get("role") == "tool":
            known = (*known, "name")  # repeats the name of the called tool
        fields = self.object(data, path, known)
        if "role" not in fields and isinstance(data, Mapping):
            self.add(f"{path}.role", "is missing")
        role = self.get(fields, "role", path, str, "user")
        reasoning = self.get(fields, "reasoning_content", path, str, "")
        other = self.get(fields, "reasoning", path, str, "")
        if reasoning and other and reasoning != other:
            self.add(f"{path}.reasoning", "differs from reasoning_content; give one of them")
        calls = self.get(fields, "tool_calls", path, list, [])
        if "content" not in fields and role not in ("assistant", ""):
            self.add(f"{path}.content", "is missing")
        return Message(
            role=cast(Role, "system" if role == "developer" else role),
            content=self.content(fields.get("content", ""), f"{path}.content"),
            reasoning=reasoning or other,
            tool_calls=tuple(
                self.tool_call(c, f"{path}.tool_calls[{i}]") for i, c in enumerate(calls)
            ),
            tool_call_id=self.get(fields, "tool_call_id", path, str, ""),
            prefix=self.get(fields, "prefix", path, bool, False),
            task=cast(Task | None, self.get(fields, "task", path, str, None)),
        )

    def content(self, value: Any, path: str) -> str:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            self.add(path, f"is {_kind(value)}, must be a string or an array of text parts")
            return ""
        texts = []
        for i, part in enumerate(value):
            where = f"{path}[{i}]"
            if isinstance(part, str):
                texts.append(part)
                continue
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind is not None and kind != "text":
                self.add(where, f"is of type {kind!r}, must be text: the model reads text only")
                continue
            fields = self.object(part, where, ("type", "text"))
            if "text" not in fields and isinstance(part, Mapping):
                self.add(f"{where}.text", "is missing")
            texts.append(self.get(fields, "text", where, str, ""))
        return join_parts(texts)

    def tool_call(self, data: Any, path: str) -> ToolCall:
        fields = self.object(data, path, ("id", "type", "function", "index"))
        if fields.get("type", "function") != "function":
            self.add(f"{path}.type", f"is {fields['type']!r}, must be function")
        where = f"{path}.function"
        function = self.object(fields.get("function", {}), where, ("name", "arguments"))
        if "name" not in function:
            self.add(f"{where}.name", "is missing")
        arguments = function.get("arguments", {})
        if isinstance(arguments, Mapping):
            arguments = self.dumped(arguments, f"{where}.arguments")
        return ToolCall(
            name=self.get(function, "name", where, str, "unnamed"),
            arguments=self.typed(arguments, f"{where}.arguments", str, "{}"),
            id=self.get(fields, "id", path, str, ""),
        )

    def dumped(self, value: Any, path: str) -> str:
        try:
            return dump_json(dict(value))
        except (TypeError, ValueError) as error:
            self.add(path, f"is not JSON: {error}")
            return "{}"

    def tool(self, data: Any, path: str) -> Tool:
        fields = self.object(data, path, ("type", "function"))
        if fields.get("type", "function") != "function":
            self.add(f"{path}.type", f"is {fields['type']!r}, must be function")
        function = fields.get("function")
        if not isinstance(function, Mapping):
            self.add(f"{path}.function", f"is {_kind(function)}, must be an object")
            return Tool(name="unnamed", declaration="{}")
        name = self.typed(function.get("name"), f"{path}.function.name", str, "unnamed")
        return Tool(name=name, declaration=self.dumped(function, f"{path}.function"))

    def tool_choice(self, value: Any) -> ToolChoice:
        if isinstance(value, str):
            if value == "named":
                self.add("tool_choice", "names no tool; give an object with function.name")
            return ToolChoice(mode=cast(ToolMode, value))
        fields = self.object(value, "tool_choice", ("type", "function"))
        function = self.object(fields.get("function", {}), "tool_choice.function", ("name",))
        if fields and (fields.get("type", "function") != "function" or "name" not in function):
            self.add("tool_choice", "must be auto, none, required or name a function")
        name = self.get(function, "name", "tool_choice.function", str, "")
        return ToolChoice(mode="named", name=name)

    def response_format(self, value: Any) -> ResponseFormat:
        if value is None:
            return ResponseFormat()
        path = "response_format"
        fields = self.object(value, path, ("type", "json_schema"))
        kind = self.get(fields, "type", path, str, "text")
        if kind != "json_schema":
            if "json_schema" in fields:
                self.add(f"{path}.json_schema", f"does not belong to type {kind}")
            return ResponseFormat(kind=cast(FormatKind, kind))
        known = ("name", "schema", "strict", "description")
        where = f"{path}.json_schema"
        inner = self.object(fields.get("json_schema", {}), where, known)
        if not isinstance(inner.get("schema"), Mapping):
            self.add(f"{where}.schema", f"is {_kind(inner.get('schema'))}, must be an object")
            return ResponseFormat()
        return ResponseFormat(
            kind="json_schema", schema=self.dumped(inner["schema"], f"{where}.schema")
        )

    def thinking(self, value: Any) -> bool | None:
        if value is None or isinstance(value, bool):
            return value
        kind = self.object(value, "thinking", ("type",)).get("type")
        if kind not in _THINKING_TYPES:
            if isinstance(value, Mapping):
                self.add("thinking.type", f"is {kind!r}, must be enabled or disabled")
            return None
        return _THINKING_TYPES[kind]


def _kind(value: Any) -> str:
    """JSON type of a value, in words."""
    if value is None:
        return "missing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"
