"""Tool markup of the model's output: the section that holds calls, read as it streams.

Also the events of an output stream. Where a section begins is decided by `ds4jax.parser`, the only
user of `ToolSection`. No JAX.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ds4jax.chat_request import is_valid_name, strict_json
from ds4jax.tokenizer import MARKER_SPELLINGS

_DSML = MARKER_SPELLINGS["dsml"]

_MAX_TAG = 8192  # characters of a tag after its marker; a longer one is no tag
BRACKET = re.compile(r"</?\Z")
_TAG = re.compile(  # possessive: linear whatever the model writes
    r'[ \t]*+(\w*+)((?:[ \t]++\w++[ \t]*+=[ \t]*+"[^"]*+")*+)[ \t]*+(/?)'
)
_ATTRIBUTE = re.compile(r'(\w+)[ \t]*=[ \t]*"([^"]*)"')
_BLOCK = re.compile("tool|call", re.IGNORECASE)  # in the name of a block's tag, however misspelt


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. Calls are numbered from 0 in order of appearance."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments; the pieces of a finished call join to the text of a JSON object.

    A parameter that the model gave twice is in it twice; readers of JSON let the last one win.
    """

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete. A call without this event was cut off and must not be executed."""

    index: int


Event = Reasoning | Content | CallStart | CallArguments | CallEnd


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A complete call; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class TruncatedCall:
    """A call that the output ended in; the name is None if even that was cut."""

    name: str | None


def make_call_id() -> str:
    """A fresh id for a tool call; cannot be guessed."""
    return "call_" + secrets.token_hex(12)


class _Value:
    """A parameter being read."""

    def __init__(self, key: str, is_string: bool) -> None:
        self.key = key
        self.is_string = is_string
        self.parts: list[str] = []  # only kept where the whole value is needed


class _Call:
    """A call being read."""

    def __init__(self, index: int, call_id: str, name: str) -> None:
        self.index = index
        self.id = call_id
        self.name = name
        self.arguments: list[str] = []
        self.body: list[str] = []  # text outside parameters


class ToolSection:
    """Everything from the first tag on: calls are read, all other text is skipped."""

    def __init__(
        self,
        events: list[Event],
        anomalies: Counter[str],
        make_id: Callable[[], str],
        bare_marker_opens: bool,
    ) -> None:
        self.complete: list[ParsedCall] = []
        self._events = events
        self._anomalies = anomalies
        self._make_id = make_id
        self._bare_opens = bare_marker_opens
        self._started = 0
        self._call: _Call | None = None
        self._value: _Value | None = None
        self._bracket = ""  # a `<` or `</` that may open a tag
        self._opening = ""  # the bracket of the tag being read
        self._tag: str | None = None  # its text after the marker

    def marker(self, opening: str | None = None) -> None:
        """The tag marker; `opening` is the bracket before it where the caller knows it."""
        if self._tag is not None:
            self._reject_tag("")
        if opening is None:
            opening, self._bracket = self._bracket, ""
            if not opening and not self._bare_opens:
                self._plain(_DSML)
                return
        self._opening, self._tag = opening, ""

    def text(self, text: str) -> None:
        while text:
            if self._tag is None:
                self._plain(text)
                return
            head = text[: _MAX_TAG + 1 - len(self._tag)]
            end = re.search("[>\n]", head)
            if end is None:
                self._tag += head
                text = text[len(head) :]
                if len(self._tag) > _MAX_TAG:
                    self._reject_tag("")
                continue
            self._tag += head[: end.start()]
            text = text[end.end() :]
            if end.group() == "\n" or not self._use_tag(self._tag):
                self._reject_tag(end.group())
            else:
                self._tag = None

    def truncated(self) -> TruncatedCall | None:
        """The call that the output ended in."""
        if self._call is not None:
            return TruncatedCall(self._call.name)
        if self._tag is not None and self._opening != "</" and re.match(r"\s*invoke\b", self._tag):
            return TruncatedCall(None)
        return None

    def _reject_tag(self, end: str) -> None:
        """What looked like a tag is text; it matters only inside a value."""
        raw = f"{self._opening}{_DSML}{self._tag}{end}"
        self._tag = None
        if self._value is not None:
            self._plain(raw)
            return
        self._anomalies["unknown_tag"] += 1
        bracket = BRACKET.search(raw)
        self._bracket = bracket.group() if bracket else ""

    def _plain(self, text: str) -> None:
        text = self._bracket + text
        match = BRACKET.search(text)
        cut = match.start() if match else len(text)
        self._bracket = text[cut:]
        if self._value is not None:
            self._value_text(text[:cut])
        elif self._call is not None:
            self._call.body.append(text[:cut])

    def _use_tag(self, tag: str) -> bool:
        """Act on a whole tag; False if it means nothing here."""
        match = _TAG.fullmatch(tag)
        if match is None:
            return False
        word, closed = match[1], match[3] == "/"
        attributes = dict(_ATTRIBUTE.findall(match[2]))
        name = attributes.get("name", "")
        if self._opening == "</":
            return self._closing_tag(word)
        if self._value is None and _BLOCK.search(word):
            return True
        if not is_valid_name(name):
            return False
        if word == "parameter" and self._call is not None:
            self._end_value()
            self._begin_value(self._call, name, attributes.get("string", "").lower() == "true")
            if closed:
                self._end_value()
            return True
        if word == "invoke" and self._value is None:
            self._end_call("unclosed_call")
            self._begin_call(name)
            if closed:
                self._end_call()
            return True
        return False

    def _closing_tag(self, word: str) -> bool:
        if word == "parameter":
            self._end_value()
        elif word == "invoke":
            self._end_call()
        elif _BLOCK.search(word):
            self._end_call("unclosed_call")
        else:
            return False
        return True

    def _begin_call(self, name: str) -> None:
        self._call = _Call(self._started, self._make_id(), name)
        self._started += 1
        self._events.append(CallStart(self._call.index, self._call.id, name))

    def _end_call(self, anomaly: str = "") -> None:
        self._end_value()
        call, self._call = self._call, None
        if call is None:
            return
        if anomaly:
            self._anomalies[anomaly] += 1
        self._argument(call, "}" if call.arguments else _body_arguments("".join(call.body)))
        self._events.append(CallEnd(call.index))
        self.complete.append(ParsedCall(call.id, call.name, "".join(call.arguments)))

    def _begin_value(self, call: _Call, key: str, is_string: bool) -> None:
        self._value = _Value(key, is_string)
        if is_string:
            self._argument(call, self._key(call, key) + '"')

    def _value_text(self, text: str) -> None:
        if self._value is None or self._call is None:
            return
        if self._value.is_string:
            self._argument(self._call, json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value.parts.append(text)

    def _end_value(self) -> None:
        value, self._value = self._value, None
        if value is None or self._call is None:
            return
        if value.is_string:
            self._argument(self._call, '"')
            return
        text = "".join(value.parts)
        try:
            strict_json(text)
            text = text.strip(" \t\r\n")
        except ValueError:
            text = json.dumps(text, ensure_ascii=False)
        self._argument(self._call, self._key(self._call, value.key) + text)

    @staticmethod
    def _key(call: _Call, key: str) -> str:
        return f"{', ' if call.arguments else '{'}{json.dumps(key, ensure_ascii=False)}: "

    def _argument(self, call: _Call, text: str) -> None:
        if text:
            call.arguments.append(text)
            self._events.append(CallArguments(call.index, text))


def _body_arguments(body: str) -> str:
    """Arguments of a call without parameters: its body if that is a JSON object, else none."""
    try:
        if isinstance(strict_json(body), dict):
            return body.strip(" \t\r\n")
    except ValueError:
        pass
    return "{}"
