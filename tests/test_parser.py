"""The output parser against recorded outputs, in every chunking, and as the renderer's inverse."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tools import real_tokenizer, toy_tokenizer, vectors

from ds4jax import chat
from ds4jax.chat_request import ChatRequest, Message, Tool, ToolCall, dump_json
from ds4jax.parser import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    ParsedOutput,
    Reasoning,
    TextParser,
    TokenParser,
    TruncatedCall,
    finish_reason,
    make_call_id,
)  # fmt: skip
from ds4jax.tokenizer import OFFICIAL_IDS, Tokenizer, TokenizerError

CASES = vectors("chat/parse.json")["cases"]
ID_CASES = vectors("chat/parse_ids.json")["cases"]
OPEN, CLOSE, TAG = "<think>", "</think>", "｜DSML｜"


def plain(output: ParsedOutput) -> dict[str, Any]:
    """An output in the form of the recorded ones."""
    cut = output.truncated_call
    return {
        "reasoning": output.reasoning,
        "content": output.content,
        "tool_calls": [
            {"name": c.name, "arguments": json.loads(c.arguments)} for c in output.tool_calls
        ],
        "truncated_call": None if cut is None else {"name": cut.name},
    }


def joined(events: Iterable[Event]) -> list[Event]:
    """Neighbouring events of one kind joined, so that chunking does not show."""
    out: list[Any] = []
    for event in events:
        last = out[-1] if out else None
        same = type(last) is type(event) and getattr(event, "index", 0) == getattr(last, "index", 0)
        if same and isinstance(event, Reasoning | Content):
            out[-1] = type(event)(last.text + event.text)
        elif same and isinstance(event, CallArguments):
            out[-1] = CallArguments(event.index, last.text + event.text)
        else:
            out.append(event)
    return out


def check_events(events: Sequence[Event], output: ParsedOutput) -> None:
    """The events add up to the output; calls that ended are the complete ones."""
    assert "".join(e.text for e in events if isinstance(e, Reasoning)) == output.reasoning
    assert "".join(e.text for e in events if isinstance(e, Content)) == output.content
    assert all(e.text for e in events if isinstance(e, Reasoning | Content | CallArguments))
    starts = [e for e in events if isinstance(e, CallStart)]
    assert [e.index for e in starts] == list(range(len(starts)))
    ended = [e.index for e in events if isinstance(e, CallEnd)]
    assert ended == list(range(len(output.tool_calls)))
    for call, start in zip(output.tool_calls, starts, strict=False):
        pieces = [e.text for e in events if isinstance(e, CallArguments) and e.index == start.index]
        assert (start.id, start.name, "".join(pieces)) == (call.id, call.name, call.arguments)
        assert isinstance(json.loads(call.arguments), dict)


def parse_text(chunks: Iterable[str], **options: Any) -> tuple[list[Event], ParsedOutput]:
    ids = iter(f"id{i}" for i in range(1000))
    parser = TextParser(**{"make_id": lambda: next(ids), **options})
    events = [event for chunk in chunks for event in parser.push(chunk)]
    events += parser.finish()
    assert parser.finish() == []
    check_events(events, parser.output)
    return joined(events), parser.output


def parse_ids(
    ids: Iterable[int], tok: Tokenizer | None = None, **options: Any
) -> tuple[list[Event], ParsedOutput]:
    names = iter(f"id{i}" for i in range(1000))
    parser = TokenParser(tok or real_tokenizer(), **{"make_id": lambda: next(names), **options})
    events = [event for token in ids for event in parser.push(token)]
    events += parser.finish()
    check_events(events, parser.output)
    return joined(events), parser.output


def random_chunks(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(0, 12))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def options_of(case: dict[str, Any]) -> dict[str, Any]:
    start = "reasoning" if case["thinking"] else "content"
    return {"start": start, "tools_declared": case["tools_declared"]}


# -- recorded vectors ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["id"])
def test_recorded_outputs_in_every_chunking(case: dict[str, Any]) -> None:
    raw = case["raw"]
    rng = random.Random(case["id"])
    chunkings = [[raw], list(raw), [*raw, ""], *(random_chunks(raw, rng) for _ in range(6))]
    if case["chunks"] != "every_char":
        assert "".join(case["chunks"]) == raw
        chunkings.append(case["chunks"])
    whole = parse_text([raw], **options_of(case))
    for chunks in chunkings:
        events, output = parse_text(chunks, **options_of(case))
        assert plain(output) == case["expected"], chunks
        assert events == whole[0]


# a turn marker inside a value is text in text mode only; as a token it ends the turn
AS_TOKENS = [case for case in CASES if "<｜User｜>" not in case["raw"]]


@pytest.mark.parametrize("case", AS_TOKENS, ids=lambda c: c["id"])
def test_recorded_outputs_as_tokens(case: dict[str, Any]) -> None:
    for tok in (real_tokenizer(), toy_tokenizer()):
        ids = tok.encode(case["raw"], markers=True)
        events, output = parse_ids(ids, tok, **options_of(case))
        assert plain(output) == case["expected"]
        assert events == parse_text([case["raw"]], **options_of(case))[0]


@pytest.mark.parametrize("case", ID_CASES, ids=lambda c: c["id"])
def test_recorded_ids(case: dict[str, Any]) -> None:
    assert plain(parse_ids(case["ids"], **options_of(case))[1]) == case["expected"]


def test_all_vectors_are_there() -> None:
    assert (len(CASES), len(AS_TOKENS), len(ID_CASES)) == (50, 49, 8)


# -- any chunking, any output ----------------------------------------------------------------------

_BITS = [
    OPEN, CLOSE, "<" + TAG, "</" + TAG, TAG, "<", "</", "｜", "<｜DS", "\n", "\n\n", " ", "a", "bc",
    "é", "👩\u200d👧", "tool_calls>", " calls>", 'invoke name="f">', ' invoke name="g">',
    'invoke name="h"/>', 'parameter name="k" string="true">', 'parameter name="k" string="false">',
    'parameter name="m">', ' parameter name="n" string="true"/>', "parameter>", "invoke>", "thing>",
    ">", '"', '{"a": 1}', "12", "true", "\\", "\x01", "STOP", "ST", "invoke", 'invoke name="">',
    "<｜User｜>",
]  # fmt: skip
raws = st.lists(st.sampled_from(_BITS), max_size=30).map("".join)
parser_options = st.fixed_dictionaries(
    {
        "start": st.sampled_from(["reasoning", "content"]),
        "tools_declared": st.booleans(),
        "stop_strings": st.sampled_from([(), ("STOP",), ("TS", "STOP", "aST"), ("\n\n", "<")]),
        "include_stop_string": st.booleans(),
    }
)


@given(raws, parser_options, st.randoms(use_true_random=False))
@settings(max_examples=400, deadline=None)
def test_chunking_does_not_show(raw: str, options: dict[str, Any], rng: random.Random) -> None:
    whole = parse_text([raw], **options)
    assert parse_text(raw, **options) == whole
    for _ in range(3):
        assert parse_text(random_chunks(raw, rng), **options) == whole


@given(raws, parser_options)
@settings(max_examples=300, deadline=None)
def test_tokens_give_what_text_gives(raw: str, options: dict[str, Any]) -> None:
    """Where the text spells whole tags, both modes agree (bare markers are told apart below)."""
    raw = raw.replace("<｜User｜>", "")
    raw = re.sub(f"(?<!<)(?<!</){TAG}", f"<{TAG}", raw)
    raw = raw.replace(TAG + "<" + TAG, TAG)
    tok = toy_tokenizer()
    expected = parse_text([raw], **options)
    assert parse_ids(tok.encode(raw, markers=True), tok, **options) == expected


@given(raws, parser_options)
@settings(max_examples=300, deadline=None)
def test_markup_never_shows(raw: str, options: dict[str, Any]) -> None:
    tok = toy_tokenizer()
    _, output = parse_ids(tok.encode(raw, markers=True), tok, **{**options, "tools_declared": True})
    for text in (output.reasoning, output.content):
        assert TAG not in text and OPEN not in text and CLOSE not in text


@given(st.lists(st.integers(0, 273), max_size=60), parser_options)
@settings(max_examples=300, deadline=None)
def test_any_ids_at_all(ids: list[int], options: dict[str, Any]) -> None:
    parse_ids(ids, toy_tokenizer(), **options)


# -- the renderer's inverse ------------------------------------------------------------------------

_WORDS = [
    *OFFICIAL_IDS, "<", "</", "\n", "\n\n", " ", "word", "é漢👩\u200d👧", '"', "\\", "tool_calls>",
    "parameter>", "</parameter>",
]  # fmt: skip
texts = st.lists(st.one_of(st.sampled_from(_WORDS), st.text(max_size=4)), max_size=8).map("".join)
names = st.text(min_size=1, max_size=8).filter(
    lambda n: not any(c in '"<>' or ord(c) < 32 or 127 <= ord(c) < 160 for c in n)
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
calls = st.lists(st.tuples(names, st.dictionaries(names, values, max_size=4)), max_size=3)


@given(texts, texts, calls, st.booleans(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_parsing_undoes_rendering(
    reasoning: str, content: str, made: list[Any], thinking: bool, real: bool
) -> None:
    """Token mode: whatever the texts spell, the reply comes back as it was (any vocabulary)."""
    if made and not content.strip():
        content = ""  # the one thing that is not kept: white space before a call
    tok = real_tokenizer() if real else toy_tokenizer()
    reply = Message(
        role="assistant", content=content, reasoning=reasoning if thinking else "",
        tool_calls=tuple(ToolCall(name=n, arguments=dump_json(a)) for n, a in made),
    )  # fmt: skip
    question = Message(role="user", content="q")
    tools = (Tool.from_function({"name": "f"}),)

    def ids(*messages: Message) -> list[int]:
        request = ChatRequest(messages=messages, tools=tools, thinking=thinking, effort="low")
        return tok.encode_pieces(chat.render(request, "v4-0731").pieces)

    asked = ids(question)
    replied = ids(question, reply)
    end = len(replied) - 1 - replied[::-1].index(tok.markers.eos)
    assert replied[: len(asked)] == asked
    start = "reasoning" if thinking else "content"
    _, output = parse_ids(replied[len(asked) : end], tok, start=start, tools_declared=True)
    assert (output.reasoning, output.content) == (reply.reasoning, content)
    assert [(c.name, json.loads(c.arguments)) for c in output.tool_calls] == made
    assert output.truncated_call is None and not output.anomalies


# -- streaming -------------------------------------------------------------------------------------

CALL = (
    f'\n\n<{TAG}tool_calls>\n<{TAG}invoke name="run">\n'
    f'<{TAG}parameter name="code" string="true">a <b>\n"c"</{TAG}parameter>\n'
    f'<{TAG}parameter name="n" string="false">[1,  2]</{TAG}parameter>\n'
    f"</{TAG}invoke>\n</{TAG}tool_calls>"
)


def test_text_is_not_held_longer_than_needed() -> None:
    parser = TextParser(start="content", tools_declared=True)
    steps = [
        ("Hello", "Hello"), (" there", " there"), ("\n", ""), ("\n", ""), ("\n", "\n"),
        ("x<", "\n\nx"), ("b", "<b"), ("</", ""), ("t", ""), ("o", "</to"), ("<｜DSM", ""),
        ("x", "<｜DSMx"), ("｜", ""), ("y", "｜y"),
    ]  # fmt: skip
    for pushed, shown in steps:
        assert parser.push(pushed) == ([Content(shown)] if shown else []), pushed


def test_a_token_is_held_only_for_brackets_and_newlines() -> None:
    tok = real_tokenizer()
    parser = TokenParser(tok, start="content", tools_declared=True)
    for text, shown in [("Hi", "Hi"), ("<", ""), ("think", "<think"), (">", ">"), ("\n\n", "")]:
        [token] = tok.encode(text, markers=False)
        assert parser.push(token) == ([Content(shown)] if shown else [])
    assert parser.finish() == [Content("\n\n")]


def test_nothing_is_held_for_tools_that_are_not_there() -> None:
    parser = TextParser(start="content", tools_declared=False)
    assert parser.push(" \n\n") == [Content(" \n\n")]


def test_string_values_stream_and_others_come_whole() -> None:
    _, output = parse_text([CALL], start="content", tools_declared=True)
    parser = TextParser(start="content", tools_declared=True)
    pieces: list[str] = []
    for char in CALL:
        pieces += [e.text for e in parser.push(char) if isinstance(e, CallArguments)]
    assert pieces[:4] == ['{"code": "', "a", " ", "<b"]
    assert ', "n": [1,  2]' in pieces
    assert "".join(pieces) == output.tool_calls[0].arguments
    assert json.loads(output.tool_calls[0].arguments) == {"code": 'a <b>\n"c"', "n": [1, 2]}


def test_no_prefix_of_a_call_is_a_call() -> None:
    _, whole = parse_text([CALL], start="content", tools_declared=True)
    done = CALL.index(f"</{TAG}invoke>") + len(f"</{TAG}invoke>")
    opened = CALL.index("run") + len('run">')
    for cut in range(len(CALL)):
        events, output = parse_text([CALL[:cut]], start="content", tools_declared=True)
        assert len(output.tool_calls) == (cut >= done)
        if cut < done:
            pieces = "".join(e.text for e in events if isinstance(e, CallArguments))
            assert whole.tool_calls[0].arguments.startswith(pieces)
            seen = CALL.index("invoke") + len("invoke")
            name = TruncatedCall("run" if cut >= opened else None) if cut >= seen else None
            assert output.truncated_call == name
        else:
            assert output.truncated_call is None


def test_ids_of_calls() -> None:
    made = {make_call_id() for _ in range(1000)}
    assert len(made) == 1000 and all(len(i) == 29 for i in made)
    parser = TextParser(start="content", tools_declared=True)
    events = parser.push(CALL) + parser.finish()
    [start] = [e for e in events if isinstance(e, CallStart)]
    assert parser.output.tool_calls[0].id == start.id
    again = TextParser(start="content", tools_declared=True)
    again.push(CALL)
    assert again.output.tool_calls[0].id != start.id


# -- details of the tool section -------------------------------------------------------------------


def section(body: str) -> ParsedOutput:
    return parse_text([f"<{TAG}tool_calls>{body}"], start="content", tools_declared=True)[1]


def param(value: str, attributes: str = ' string="true"') -> str:
    return f'<{TAG}parameter name="k"{attributes}>{value}</{TAG}parameter>'


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (param(f"x <{TAG}thing> y </{TAG}thing> z"), f"x <{TAG}thing> y </{TAG}thing> z"),
        (param(f'<{TAG}invoke name="g">'), f'<{TAG}invoke name="g">'),
        (param(f"<{TAG}<{TAG}x"), f"<{TAG}<{TAG}x"),
        (param(f"<{TAG}parameter>"), f"<{TAG}parameter>"),
        (param(f"<{TAG}" + "p" * 9000), f"<{TAG}" + "p" * 9000),
        (param(f"a {TAG} b"), f"a {TAG} b"),
        (param(OPEN + CLOSE), OPEN + CLOSE),
        (param("</"), "</"),
        (param("<"), "<"),
        (param("\x00\u2028\\\"\t"), "\x00\u2028\\\"\t"),
        (param(" 1 ", ' string="false"'), 1),
        (param("\n[1]\n", ""), [1]),
        (param("1", ' string="maybe"'), 1),
        (param("1e999", ' string="false"'), float("inf")),
        (param('"\\ud83d"', ' string="false"'), "\ud83d"),
        (param("-", ' string="false"'), "-"),
        (param("[" * 9999, ""), "[" * 9999),
        (param("x", ' string = "TRUE" type="y"'), "x"),
        (f'<{TAG}parameter name="k" string="true"/>', ""),
    ],
)  # fmt: skip
def test_values(body: str, expected: Any) -> None:
    output = section(f'<{TAG}invoke name="f">{body}</{TAG}invoke>')
    assert json.loads(output.tool_calls[0].arguments) == {"k": expected}


@pytest.mark.parametrize(
    ("body", "calls", "cut"),
    [
        (f'<{TAG}invoke name="f"><{TAG}invoke name="g"></{TAG}invoke>', ["f", "g"], None),
        (f'<{TAG}invoke name="f"></{TAG}function_calls>', ["f"], None),
        (f'<{TAG}invoke name="f"></{TAG}thing>', [], TruncatedCall("f")),
        (f'<{TAG}invoke name="f">' + param("x"), [], TruncatedCall("f")),
        (f'<{TAG}invoke name="a<b"></{TAG}invoke>', [], None),
        (f"<{TAG}invoke></{TAG}invoke>", [], None),
        (f"{param('x')}</{TAG}invoke>", [], None),
        (f'<{TAG}invoke name="f', [], TruncatedCall(None)),
        (f"</{TAG}invoke", [], None),
        (f'text <{TAG}invoke name="f" /> text', ["f"], None),
        (f'<{TAG}\tinvoke\tname = "f"></{TAG} invoke >', ["f"], None),
    ],
)
def test_calls(body: str, calls: list[str], cut: TruncatedCall | None) -> None:
    output = section(body)
    assert [c.name for c in output.tool_calls] == calls
    assert output.truncated_call == cut
    assert output.content == ""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('\n {"a": [1, {"b": null}]} \n', {"a": [1, {"b": None}]}),
        ("[1]", {}), ("text", {}), ('{"a": NaN}', {}), ("", {}),
        (f'<{TAG}thing>{{"a": 1}}', {"a": 1}),
        ('{"a": 1}' + param("x"), {"k": "x"}),
    ],
)  # fmt: skip
def test_bodies(body: str, expected: Any) -> None:
    output = section(f'<{TAG}invoke name="f">{body}</{TAG}invoke>')
    assert json.loads(output.tool_calls[0].arguments) == expected


def test_closing_tag_alone_is_hidden() -> None:
    for tag in (f"</{TAG}tool_calls>", f"</{TAG}"):
        _, output = parse_text([f"Done.\n\n{tag} more"], start="content", tools_declared=True)
        assert output.content == "Done."


def test_bare_marker() -> None:
    """Without its bracket the spelling is text; the token is markup all the same."""
    raw = f'Look {TAG}invoke name="f"></{TAG}invoke>'
    assert parse_text([raw], start="content", tools_declared=True)[1].content == (
        f'Look {TAG}invoke name="f">'
    )
    tok = toy_tokenizer()
    ids = tok.encode(raw, markers=True)
    output = parse_ids(ids, tok, start="content", tools_declared=True)[1]
    assert output.content == "Look " and output.tool_calls[0].name == "f"


def test_a_dropped_marker_does_not_part_a_tag() -> None:
    for raw in (f"a<{CLOSE}{TAG}x>", f"a\n\n{CLOSE}<{TAG}x>", f"a\n{CLOSE}\n<{CLOSE}{TAG}x>"):
        assert parse_text([raw], start="content", tools_declared=True)[1].content == "a"


def test_white_space_before_a_call_across_reasoning() -> None:
    raw = f" \n{OPEN}why{CLOSE}\n\n\n<{TAG}x>"
    _, output = parse_text([raw], start="content", tools_declared=True)
    assert (output.reasoning, output.content) == ("why", "")
    _, output = parse_text([f" \n{OPEN}why{CLOSE}\n"], start="content", tools_declared=True)
    assert output.content == " \n\n"


def test_long_outputs_cost_the_same_per_character() -> None:
    """Quadratic work on any held or skipped text would take minutes here."""
    started = time.monotonic()
    size = 200_000
    for bit in ("\n", " ", "<", "a", f"<{TAG}", "S", f"<{TAG}invoke "):
        for before in ("", f'<{TAG}invoke name="f"><{TAG}parameter name="k" string="true">'):
            raw = before + bit * (size // len(bit) // 10)
            parser = TextParser(start="content", tools_declared=True, stop_strings=("SSSSSSST",))
            for char in raw:
                parser.push(char)
            parser.finish()
    assert time.monotonic() - started < 60


# -- stop strings ----------------------------------------------------------------------------------


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
       st.booleans(), st.integers(1, 30))  # fmt: skip
@settings(max_examples=400, deadline=None)
def test_the_stop_string_that_is_complete_first(
    text: str, stops: list[str], include: bool, size: int
) -> None:
    chunks = [text[i : i + size] for i in range(0, len(text), size)]
    options = {"stop_strings": stops, "include_stop_string": include}
    _, output = parse_text(chunks, start="content", tools_declared=False, **options)
    expected, matched = text, None
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            matched = max(found, key=len)
            expected = text[:end] if include else text[: end - len(matched)]
            break
    assert (output.content, output.matched_stop) == (expected, matched)


def stopped(raw: str, *stops: str, start: str = "content") -> tuple[str, str, str | None]:
    _, out = parse_text([raw], start=start, tools_declared=True, stop_strings=stops)
    return out.reasoning, out.content, out.matched_stop


def test_stop_strings_match_in_content_only() -> None:
    assert stopped(f"a END b{CLOSE}c END d", "END", start="reasoning") == ("a END b", "c ", "END")
    assert stopped(f"EN{OPEN}x{CLOSE}D", "END") == ("x", "END", None)
    assert stopped(f"EN<{TAG}x>D", "END") == ("", "EN", None)
    assert stopped(CALL, "run", "\n\n", "tool", "a <b>") == ("", "", None)
    assert stopped(f"x\n\n<{TAG}y>", "\n\n") == ("", "x", None)
    assert stopped("x\n\ny", "\n\n") == ("", "x", "\n\n")
    assert stopped("x\n\n", "\n\n") == ("", "x", "\n\n")
    assert stopped("x <", "<") == ("", "x ", "<")
    assert stopped(f"one{CLOSE}two", "onetwo") == ("", "", "onetwo")
    assert stopped(f"x\n\n\n<{TAG}y>", "x\n") == ("", "", "x\n")


def test_after_a_stop_string_the_turn_is_over() -> None:
    parser = TextParser(start="content", tools_declared=True, stop_strings=("END",))
    assert parser.push("a EN") == [Content("a ")]
    assert not parser.done
    assert parser.push("D" + CALL) == []
    assert parser.done and parser.push("more") == [] and parser.finish() == []
    assert parser.output.content == "a " and parser.output.tool_calls == ()


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty string"):
        TextParser(start="content", tools_declared=False, stop_strings=("a", ""))


# -- ends and counters -----------------------------------------------------------------------------


def test_finish_reasons() -> None:
    options = {"start": "content", "tools_declared": True}
    called = parse_text([CALL], **options)[1]
    cut = parse_text([CALL + f'<{TAG}invoke name="g">'], **options)[1]
    none = parse_text(["text"], **options)[1]
    assert finish_reason("stop", called) == finish_reason("stop", cut) == "tool_calls"
    assert finish_reason("length", called) == finish_reason("length", cut) == "length"
    assert finish_reason("time_limit", called) == "time_limit"
    assert finish_reason("stop", none) == "stop"


@pytest.mark.parametrize("marker", ["bos", "user", "assistant"])
def test_a_turn_marker_ends_the_turn(marker: str) -> None:
    for tok in (real_tokenizer(), toy_tokenizer()):
        parser = TokenParser(tok, start="content", tools_declared=True)
        events = [e for i in tok.encode("Hi\n\n", markers=False) for e in parser.push(i)]
        events += parser.push(getattr(tok.markers, marker))
        assert parser.done and parser.push(65) == [] and parser.finish() == []
        assert joined(events) == [Content("Hi\n\n")]
        assert parser.output.anomalies == {"role_marker": 1}


def test_a_turn_marker_inside_a_call_leaves_it_truncated() -> None:
    tok = toy_tokenizer()
    raw = CALL[: CALL.index('"c"')] + "<｜User｜>" + CALL
    output = parse_ids(tok.encode(raw, markers=True), tok, start="content", tools_declared=True)[1]
    assert output.tool_calls == () and output.truncated_call == TruncatedCall("run")


def test_end_of_sentence_is_no_text() -> None:
    tok = real_tokenizer()
    ids = [*tok.encode("a", markers=False), tok.markers.eos, *tok.encode("b", markers=False)]
    assert parse_ids(ids, start="content", tools_declared=False)[1].content == "ab"


def test_half_a_character_before_a_marker() -> None:
    tok = toy_tokenizer()
    ids = [0xF0, 0x9F, tok.markers.think_close, 0xE2, 0x82]
    output = parse_ids(ids, tok, start="reasoning", tools_declared=True)[1]
    assert (output.reasoning, output.content) == ("\ufffd", "\ufffd")


def test_reasoning_tokens_are_counted() -> None:
    tok = real_tokenizer()
    parser = TokenParser(tok, start="reasoning", tools_declared=False)
    states = []
    for token in tok.encode(f"one two{CLOSE}three{OPEN}four{CLOSE}", markers=True):
        states.append(parser.in_reasoning)
        parser.push(token)
    assert parser.reasoning_tokens == sum(states) == 5
    assert parser.output.anomalies == {"reopened_think": 1}


def test_anomalies_are_counted() -> None:
    raw = f'{OPEN}r{OPEN}<{TAG}invoke name="f"></{TAG}tool_calls><{TAG}what>'
    output = parse_text([raw], start="reasoning", tools_declared=True)[1]
    assert output.anomalies == {
        "repeated_think": 2, "call_in_reasoning": 1, "unclosed_call": 1, "unknown_tag": 1,
    }  # fmt: skip
    output = parse_text([f"a{CLOSE}b"], start="content", tools_declared=True)[1]
    assert output.anomalies == {"stray_think_end": 1}


def test_ids_outside_the_vocabulary() -> None:
    parser = TokenParser(toy_tokenizer(), start="content", tools_declared=True)
    with pytest.raises(TokenizerError, match=r"must be in 0\.\.273"):
        parser.push(274)
