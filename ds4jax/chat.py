"""Chat requests to prompts: the message format of DeepSeek-V4.

`render` turns a `ChatRequest` into pieces of text and markers; `Tokenizer.encode_pieces` turns
those into ids. Markers come from here alone: whatever a message says stays ordinary text, so nobody
can open a turn by typing its marker. Three profiles exist, one per release of the prompt format;
V4.1 is rendered as text only (its vocabulary differs).

Requests and their checks are `ds4jax.chat_request`, reading the model's answer is `ds4jax.parser`.
This module generates nothing and does not import JAX.

Source: prompt encoder published with the DeepSeek-V4 weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from ds4jax import chat_texts
from ds4jax.chat_request import (
    DEFAULT_EFFORT,
    EFFORT_ALIASES,
    PROFILES,
    ChatError,
    ChatRequest,
    ChatUnsupportedError,
    Message,
    Profile,
    ToolCall,
    call_parameters,
    join_parts,
    problems,
)
from ds4jax.tokenizer import MARKER_SPELLINGS, Piece

StartState = Literal["reasoning", "content"]

_EFFORT_PREFIX: Mapping[str, Mapping[str, str]] = {
    "v4-preview": {"low": "", "high": "", "max": chat_texts.EFFORT_A},
    "v4-0731": {"low": "", "high": chat_texts.EFFORT_A, "max": chat_texts.EFFORT_B},
}
_EFFORT_V41 = {"low": 50, "high": 75, "max": 100}
_SYSTEM_V41 = "<｜System｜>"
_REAL_MARKERS = re.compile("(｜DSML｜|</?think>)")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A rendered prompt and what the output parser must know about it."""

    pieces: tuple[Piece, ...]
    start: StartState  # what the first generated token belongs to
    tools_declared: bool
    profile: Profile

    @property
    def text(self) -> str:
        """The prompt as text; ids must be made from `pieces`, not from this."""
        return "".join(piece.text for piece in self.pieces)


# -- rendering -------------------------------------------------------------------------------------


def render(request: ChatRequest, profile: Profile) -> Prompt:
    """The prompt of a request, up to where the model continues.

    Raises:
        ChatError: the request breaks a rule; all violations at once.
        ChatUnsupportedError: tool choice `required` or a named tool, and response format `regex`,
            which need constrained decoding and have no prompt text.
    """
    if found := problems(request, profile):
        raise ChatError(found)
    if request.tool_choice.mode in ("required", "named"):
        raise ChatUnsupportedError(
            f"tool_choice.{request.tool_choice.mode}",
            f"tool_choice {request.tool_choice.mode} needs constrained decoding, which does not"
            " exist yet; use auto or none",
        )
    if request.response_format.kind == "regex":
        raise ChatUnsupportedError(
            "response_format.regex",
            "response_format regex needs constrained decoding, which does not exist yet; use text",
        )
    return _Renderer(request, profile).prompt()


@dataclass
class _Turn:
    """One turn after normalisation; `items` are the merged texts of a user turn."""

    kind: Literal["user", "assistant", "latest_reminder", "system"]
    message: Message
    items: list[Message] = field(default_factory=list)

    @property
    def is_real_user(self) -> bool:
        return self.kind == "system" or any(m.role != "tool" for m in self.items)


