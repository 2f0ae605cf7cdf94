"""The model's output, taken apart while it streams: reasoning, content, tool calls.

`TokenParser` reads token ids, where only real marker tokens count and their spellings are text; the
engine uses it. `TextParser` reads text, where the spellings are the markers. Both feed one machine,
and for any cutting into chunks the events add up to the same result. Tool markup is never shown,
and a call that was not finished is never reported as a call.

Nothing is generated or rendered here (`ds4jax.chat` does the opposite way); no JAX.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ds4jax.chat import StartState
from ds4jax.tokenizer import MARKER_SPELLINGS, Tokenizer
from ds4jax.tool_markup import (
    BRACKET,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    ParsedCall,
    Reasoning,
    ToolSection,
    TruncatedCall,
    make_call_id,
)

FinishReason = Literal["stop", "length", "tool_calls", "time_limit"]
Ending = Literal["stop", "length", "time_limit"]

_THINK_OPEN = MARKER_SPELLINGS["think_open"]
_THINK_CLOSE = MARKER_SPELLINGS["think_close"]
_DSML = MARKER_SPELLINGS["dsml"]
_MARKERS = re.compile("|".join(map(re.escape, (_THINK_OPEN, _THINK_CLOSE, _DSML))))

_TAIL = re.compile(r"\n{0,2}(?:</?)?\Z")  # what may belong to a tool section that follows


@dataclass(frozen=True, kw_only=True)
class ParsedOutput:
    """All of an output: what the events add up to."""

    reasoning: str
    content: str
    tool_calls: tuple[ParsedCall, ...]
    truncated_call: TruncatedCall | None
    matched_stop: str | None  # the stop string that ended the content
    anomalies: Mapping[str, int]  # what the model did wrong, by reason


def finish_reason(ended: Ending, output: ParsedOutput) -> FinishReason:
    """Why a turn ended, as told to the client.

    Args:
        ended: `stop` if the model ended it by itself or by a stop string.
    """
    if ended == "stop" and output.tool_calls and output.matched_stop is None:
        return "tool_calls"
    return ended


class TextParser:
    """Parser for text in which the spellings of markers are markers.

    Args:
        start: what the first character belongs to (`Prompt.start`).
        tools_declared: whether the prompt declared tools; if not, tool markup is plain text.
        stop_strings: end the content when one appears in it; never searched for in reasoning or
            in tool calls, nor across their borders.
        include_stop_string: whether the matched one is part of the content.
        make_id: gives the ids of calls.

    Attributes:
        done: the turn is over (stop string found); later input is ignored.
    """

    def __init__(
        self,
        *,
        start: StartState,
        tools_declared: bool,
        stop_strings: Sequence[str] = (),
        include_stop_string: bool = False,
        make_id: Callable[[], str] = make_call_id,
    ) -> None:
        self._machine = _Machine(
            start, tools_declared, _StopMatcher(stop_strings, include_stop_string), make_id
        )
        self._held = ""  # a tail that may become a marker

    @property
    def done(self) -> bool:
        return self._machine.done

    @property
    def output(self) -> ParsedOutput:
        """What was parsed so far; final after `finish`."""
        return self._machine.output()

    def push(self, text: str) -> list[Event]:
        """The events that more text gives."""
        text = self._held + text
        start = 0
        for match in _MARKERS.finditer(text):
            self._machine.text(text[start : match.start()])
            self._machine.marker(match.group())
            start = match.end()
        rest = text[start:]
        keep = _marker_prefix(rest)
        self._held = rest[len(rest) - keep :]
        self._machine.text(rest[: len(rest) - keep])
        return self._machine.take()

    def finish(self) -> list[Event]:
        """The events of the end of the output."""
        if self._machine.state != "tools":  # else it may be the beginning of a closing tag
            self._machine.text(self._held)
        self._held = ""
        self._machine.finish()
        return self._machine.take()


class TokenParser:
    """Parser for token ids, one at a time; markers are known by id alone.

    The end-of-sentence id is never part of the text. A turn marker or begin-of-sentence in the
    output is a failure of the model: it ends the turn and counts as the anomaly `role_marker`.

    Args:
        tokenizer: gives the bytes and the marker ids.
        start, tools_declared, stop_strings, include_stop_string, make_id: as for `TextParser`.

    Attributes:
        done: the turn is over (stop string found, or a turn marker); later input is ignored.
        reasoning_tokens: ids that came while the reasoning was open, `</think>` among them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        start: StartState,
        tools_declared: bool,
        stop_strings: Sequence[str] = (),
        include_stop_string: bool = False,
        make_id: Callable[[], str] = make_call_id,
    ) -> None:
        ids = tokenizer.markers
        self._markers = {
            ids.think_open: _THINK_OPEN,
            ids.think_close: _THINK_CLOSE,
            ids.dsml: _DSML,
        }
        self._turn_ids = {ids.bos, ids.user, ids.assistant}
        self._eos = ids.eos
        self._detokenizer = tokenizer.detokenizer()
        self._machine = _Machine(
            start,
            tools_declared,
            _StopMatcher(stop_strings, include_stop_string),
            make_id,
            bare_marker_opens=True,
        )
        self.reasoning_tokens = 0

    @property
    def done(self) -> bool:
        return self._machine.done

    @property
    def in_reasoning(self) -> bool:
        """Whether the next token belongs to the reasoning, as far as is known."""
        return self._machine.state == "reasoning"

    @property
    def output(self) -> ParsedOutput:
        """What was parsed so far; final after `finish`."""
        return self._machine.output()

    def push(self, token_id: int) -> list[Event]:
        """The events that one more token gives.

        Raises:
            TokenizerError: an id outside the vocabulary.
        """
        if self.done:
            return []
        self.reasoning_tokens += self.in_reasoning
        if token_id in self._turn_ids:
            self._machine.text(self._detokenizer.finish())
            self._machine.end_turn("role_marker")
        elif token_id in self._markers:
            self._machine.text(self._detokenizer.finish())
            self._machine.marker(self._markers[token_id])
        elif token_id != self._eos:
            self._machine.text(self._detokenizer.push(token_id))
        return self._machine.take()

    def finish(self) -> list[Event]:
        """The events of the end of the output."""
        self._machine.text(self._detokenizer.finish())
        self._machine.finish()
        return self._machine.take()


