"""Prompts against recorded ones, the rules one by one, and refusals."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tools import real_tokenizer, toy_tokenizer, vectors

from ds4jax import chat, chat_texts
from ds4jax.chat_json import REQUEST_FIELDS, chat_request_from_json
from ds4jax.chat_request import (
    ChatError,
    ChatRequest,
    ChatUnsupportedError,
    Message,
    Tool,
    ToolCall,
    ToolChoice,
    dump_json,
    problems,
    strict_json,
    unsupported_features,
)  # fmt: skip
from ds4jax.tokenizer import OFFICIAL_IDS

CASES = vectors("chat/encode.json")["cases"]
CONSTANTS = vectors("chat/constants.json")


def request_of(case: dict[str, Any]) -> ChatRequest:
    return chat_request_from_json({k: v for k, v in case.items() if k in REQUEST_FIELDS})


def prompt(messages: list[dict[str, Any]], profile: str = "v4-0731", **fields: Any) -> str:
    fields = {"reasoning_effort": "low", **fields}
    request = chat_request_from_json({"messages": messages, **fields})
    return chat.render(request, profile).text


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(name: str, arguments: Any, call_id: str = "c") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"

# -- recorded vectors ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["id"])
def test_recorded_prompts(case: dict[str, Any]) -> None:
    rendered = chat.render(request_of(case), case["profile"])
    assert rendered.text == case["expected_prompt"]
    if case["expected_ids"] is not None:
        assert real_tokenizer().encode_pieces(rendered.pieces) == case["expected_ids"]
    assert rendered.tools_declared == ("### Available Tool Schemas" in rendered.text)
    if rendered.text.endswith(("<think>", "<think><｜action｜>")):
        assert rendered.start == "reasoning"
    elif "prefix" not in case["id"]:
        assert rendered.start == "content"


def test_all_vectors_are_there() -> None:
    assert len(CASES) == 74
    assert sum(c["expected_ids"] is None for c in CASES) == 6
    assert {c["profile"] for c in CASES} == {"v4-preview", "v4-0731", "v4.1"}


def test_fixed_texts() -> None:
    effort = CONSTANTS["effort_prefix"]
    texts = {
        "effort_high": chat_texts.EFFORT_A,
        "effort_max": chat_texts.EFFORT_B,
        "tools_v4": chat_texts.TOOLS_BLOCK_V4,
        "tools_v4.1": chat_texts.TOOLS_BLOCK_V41,
    }
    for name, text in texts.items():
        assert hashlib.sha256(text.encode()).hexdigest() == CONSTANTS["sha256_utf8"][name], name
    assert CONSTANTS["response_format_schema"] == chat_texts.RESPONSE_SCHEMA
    assert CONSTANTS["response_format_json_object"] == chat_texts.RESPONSE_JSON_OBJECT
    result = [chat_texts.TOOL_RESULT_OPEN, chat_texts.TOOL_RESULT_CLOSE]
    assert result == CONSTANTS["tool_result"]
    assert {s: i for s, i in CONSTANTS["special_tokens"].values()} == OFFICIAL_IDS
    for profile, levels in effort.items():
        for level, text in levels.items():
            rendered = prompt([user("x")], profile, reasoning_effort=level)
            marker = "<｜System｜>" if profile == "v4.1" else ""
            assert rendered == f"{BOS}{marker}{text}<｜User｜>x<｜Assistant｜><think>"


# -- rules -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("effort", "level"),
    [("minimal", "low"), ("medium", "low"), ("xhigh", "high"), (None, "high"), ("max", "max")],
)
@pytest.mark.parametrize("profile", ["v4-preview", "v4-0731", "v4.1"])
def test_effort_names(profile: str, effort: str | None, level: str) -> None:
    same = prompt([user("x")], profile, reasoning_effort=level)
    assert prompt([user("x")], profile, reasoning_effort=effort) == same


def test_effort_none_is_thinking_off() -> None:
    assert prompt([user("x")], reasoning_effort="none").endswith("<｜Assistant｜></think>")
    assert prompt([user("x")], reasoning_effort="none", thinking=False).endswith("</think>")


def test_effort_as_a_number() -> None:
    assert "Reasoning Effort: 33 (" in prompt([user("x")], "v4.1", reasoning_effort=33)
    for profile, value in (("v4-0731", 33), ("v4.1", 0), ("v4.1", 101)):
        with pytest.raises(ChatError, match=f"effort is {value}, must be one of low"):
            prompt([user("x")], profile, reasoning_effort=value)


def test_thinking_as_an_object() -> None:
    assert prompt([user("x")], thinking={"type": "disabled"}).endswith("</think>")
    assert prompt([user("x")], thinking={"type": "enabled"}).endswith("<think>")


def test_placement_of_later_system_messages() -> None:
    messages = [
        {"role": "system", "content": "S"}, user("a"), assistant("b"),
        {"role": "developer", "content": "R"}, user("c"),
    ]  # fmt: skip
    front = prompt(messages)
    assert front.startswith(f"{BOS}S\n\nR<｜User｜>a")
    as_user = prompt(messages, system_placement="as_user")
    assert as_user.startswith(f"{BOS}S<｜User｜>a")
    assert as_user.endswith(f"b{EOS}<｜User｜>R\n\nc<｜Assistant｜><think>")
    assert prompt(messages[:-1], system_placement="as_user").endswith(
        f"{EOS}<｜User｜>R<｜Assistant｜><think>"
    )


def test_adding_a_reminder_keeps_the_prefix_as_user() -> None:
    """What the option is for: the prompt so far stays a prefix of the next one."""
    messages = [{"role": "system", "content": "S"}, user("a")]
    before = prompt(messages, system_placement="as_user").removesuffix("<｜Assistant｜><think>")
    messages += [assistant("b"), {"role": "system", "content": "R"}, user("c")]
    assert prompt(messages, system_placement="as_user").startswith(before)
    assert not prompt(messages).startswith(before)


def test_results_follow_the_order_of_calls() -> None:
    messages = [
        user("q"),
        assistant("", tool_calls=[call("f", {}, "1"), call("f", {}, "2"), call("f", {}, "3")]),
        {"role": "tool", "tool_call_id": "3", "content": "three"},
        user("between"),
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "tool", "tool_call_id": "?", "content": "unknown"},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
    ]
    text = prompt(messages)
    results = [f"<tool_result>{t}</tool_result>" for t in ("unknown", "one", "two", "three")]
    turn = "\n\n".join([results[0], "between", *results[1:]])
    assert f"<｜User｜>{turn}<｜Assistant｜>" in text


def test_each_round_of_calls_has_its_own_order() -> None:
    rounds = []
    for first, second in (("a", "b"), ("b", "a")):
        rounds += [
            assistant("", tool_calls=[call("f", {}, first), call("f", {}, second)]),
            {"role": "tool", "tool_call_id": "a", "content": "A"},
            {"role": "tool", "tool_call_id": "b", "content": "B"},
        ]
    text = prompt([user("q"), *rounds])
    a, b = "<tool_result>A</tool_result>", "<tool_result>B</tool_result>"
    assert text.index(f"{a}\n\n{b}") < text.index(f"{b}\n\n{a}")


def test_reasoning_under_either_name() -> None:
    for name in ("reasoning", "reasoning_content"):
        messages = [user("a"), assistant("b", **{name: "why"}), user("c")]
        assert "<think>why</think>b" in prompt(messages, drop_thinking=False)
        assert "why" not in prompt(messages)
    same = assistant("b", reasoning="why", reasoning_content="why")
    assert "why" in prompt([user("a"), same, user("c")], drop_thinking=False)


def test_calls_of_every_kind_of_value() -> None:
    arguments = (
        '{"s": "a\\n\\"b\\"", "i": 123456789012345678901234567890, "f": 1.5, "e": 1e3, "n": null,'
        ' "b": false, "l": [1,"é"], "o": {"k":"\\u00fc"}, "big": 1e999}'
    )
    text = prompt([user("q"), assistant("", tool_calls=[call("f", arguments)]), user("r")])
    values = {
        "s": ("true", 'a\n"b"'), "i": ("false", "123456789012345678901234567890"),
        "f": ("false", "1.5"), "e": ("false", "1000.0"), "n": ("false", "null"),
        "b": ("false", "false"), "l": ("false", '[1, "é"]'), "o": ("false", '{"k": "ü"}'),
        "big": ("false", "1e999"),
    }  # fmt: skip
    body = "\n".join(
        f'<｜DSML｜parameter name="{k}" string="{s}">{v}</｜DSML｜parameter>'
        for k, (s, v) in values.items()
    )
    assert f'<｜DSML｜invoke name="f">\n{body}\n</｜DSML｜invoke>' in text


@pytest.mark.parametrize(
    "arguments", ["", "print(1)", "[1]", "12", '{"a": NaN}', '{"a": Infinity}', "{", "[" * 99999]
)
def test_arguments_that_are_no_object(arguments: str) -> None:
    text = prompt([user("q"), assistant("", tool_calls=[call("f", arguments)]), user("r")])
    assert f'<｜DSML｜parameter name="arguments" string="true">{arguments}</｜DSML｜p' in text


def test_integers_of_any_size_stay_exact() -> None:
    digits = "9" * 6000
    text = prompt([user("q"), assistant("", tool_calls=[call("f", f'{{"n": [{digits}]}}')])])
    assert f">[{digits}]</" in text


def test_tools_as_parts_equal_tools_as_json() -> None:
    schema = '{"type":"object",  "properties": {"é": {"type": "string"}}}'
    made = Tool.from_parts("f", 'says "hi"', schema)
    assert made.declaration == (
        '{"name": "f", "description": "says \\"hi\\"", "parameters": ' + schema + "}"
    )
    tidy = {"name": "f", "parameters": {"a": [1, 2.5, None, True], "ü": {}}}
    parts = Tool.from_parts("f", "", '{"a": [1, 2.5, null, true],\n "ü": {}}')
    assert parts == Tool.from_function(tidy)
    assert parts.declaration == json.dumps(tidy, ensure_ascii=False)
    for bad in ("[]", "{", "NaN"):
        with pytest.raises(ValueError, match=r"JSON|Expecting"):
            Tool.from_parts("f", "", bad)


def test_start_state_of_a_continued_message() -> None:
    def start(message: dict[str, Any], **fields: Any) -> str:
        data = {"messages": [user("q"), {**message, "prefix": True}], **fields}
        return chat.render(chat_request_from_json(data), "v4-0731").start

    assert start(assistant("", reasoning_content="so")) == "reasoning"
    assert start(assistant("", reasoning_content="")) == "reasoning"
    assert start(assistant("1, 2", reasoning_content="so")) == "content"
    assert start(assistant("", reasoning_content="so"), thinking=False) == "content"


def test_a_task_is_answered_in_content() -> None:
    for task in ("query", "authority", "domain", "title", "read_url"):
        data = {"messages": [user("a"), {**user("b"), "task": task}]}
        rendered = chat.render(chat_request_from_json(data), "v4-0731")
        assert rendered.text.endswith(f"<｜User｜>a\n\nb<｜{task}｜>")
        assert rendered.start == "content"


def test_v41_keeps_reasoning_after_the_last_real_user_turn() -> None:
    messages = [
        user("q"), assistant("", reasoning="R1", tool_calls=[call("f", {}, "1")]),
        {"role": "tool", "tool_call_id": "1", "content": "x"},
        assistant("", reasoning="R2", tool_calls=[call("f", {}, "2")]),
        {"role": "tool", "tool_call_id": "2", "content": "y"},
    ]  # fmt: skip
    assert "<think>R1</think>" in prompt(messages, "v4.1")
    later = prompt([*messages, user("thanks")], "v4.1")
    assert "R1" not in later and "R2" not in later
    system = prompt([*messages, {"role": "system", "content": "S"}], "v4.1")
    assert "R1" not in system and "<｜System｜>S<｜Assistant｜>" in system


# -- markers come from the renderer alone ----------------------------------------------------------

texts = st.lists(
    st.one_of(
        st.sampled_from([*OFFICIAL_IDS, "<｜System｜>", "<tool_result>", "<", "</", "｜", "\n"]),
        st.text(max_size=5),
    ),
    max_size=6,
).map("".join)


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_no_text_can_make_a_marker(data: st.DataObject) -> None:
    """Replacing every text of a request by harmless letters leaves the same markers in place."""

    def build(text: Any) -> ChatRequest:
        return ChatRequest(
            messages=(
                Message(role="system", content=text()),
                Message(role="user", content=text()),
                Message(
                    role="assistant", content=text(), reasoning=text(),
                    tool_calls=(ToolCall(name="f", arguments=dump_json({"k": text()}), id="1"),),
                ),
                Message(role="tool", content=text(), tool_call_id="1"),
                Message(role="latest_reminder", content=text()),
                Message(role="user", content=text()),
            ),
            tools=(Tool.from_function({"name": "f", "description": text()}),),
        )  # fmt: skip

    rendered = chat.render(build(lambda: data.draw(texts)), "v4-0731")
    plain = chat.render(build(lambda: "a"), "v4-0731")
    markers = [p.text for p in plain.pieces if p.special]
    assert [p.text for p in rendered.pieces if p.special] == markers
    for tok in (toy_tokenizer(), real_tokenizer()):
        special = set(tok.specials.values())
        ids = tok.encode_pieces(rendered.pieces)
        assert [i for i in ids if i in special] == [tok.specials[m] for m in markers]
        assert tok.decode(ids) == rendered.text


# -- refusals --------------------------------------------------------------------------------------

ASK = [user("x")]
CALLED = [user("q"), assistant("", tool_calls=[call("f", {}, "1")])]


@pytest.mark.parametrize(
    ("data", "path", "text"),
    [
        ({"messages": []}, "messages", "at least one"),
        ({}, "messages", "at least one"),
        ({"messages": {}}, "messages", "must be array"),
        ({"messages": ASK, "temprature": 1}, "temprature", "not a known field"),
        ({"messages": [{**user("x"), "name": "Bob"}]}, "messages[0].name", "not a known field"),
        ({"messages": [{"role": "function", "content": ""}]}, "messages[0].role", "one of system"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        ({"messages": [user(3)]}, "messages[0].content", "a number, must be a string or an array"),
        ({"messages": ["hi"]}, "messages[0]", "a string, must be an object"),
        (
            {"messages": [user([{"type": "image_url", "image_url": {}}])]},
            "messages[0].content[0]", "'image_url', must be text",
        ),
        ({"messages": [user([{"type": "text"}])]}, "messages[0].content[0].text", "missing"),
        (
            {"messages": [user("x"), {"role": "tool", "tool_call_id": "1", "content": "r"}]},
            "messages[1]", "no assistant message before it calls a tool",
        ),
        ({"messages": [{**user("x"), "prefix": True}]}, "messages[0].prefix", "assistant"),
        (
            {"messages": [assistant("x", prefix=True), user("y")]},
            "messages[0].prefix", "not the last",
        ),
        (
            {"messages": [assistant("x", prefix=True, tool_calls=[call("f", {})])]},
            "messages[0].tool_calls", "not allowed in a message with prefix",
        ),
        ({"messages": [{**user("x"), "task": "dance"}]}, "messages[0].task", "one of action"),
        (
            {"messages": [{**user("x"), "task": "title"}, user("y")]},
            "messages[0].task", "the last message",
        ),
        (
            {"messages": [{**user("x"), "tool_calls": [call("f", {})]}]},
            "messages[0].tool_calls", "belongs to an assistant message",
        ),
        ({"messages": [{**user("x"), "reasoning": "r"}]}, "messages[0].reasoning", "assistant"),
        ({"messages": [{**user("x"), "tool_call_id": "1"}]}, "messages[0].tool_call_id", "tool"),
        (
            {"messages": [assistant("x", reasoning="a", reasoning_content="b")]},
            "messages[0].reasoning", "differs",
        ),
        (
            {"messages": [assistant("", tool_calls=[call('a"b', {})])]},
            "messages[0].tool_calls[0].name", "control characters",
        ),
        (
            {"messages": [assistant("", tool_calls=[call("f", {"a<b": 1})])]},
            "messages[0].tool_calls[0].arguments", "has the key 'a<b'",
        ),
        (
            {"messages": [assistant("", tool_calls=[call("f", {"": 1})])]},
            "messages[0].tool_calls[0].arguments", "has the key ''",
        ),
        (
            {"messages": [assistant("", tool_calls=[call("f", 5)])]},
            "messages[0].tool_calls[0].function.arguments", "must be string",
        ),
        (
            {"messages": [assistant("", tool_calls=[{"id": "1", "function": {}}])]},
            "messages[0].tool_calls[0].function.name", "missing",
        ),
        (
            {"messages": [assistant("", tool_calls=[{**call("f", {}), "type": "custom"}])]},
            "messages[0].tool_calls[0].type", "must be function",
        ),
        ({"messages": [user("a\ud83d")]}, "messages[0].content", "lone surrogate at character 1"),
        (
            {"messages": [assistant("", tool_calls=[call("f", '{"k": "\\ud83d"}')])]},
            "messages[0].tool_calls[0].arguments", "lone surrogate in 'k'",
        ),
        ({"messages": ASK, "tools": [tool("")]}, "tools[0].name", "non-empty"),
        ({"messages": ASK, "tools": [tool("a\nb")]}, "tools[0].name", "control"),
        ({"messages": ASK, "tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        ({"messages": ASK, "tools": [{"type": "web"}]}, "tools[0].type", "must be function"),
        ({"messages": ASK, "tools": [tool("f")] * 129}, "tools", "at most 128"),
        (
            {"messages": ASK, "tools": [tool("f" * (1 << 20))]},
            "tools", "bytes of JSON, at most 1048576",
        ),
        ({"messages": ASK, "tool_choice": "any"}, "tool_choice", "one of auto, none"),
        ({"messages": ASK, "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"messages": ASK, "tool_choice": {"type": "x"}}, "tool_choice", "name a function"),
        (
            {"messages": ASK, "tools": [tool("f")],
             "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice", "names 'g', which is not a declared tool",
        ),
        ({"messages": ASK, "response_format": {"type": "xml"}}, "response_format", "one of"),
        (
            {"messages": ASK, "response_format": {"type": "json_schema"}},
            "response_format.json_schema.schema", "must be an object",
        ),
        ({"messages": ASK, "thinking": "yes"}, "thinking", "must be an object"),
        ({"messages": ASK, "thinking": {"type": "?"}}, "thinking.type", "enabled or disabled"),
        (
            {"messages": ASK, "thinking": True, "reasoning_effort": "none"},
            "effort", "contradicts",
        ),
        ({"messages": ASK, "reasoning_effort": "huge"}, "effort", "low, high, max, minimal"),
        ({"messages": ASK, "reasoning_effort": 1.5}, "reasoning_effort", "must be a name"),
        ({"messages": ASK, "drop_thinking": "no"}, "drop_thinking", "true or false"),
        ({"messages": ASK, "system_placement": "back"}, "system_placement", "front, as_user"),
        ([], "", "an array, must be an object"),
    ],
)  # fmt: skip
def test_refusals(data: Any, path: str, text: str) -> None:
    with pytest.raises(ChatError) as caught:
        chat.render(chat_request_from_json(data), "v4-0731")
    matching = [v for v in caught.value.violations if v.path == path and text in v.message]
    assert matching, caught.value.violations
    assert text in str(caught.value)


def test_all_violations_come_at_once() -> None:
    data = {
        "messages": [user(1), {"role": "tool", "content": "x", "colour": 1}],
        "tools": 5, "thinking": 3, "seed": 1,
    }  # fmt: skip
    with pytest.raises(ChatError) as caught:
        chat_request_from_json(data)
    paths = {v.path for v in caught.value.violations}
    assert paths == {"messages[0].content", "messages[1].colour", "tools", "thinking", "seed"}
    request = ChatRequest(
        messages=(
            Message(role="tool", content="x"),
            Message(role="user", prefix=True),
            Message(role="user", task="title"),
            Message(role="assistant", tool_calls=(ToolCall(name=""),)),
        ),
        effort="huge",
        tool_choice=ToolChoice(mode="required"),
    )
    found = problems(request, "v4-0731")
    assert [v.path for v in found] == [
        "messages[0]", "messages[1].prefix", "messages[2].task", "messages[3].tool_calls[0].name",
        "tool_choice", "effort",
    ]  # fmt: skip
    assert found[0].reason == "TOOL_RESULT_WITHOUT_CALL"


def test_null_is_absent() -> None:
    message = assistant("b", tool_calls=None, refusal=None, function_call=None, audio=None)
    assert prompt([user("a"), message, user("c")], tools=None, seed=None, tool_choice=None)
    assert "b" in prompt([user("a"), message])


def test_the_name_of_a_tool_message_is_let_pass() -> None:
    result = {"role": "tool", "tool_call_id": "1", "name": "f", "content": "r"}
    assert "<tool_result>r</tool_result>" in prompt([*CALLED, result])


def test_choices_that_need_constrained_decoding() -> None:
    named = {"type": "function", "function": {"name": "f"}}
    for choice, feature in (("required", "tool_choice.required"), (named, "tool_choice.named")):
        with pytest.raises(ChatUnsupportedError) as caught:
            prompt([user("x")], tools=[tool("f")], tool_choice=choice)
        assert caught.value.feature == feature
    with pytest.raises(ChatUnsupportedError, match="regex"):
        prompt([user("x")], response_format={"type": "regex"})


def test_response_formats_are_rendered_but_not_promised() -> None:
    for case in CASES:
        wanted = case.get("response_format")
        expected = [f"response_format.{wanted['type']}"] if wanted else []
        assert unsupported_features(request_of(case)) == expected


def test_unknown_profile() -> None:
    with pytest.raises(ChatError, match=r"'v5', must be one of v4-preview, v4-0731, v4.1"):
        prompt([user("x")], "v5")


# -- JSON ------------------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)  # fmt: skip


@given(values)
@settings(max_examples=200, deadline=None)
def test_json_is_written_as_python_writes_it(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False)
    assert dump_json(strict_json(text)) == text


def test_json_too_deep() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ValueError, match="too deeply"):
        dump_json(deep)
    with pytest.raises(ValueError, match="too deeply"):
        strict_json("[" * 200000 + "]" * 200000)


# -- profile ---------------------------------------------------------------------------------------


def test_profile_by_option() -> None:
    for name in ("v4-preview", "v4-0731", "v4.1"):
        assert chat.detect_profile(name) == (name, "option", None)
    with pytest.raises(ValueError, match=r"must be auto or v4-preview, v4-0731, v4.1"):
        chat.detect_profile("v3")


def test_profile_by_the_encoder_of_the_checkpoint(tmp_path: Path) -> None:
    encoder = tmp_path / "encoding" / "encoding_dsv4.py"
    encoder.parent.mkdir()
    encoder.write_text('REASONING_EFFORT_MAX = "..."\n', encoding="utf-8")
    named = {"general.name": "V4-Flash-0731"}
    assert chat.detect_profile(checkpoint=tmp_path, metadata=named).profile == "v4-preview"
    encoder.write_text("REASONING_EFFORT_PROMPTS = {}\n", encoding="utf-8")
    choice = chat.detect_profile("auto", checkpoint=tmp_path)
    assert choice.profile == "v4-0731" and choice.warning is None


@pytest.mark.parametrize(
    ("name", "sure"),
    [
        ("DeepSeek-V4-Flash-0731", True), ("V4 Flash 2026-08-15", True), ("V4-20270102-x", True),
        ("DeepSeek-V4-Flash-1105", True), ("DeepSeek V4 Flash", False), ("V4-Flash-0424", False),
        ("V4-Flash-2026-07-30", False), ("", False),
    ],
)  # fmt: skip
def test_profile_by_name(name: str, sure: bool) -> None:
    for key in ("general.name", "general.version"):
        choice = chat.detect_profile(metadata={key: name})
        assert choice.profile == "v4-0731"
        assert (choice.warning is None) == sure
        assert sure or "--chat-profile v4-preview" in str(choice.warning)