class _Renderer:
    """State of one rendering: the pieces so far."""

    def __init__(self, request: ChatRequest, profile: Profile) -> None:
        self.request = request
        self.profile = profile
        self.spaced = " " if profile == "v4.1" else ""  # after the marker in tool tags
        self.pieces: list[Piece] = []
        self.keep_all = not request.drop_thinking or bool(request.declared_tools)

    def text(self, text: str) -> None:
        if text:
            self.pieces.append(Piece(text))

    def marker(self, name: str) -> None:
        self.pieces.append(Piece(MARKER_SPELLINGS[name], True))

    def text_with_markers(self, text: str) -> None:
        """A text of ours in which the spellings of markers are markers."""
        for i, part in enumerate(_REAL_MARKERS.split(text)):
            if part:
                self.pieces.append(Piece(part, i % 2 == 1))

    def prompt(self) -> Prompt:
        system, turns = _normalise(self.request, self.profile)
        self.marker("bos")
        self._head(system)
        real = [i for i, turn in enumerate(turns) if turn.kind != "assistant" and turn.is_real_user]
        last_user = max(real, default=-1)
        for i, turn in enumerate(turns):
            keep = self.keep_all or (self.profile == "v4.1" and i > last_user)
            self._turn(turn, keep=keep)
        start = self._generation(turns[-1].message if turns else None)
        return Prompt(
            pieces=tuple(self.pieces),
            start=start,
            tools_declared=bool(self.request.declared_tools),
            profile=self.profile,
        )

    def _head(self, system: str | None) -> None:
        """Effort prefix and system block."""
        effort = self._effort_text() if self.request.thinks else ""
        tools = self.request.declared_tools
        response = self.request.response_format
        empty = not (system or tools or response.kind != "text")
        if self.profile == "v4.1" and (effort or not empty):
            self.pieces.append(Piece(_SYSTEM_V41, True))
        self.text(effort)
        self.text(system or "")
        if tools:
            block = chat_texts.TOOLS_BLOCK_V41 if self.spaced else chat_texts.TOOLS_BLOCK_V4
            before, _, after = block.partition("{tool_schemas}")
            self.text("\n\n")
            self.text_with_markers(before)
            self.text("\n".join(tool.declaration for tool in tools))
            self.text_with_markers(after)
        if response.kind == "json_object":
            self.text("\n\n" + chat_texts.RESPONSE_JSON_OBJECT)
        elif response.kind == "json_schema":
            before, _, after = chat_texts.RESPONSE_SCHEMA.partition("{schema}")
            self.text(f"\n\n{before}{response.schema}{after}")

    def _effort_text(self) -> str:
        effort = DEFAULT_EFFORT if self.request.effort is None else self.request.effort
        if self.profile != "v4.1":
            return _EFFORT_PREFIX[self.profile][EFFORT_ALIASES[str(effort)]]
        level = _EFFORT_V41[EFFORT_ALIASES[effort]] if isinstance(effort, str) else effort
        return chat_texts.EFFORT_V41.replace("{effort}", str(level))

    def _turn(self, turn: _Turn, *, keep: bool) -> None:
        if turn.kind == "assistant":
            self._assistant(turn.message, keep=keep)
        elif turn.kind == "user":
            self.marker("user")
            self.text(join_parts(map(_user_item, turn.items)))
        elif turn.kind == "latest_reminder":
            self.marker("latest_reminder")
            self.text(turn.message.content)
        else:
            self.pieces.append(Piece(_SYSTEM_V41, True))
            self.text(turn.message.content)

    def _assistant(self, message: Message, *, keep: bool) -> None:
        self.marker("assistant")
        if self.request.thinks and (keep or message.prefix):
            self.marker("think_open")
            self.text(message.reasoning)
            if message.prefix and not message.content:
                return  # continued inside its reasoning
        self.marker("think_close")
        self.text(message.content)
        if message.prefix:
            return
        if message.tool_calls:
            self._calls(message.tool_calls)
        self.marker("eos")

    def _calls(self, calls: Sequence[ToolCall]) -> None:
        block = "calls" if self.spaced else "tool_calls"
        self.text("\n\n")
        self._tag("<", f"{block}>\n")
        for call in calls:
            self._tag("<", f'invoke name="{call.name}">\n')
            for i, (key, is_string, value) in enumerate(call_parameters(call.arguments)):
                string = "true" if is_string else "false"
                self.text("\n" if i else "")
                self._tag("<", f'parameter name="{key}" string="{string}">')
                self.text(value)
                self._tag("</", "parameter>")
            self.text("\n")
            self._tag("</", "invoke>\n")
        self._tag("</", f"{block}>")

    def _tag(self, opening: str, rest: str) -> None:
        self.text(opening)
        self.marker("dsml")
        self.text(self.spaced + rest)

    def _generation(self, last: Message | None) -> StartState:
        """What follows the last turn; returns where the model's output starts."""
        thinks = self.request.thinks
        if last is not None and last.prefix:
            return "reasoning" if thinks and not last.content else "content"
        task = last.task if last is not None else None
        if task is not None and task != "action":
            self.pieces.append(Piece(f"<｜{task}｜>", True))
            return "content"
        self.marker("assistant")
        self.marker("think_open" if thinks else "think_close")
        if task == "action":
            self.pieces.append(Piece("<｜action｜>", True))
        return "reasoning" if thinks else "content"