def _marker_prefix(text: str) -> int:
    """Length of the longest tail of `text` that begins a marker without being one."""
    for length in range(min(len(text), len(_THINK_CLOSE) - 1), 0, -1):
        tail = text[-length:]
        if any(m.startswith(tail) for m in (_THINK_OPEN, _THINK_CLOSE, _DSML)):
            return length
    return 0


class _StopMatcher:
    """Finds the stop string that is complete first; of several, the longest.

    One Knuth-Morris-Pratt automaton per string: every character costs the same, whatever is held.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        if any(not stop for stop in stops):
            raise ValueError(
                "stop_strings holds an empty string, each must have 1 to 256 characters"
            )
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._include = include
        self._matched = [0] * len(stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text that can be shown now, the stop string that was found)."""
        if not self._stops:
            return text, None
        buffer = self._held + text
        for pos in range(len(self._held), len(buffer)):
            complete = ""
            for i, (stop, borders) in enumerate(self._stops):
                k = self._matched[i]
                while k and stop[k] != buffer[pos]:
                    k = borders[k - 1]
                k += stop[k] == buffer[pos]
                self._matched[i] = k
                if k == len(stop):
                    complete = max(complete, stop, key=len)
            if complete:
                self._held = ""
                end = pos + 1
                return buffer[: end if self._include else end - len(complete)], complete
        keep = len(buffer) - max(self._matched)
        self._held = buffer[keep:]
        return buffer[:keep], None

    def flush(self) -> str:
        """What is held, as text; the matcher starts anew."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held


def _borders(text: str) -> list[int]:
    """For every prefix of `text`: length of its longest proper prefix that is also its tail."""
    out = [0] * len(text)
    for i in range(1, len(text)):
        k = out[i - 1]
        while k and text[i] != text[k]:
            k = out[k - 1]
        out[i] = k + (text[i] == text[k])
    return out


class _Machine:
    """The states reasoning, content and tools; takes stretches of text and markers."""

    def __init__(
        self,
        start: StartState,
        tools_declared: bool,
        stop: _StopMatcher,
        make_id: Callable[[], str],
        *,
        bare_marker_opens: bool = False,
    ) -> None:
        self.state: Literal["reasoning", "content", "tools"] = start
        self.done = False
        self._tools_declared = tools_declared
        self._stop = stop
        self._bare_opens = bare_marker_opens
        self._tail = ""  # newlines and an opening bracket that a tool section may claim
        self._blank = ""  # white space before any other content; dropped before a tool section
        self._content_seen = not tools_declared
        self._events: list[Event] = []
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._matched_stop: str | None = None
        self._truncated: TruncatedCall | None = None
        self._anomalies: Counter[str] = Counter()
        self._section = ToolSection(self._events, self._anomalies, make_id, bare_marker_opens)

    def take(self) -> list[Event]:
        """The events since the last call, texts of one kind joined."""
        out: list[Event] = []
        for event in self._events:
            last = out[-1] if out else None
            if isinstance(event, Reasoning) and isinstance(last, Reasoning):
                out[-1] = Reasoning(last.text + event.text)
            elif isinstance(event, Content) and isinstance(last, Content):
                out[-1] = Content(last.text + event.text)
            elif (
                isinstance(event, CallArguments)
                and isinstance(last, CallArguments)
                and event.index == last.index
            ):
                out[-1] = CallArguments(last.index, last.text + event.text)
            else:
                out.append(event)
        self._events.clear()
        return out

    def output(self) -> ParsedOutput:
        return ParsedOutput(
            reasoning="".join(self._reasoning),
            content="".join(self._content),
            tool_calls=tuple(self._section.complete),
            truncated_call=self._truncated,
            matched_stop=self._matched_stop,
            anomalies=dict(self._anomalies),
        )

    def text(self, text: str) -> None:
        if self.done or not text:
            return
        if self.state == "tools":
            self._section.text(text)
            return
        text = self._tail + text
        match = _TAIL.search(text) if self._tools_declared else None
        cut = match.start() if match else len(text)
        self._tail = text[cut:]
        self._show(text[:cut])

    def marker(self, spelling: str) -> None:
        if self.done:
            return
        if self.state == "tools":
            if spelling == _DSML:
                self._section.marker()
            else:
                self._section.text(spelling)
        elif spelling == _DSML:
            self._tag_marker()
        elif (spelling == _THINK_OPEN) == (self.state == "reasoning"):  # dropped
            self._anomalies["repeated_think" if spelling == _THINK_OPEN else "stray_think_end"] += 1
        else:
            if spelling == _THINK_OPEN:
                self._anomalies["reopened_think"] += 1
            self._release_tail()
            self._leave_content()
            self.state = "content" if self.state == "reasoning" else "reasoning"

    def end_turn(self, anomaly: str) -> None:
        """The model broke off the turn."""
        self._anomalies[anomaly] += 1
        self.finish()
        self.done = True

    def finish(self) -> None:
        if self.done:
            return
        if self.state == "tools":
            self._truncated = self._section.truncated()
            return
        self._release_tail()
        if self._blank and not self.done:
            blank, self._blank = self._blank, ""
            self._content_seen = True
            self._show_content(blank)
        self._leave_content()

    def _tag_marker(self) -> None:
        bracket = BRACKET.search(self._tail)
        if not self._tools_declared or not (bracket or self._bare_opens):
            self.text(_DSML)
            return
        opening = bracket.group() if bracket else ""
        self._tail = self._tail.removesuffix(opening).removesuffix("\n\n")
        self._release_tail()
        self._leave_content()
        if self.done:  # what was released completed a stop string
            return
        if self.state == "reasoning":
            self._anomalies["call_in_reasoning"] += 1
        self.state = "tools"
        self._section.marker(opening)

    def _release_tail(self) -> None:
        tail, self._tail = self._tail, ""
        self._show(tail)

    def _show(self, text: str) -> None:
        if not text or self.done:
            return
        if self.state == "reasoning":
            self._reasoning.append(text)
            self._events.append(Reasoning(text))
            return
        if not self._content_seen:
            if not text.strip():
                self._blank += text
                return
            text, self._blank = self._blank + text, ""
            self._content_seen = True
        self._show_content(text)

    def _show_content(self, text: str) -> None:
        shown, found = self._stop.feed(text)
        self._emit_content(shown)
        if found is not None:
            self._matched_stop = found
            self.done = True

    def _leave_content(self) -> None:
        if self.state == "content" and not self.done:
            self._emit_content(self._stop.flush())

    def _emit_content(self, text: str) -> None:
        if text:
            self._content.append(text)
            self._events.append(Content(text))


__all__ = [
    "CallArguments", "CallEnd", "CallStart", "Content", "Event", "FinishReason", "ParsedCall",
    "ParsedOutput", "Reasoning", "TextParser", "TokenParser", "TruncatedCall", "finish_reason",
    "make_call_id",
]  # fmt: skip