def _user_item(message: Message) -> str:
    if message.role == "tool":
        return chat_texts.TOOL_RESULT_OPEN + message.content + chat_texts.TOOL_RESULT_CLOSE
    return message.content


def _normalise(request: ChatRequest, profile: Profile) -> tuple[str | None, list[_Turn]]:
    """(joined system text or None, turns): the rules of placement, merging and ordering."""
    system: list[str] = []
    turns: list[_Turn] = []
    user_seen = False
    order: dict[str, int] = {}  # id -> position of the call in the last assistant message with any
    for message in request.messages:
        kind = "user" if message.role == "tool" else message.role
        if kind == "system":
            if user_seen and request.system_placement == "as_user":
                kind = "user"
            elif profile != "v4.1" or not turns:
                system.append(message.content)
                continue
        user_seen = user_seen or kind == "user"
        if kind == "user" and turns and turns[-1].kind == "user":
            turns[-1].items.append(message)
            turns[-1].message = message
        else:
            turns.append(_Turn(kind, message, [message] if kind == "user" else []))
        if message.tool_calls:
            order = {call.id: i for i, call in reversed(list(enumerate(message.tool_calls)))}
        if message.role == "tool":
            _sort_results(turns[-1].items, order)
    return (join_parts(system) if system else None), turns


def _sort_results(items: list[Message], order: Mapping[str, int]) -> None:
    """Put the results among `items` into the order of their calls; other items stay in place."""
    places = [i for i, m in enumerate(items) if m.role == "tool"]
    results = sorted((items[i] for i in places), key=lambda m: order.get(m.tool_call_id, 0))
    for i, message in zip(places, results, strict=True):
        items[i] = message


# -- profile ---------------------------------------------------------------------------------------


class ProfileChoice(NamedTuple):
    """The profile of a model, what it was concluded from, and a warning if it is a guess."""

    profile: Profile
    source: str
    warning: str | None = None


def detect_profile(
    option: str | None = None,
    *,
    checkpoint: Path | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> ProfileChoice:
    """Which prompt format a model was trained on.

    In this order: an explicit option; the encoder that lies in the checkpoint directory
    (`encoding/encoding_dsv4.py`); a date in the GGUF keys `general.name`, `general.version`; else
    `v4-0731`, with a warning.

    Args:
        option: a profile name, or None or `auto` to detect it.
        checkpoint: directory of the checkpoint, if the model is one.
        metadata: GGUF metadata, if the model is such a file.

    Raises:
        ValueError: an unknown name.
    """
    if option not in (None, "auto"):
        for profile in get_args(Profile):
            if option == profile:
                return ProfileChoice(profile, "option")
        raise ValueError(f"chat profile is {option!r}, must be auto or {', '.join(PROFILES)}")
    if checkpoint is not None:
        encoder = checkpoint / "encoding" / "encoding_dsv4.py"
        if encoder.is_file():
            text = encoder.read_text(encoding="utf-8", errors="replace")
            if "REASONING_EFFORT_PROMPTS" in text:
                return ProfileChoice("v4-0731", str(encoder))
            if "REASONING_EFFORT_MAX" in text:
                return ProfileChoice("v4-preview", str(encoder))
    for key in ("general.name", "general.version"):
        value = str((metadata or {}).get(key, ""))
        if any(_is_0731_or_later(date) for date in _dates(value)):
            return ProfileChoice("v4-0731", f"{key} = {value!r}")
    return ProfileChoice(
        "v4-0731",
        "default",
        "nothing in the model tells its prompt format: taking v4-0731; for a release of April 2026"
        " give --chat-profile v4-preview",
    )


def _dates(text: str) -> Iterator[tuple[int, int, int]]:
    """(year or 0, month, day) of all that reads as 2026-07-31, 20260731 or 0731."""
    for match in re.finditer(r"(?<!\d)(?:(20\d\d)[-_.]?)?(\d\d)[-_.]?(\d\d)(?!\d)", text):
        year, month, day = int(match[1] or 0), int(match[2]), int(match[3])
        if 1 <= month <= 12 and 1 <= day <= 31:
            yield year, month, day


def _is_0731_or_later(date: tuple[int, int, int]) -> bool:
    year, month, day = date
    return (year or 2026, month, day) >= (2026, 7, 31)
