"""The server on a real port over a fake engine: errors, streams, health, admin, fuzzing."""

from __future__ import annotations

import itertools
import json
import random
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from ds4jax_server.convert import Call, Converter
from ds4jax_server.engine import Handover
from ds4jax_server.pb import generation_pb2 as pb
from ds4jax_server.pb import generation_pb2_grpc as pb_grpc
from ds4jax_server.settings import ServedModel, ServerConfig
from google.protobuf import duration_pb2, struct_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ds4jax import refusals
from ds4jax.client import Options, build_chat, build_request
from ds4jax.config import SamplingParams, StoppingCriteria
from ds4jax.plan import LaneSpec
from tests.fake_executor import FakeExecutor
from tests.serve_tools import (
    Running,
    Silence,
    details,
    failure,
    fake,
    ids_of,
    quick,
    serving,
    text_of,
    until,
)
from tests.text_tools import real_tokenizer, toy_tokenizer, vectors

TOY = toy_tokenizer()
M = TOY.markers
VOCAB = TOY.vocab_size
SCRIPTS: dict[int, list[int]] = {}
"""Output ids by seed."""


def ids(text: str) -> list[int]:
    return TOY.encode(text, markers=True)


def script(lane: LaneSpec) -> list[int] | None:
    return SCRIPTS.get(int(lane.sampling.seed or 0))


@pytest.fixture(scope="module", autouse=True)
def _silence() -> None:
    """Started here, looked at in test_server_process: its minute runs beside everything else."""
    Silence.shared()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    executor = fake(num_slots=6, max_ctx=2048, num_pages=20, script=script)
    with serving(executor, metrics_port=0) as running:
        yield running


_SEEDS = itertools.count(1000)


def scripted(output: str | list[int]) -> pb.SamplingParams:
    """Sampling whose seed makes the fake engine say exactly this."""
    seed = next(_SEEDS)
    SCRIPTS[seed] = ids(output) if isinstance(output, str) else output
    return pb.SamplingParams(seed=seed)


def chat(text: str = "hi", **kwargs: Any) -> pb.ChatInput:
    message = pb.Message(role=pb.Message.ROLE_USER, parts=[pb.Part(text=text)])
    return pb.ChatInput(messages=[message], **kwargs)


TOOL = pb.Tool(name="run", description="d", parameters_json='{"type": "object"}')
OFF = pb.Thinking(mode=pb.Thinking.MODE_OFF)


def seconds(value: float) -> duration_pb2.Duration:
    out = duration_pb2.Duration()
    out.FromNanoseconds(int(value * 1e9))
    return out


# ---- errors: the table -------------------------------------------------------------------------

Req = pb.GenerateRequest
S, St, O = pb.SamplingParams, pb.StoppingCriteria, pb.OutputOptions

BAD: list[tuple[str, pb.GenerateRequest, list[str]]] = [
    ("temperature", Req(text="a", sampling=S(temperature=2.5)), ["sampling.temperature"]),
    ("nan", Req(text="a", sampling=S(temperature=float("nan"))), ["sampling.temperature"]),
    ("inf", Req(text="a", sampling=S(min_p=float("inf"))), ["sampling.min_p"]),
    ("top_p", Req(text="a", sampling=S(top_p=0.0)), ["sampling.top_p"]),
    ("top_k", Req(text="a", sampling=S(top_k=1 << 31)), ["sampling.top_k"]),
    ("repetition", Req(text="a", sampling=S(repetition_penalty=0)),
     ["sampling.repetition_penalty"]),
    ("frequency", Req(text="a", sampling=S(frequency_penalty=3)), ["sampling.frequency_penalty"]),
    ("presence", Req(text="a", sampling=S(presence_penalty=-3)), ["sampling.presence_penalty"]),
    ("window", Req(text="a", sampling=S(penalty_window=0)), ["sampling.penalty_window"]),
    ("bias", Req(text="a", sampling=S(logit_bias={1: 101.0})), ["sampling.logit_bias"]),
    ("bias id", Req(text="a", sampling=S(logit_bias={VOCAB: 1.0})), ["sampling.logit_bias[0]"]),
    ("many biases", Req(text="a", sampling=S(logit_bias={i: 1.0 for i in range(1025)})), None),
    ("logprobs", Req(text="a", output=O(top_logprobs=21)), ["output.top_logprobs"]),
    ("min > max", Req(text="a", stopping=St(max_output_tokens=1, min_output_tokens=2)),
     ["stopping.min_output_tokens"]),
    ("stops", Req(text="a", stopping=St(stop_strings=["x"] * 17)), ["stopping.stop_strings"]),
    ("empty stop", Req(text="a", stopping=St(stop_strings=[""])), ["stopping.stop_strings"]),
    ("long stop", Req(text="a", stopping=St(stop_strings=["x" * 257])), ["stopping.stop_strings"]),
    ("stop ids", Req(text="a", stopping=St(stop_token_ids=[1] * 17)), ["stopping.stop_token_ids"]),
    ("stop id", Req(text="a", stopping=St(stop_token_ids=[VOCAB])), ["stopping.stop_token_ids[0]"]),
    ("time", Req(text="a", stopping=St(time_limit=seconds(0))), ["stopping.time_limit"]),
    ("negative time", Req(text="a", stopping=St(time_limit=seconds(-1))), ["stopping.time_limit"]),
    ("candidates", Req(text="a", candidate_count=0), ["candidate_count"]),
    ("candidates > lanes", Req(text="a", candidate_count=7), ["candidate_count"]),
    ("delta", Req(text="a", output=O(min_delta_interval=seconds(61))),
     ["output.min_delta_interval"]),
    ("progress", Req(text="a", output=O(progress_interval=seconds(0))),
     ["output.progress_interval"]),
    ("enum", Req(text="a", priority=77), ["priority"]),
    ("enum 2", Req(text="a", output=O(reasoning=9)), ["output.reasoning"]),
    ("id", Req(text="a", request_id="x" * 129), ["request_id"]),
    ("id 2", Req(text="a", request_id="a\nb"), ["request_id"]),
    ("echo", Req(chat=chat(), output=O(echo=True)), ["output.echo"]),
    ("role", Req(chat=pb.ChatInput(messages=[pb.Message(parts=[pb.Part(text="x")])])),
     ["chat.messages[0].role"]),
    ("role 2", Req(chat=pb.ChatInput(messages=[pb.Message(role=50)])), ["chat.messages[0].role"]),
    ("part", Req(chat=pb.ChatInput(messages=[pb.Message(role=2, parts=[pb.Part()])])),
     ["chat.messages[0].parts[0]"]),
    ("no messages", Req(chat=pb.ChatInput()), ["chat.messages"]),
    ("tool name", Req(chat=chat(tools=[pb.Tool(name='a"b')])), ["chat.tools[0].name"]),
    ("schema", Req(chat=chat(tools=[pb.Tool(name="a", parameters_json="[")])),
     ["chat.tools[0].parameters_json"]),
    ("tools", Req(chat=chat(tools=[TOOL] * 129)), ["chat.tools"]),
    ("effort", Req(chat=chat(thinking=pb.Thinking(effort=44))), ["chat.thinking.effort"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "request_", "fields"), BAD, ids=[b[0] for b in BAD])
def test_a_bad_field_is_named(server: Running, name: str, request_: Any, fields: Any) -> None:
    found = failure(lambda: list(server.stub.Generate(request_)))
    assert (found["code"], found["reason"]) in {
        ("INVALID_ARGUMENT", "INVALID_REQUEST"), ("INVALID_ARGUMENT", "INVALID_TOKEN_ID"),
    }  # fmt: skip
    assert fields is None or found["fields"] == fields
    assert found["domain"] == "ds4jax" and found["request_id"]


def test_all_violations_come_at_once(server: Running) -> None:
    request = Req(
        chat=pb.ChatInput(
            messages=[pb.Message(role=pb.Message.ROLE_TOOL, tool_call_id="x"), pb.Message(role=9)],
            tools=[pb.Tool(name="")],
        ),
        sampling=S(temperature=-1, top_p=2, logit_bias={VOCAB + 1: 0.0}),
        stopping=St(stop_strings=[""], stop_token_ids=[1 << 30]),
        output=O(top_logprobs=99), candidate_count=9, speculation=12,
    )  # fmt: skip
    found = failure(lambda: list(server.stub.Generate(request)))
    assert found["code"] == "INVALID_ARGUMENT" and found["reason"] == "INVALID_REQUEST"
    assert set(found["fields"]) >= {
        "chat.messages[0]", "chat.messages[1].role", "chat.tools[0].name", "sampling.temperature",
        "sampling.top_p", "sampling.logit_bias[0]", "stopping.stop_strings",
        "stopping.stop_token_ids[0]", "output.top_logprobs", "candidate_count", "speculation",
    }  # fmt: skip


REFUSED: list[tuple[str, pb.GenerateRequest, str, str]] = [
    ("no input", Req(), "INVALID_ARGUMENT", "EMPTY_PROMPT"),
    ("empty text", Req(text=""), "INVALID_ARGUMENT", "EMPTY_PROMPT"),
    ("no ids", Req(tokens=pb.TokenIds()), "INVALID_ARGUMENT", "EMPTY_PROMPT"),
    ("bad id", Req(tokens=pb.TokenIds(ids=[1, VOCAB])), "INVALID_ARGUMENT", "INVALID_TOKEN_ID"),
    ("tool result", Req(chat=pb.ChatInput(messages=[
        pb.Message(role=pb.Message.ROLE_TOOL, parts=[pb.Part(text="x")])])),
     "INVALID_ARGUMENT", "TOOL_RESULT_WITHOUT_CALL"),
    ("long prompt", Req(tokens=pb.TokenIds(ids=[5] * 2048)),
     "INVALID_ARGUMENT", "CONTEXT_LENGTH_EXCEEDED"),
    ("long output", Req(tokens=pb.TokenIds(ids=[5] * 10), stopping=St(max_output_tokens=2039)),
     "INVALID_ARGUMENT", "CONTEXT_LENGTH_EXCEEDED"),
    ("pool", Req(tokens=pb.TokenIds(ids=[5] * 2), stopping=St(max_output_tokens=2046)), "", ""),
    ("model", Req(model="gpt", text="a"), "NOT_FOUND", "MODEL_NOT_FOUND"),
    *[(f"unsupported {name}", request, "UNIMPLEMENTED", "FEATURE_UNSUPPORTED")
      for name, request in {
          "json": Req(text="a", response_format=pb.ResponseFormat(
              json_object=pb.ResponseFormat.JsonObject())),
          "schema": Req(text="a", response_format=pb.ResponseFormat(
              json_schema=struct_pb2.Struct())),
          "regex": Req(text="a", response_format=pb.ResponseFormat(regex="a+")),
          "priority": Req(text="a", priority=pb.PRIORITY_HIGH),
          "low priority": Req(text="a", priority=pb.PRIORITY_LOW),
          "cache": Req(text="a", cache=pb.CacheOptions(mode=pb.CacheOptions.MODE_USE)),
          "cache read": Req(text="a", cache=pb.CacheOptions(mode=pb.CacheOptions.MODE_READ_ONLY)),
          "session": Req(text="a", cache=pb.CacheOptions(session_id="s")),
          "prompt_logprobs": Req(text="a", output=O(prompt_logprobs=True)),
          "rejection": Req(text="a", speculation=pb.SPECULATION_REJECTION),
          "required": Req(chat=chat(tools=[TOOL], tool_choice=pb.ToolChoice(
              mode=pb.ToolChoice.MODE_REQUIRED))),
          "named": Req(chat=chat(tools=[TOOL], tool_choice=pb.ToolChoice(
              mode=pb.ToolChoice.MODE_NAMED, name="run"))),
      }.items()],
]  # fmt: skip
REFUSED = [r for r in REFUSED if r[2]]


@pytest.mark.parametrize(
    ("name", "request_", "code", "reason"), REFUSED, ids=[r[0] for r in REFUSED]
)
def test_a_request_that_cannot_be_served_says_why(
    server: Running, name: str, request_: Any, code: str, reason: str
) -> None:
    found = failure(lambda: list(server.stub.Generate(request_)))
    assert (found["code"], found["reason"]) == (code, reason)
    if reason == "CONTEXT_LENGTH_EXCEEDED":
        assert found["metadata"]["context_length"] == "2048"
        asked = {"long prompt": ("2048", ""), "long output": ("10", "2039")}[name]
        metadata = found["metadata"]
        assert (metadata["prompt_tokens"], metadata["max_output_tokens"]) == asked
    if reason == "FEATURE_UNSUPPORTED":
        assert found["metadata"]["feature"]


def test_what_can_be_honoured_is_accepted(server: Running) -> None:
    for request in (
        Req(text="a", model="fake"), Req(text="a", model="models/fake"),
        Req(text="a", priority=pb.PRIORITY_NORMAL), Req(text="a", speculation=pb.SPECULATION_OFF),
        Req(text="a", cache=pb.CacheOptions(mode=pb.CacheOptions.MODE_BYPASS)),
        Req(text="a", response_format=pb.ResponseFormat(text=pb.ResponseFormat.Text())),
        Req(text="a", sampling=S(temperature=0, seed=1 << 63, logit_bias={1: -100.0})),
    ):  # fmt: skip
        request.stopping.max_output_tokens = 2
        assert list(server.stub.Generate(request))[-1].HasField("finished")


def test_errors_quote_no_prompt(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    secret = "s3cr3t"
    user = pb.Message(role=pb.Message.ROLE_USER, parts=[pb.Part(text=secret)])
    made = pb.Message(
        role=pb.Message.ROLE_ASSISTANT, parts=[pb.Part(text=secret)], reasoning=secret,
        tool_calls=[pb.ToolCall(id="1", name="run", arguments_json=f'{{"a": "{secret}"')],
    )  # fmt: skip
    result = pb.Message(role=pb.Message.ROLE_TOOL, tool_call_id="9", parts=[pb.Part(text=secret)])
    tool = pb.Tool(name="run", description=secret, parameters_json=f'["{secret}"]')
    bad = pb.Tool(name="run", description=secret, parameters_json=f'{{"{secret}')
    for request in (
        Req(text=secret, candidate_count=99), Req(text=secret * 1000), Req(text=secret, model="x"),
        Req(text=secret, response_format=pb.ResponseFormat(regex=secret)),
        Req(text=secret, stopping=St(stop_strings=[secret * 99])),
        Req(chat=pb.ChatInput(messages=[user, result, made, user], tools=[tool, bad])),
        Req(chat=pb.ChatInput(messages=[made], tools=[bad, bad])),
    ):  # fmt: skip
        call = server.stub.Generate(request)
        assert failure(lambda call=call: list(call))["message"]
        assert secret not in call.details() and secret not in str(call.trailing_metadata())
    assert secret not in caplog.text


def test_both_inputs_and_unknown_fields_are_refused(server: Running) -> None:
    both = Req(text="a").SerializeToString() + Req(tokens=pb.TokenIds(ids=[1])).SerializeToString()
    unknown = Req(text="a").SerializeToString() + bytes([0xF8, 0x07, 0x01])  # field 127
    nested = Req(text="a", sampling=S(top_k=1))
    nested.sampling.MergeFromString(bytes([0xF8, 0x07, 0x01]))
    for data, fields in (
        (both, ["input"]), (unknown, ["GenerateRequest"]),
        (nested.SerializeToString(), ["sampling"]),
    ):  # fmt: skip
        found = failure(lambda data=data: list(raw(server.channel)(data)))
        assert (found["code"], found["fields"]) == ("INVALID_ARGUMENT", fields)


def raw(channel: grpc.Channel, method: str = "GenerationService/Generate") -> Any:
    """Call with bytes of one's own."""
    make = channel.unary_stream if method.endswith("Generate") else channel.unary_unary
    return make(f"/ds4jax.v1.{method}", request_serializer=None, response_deserializer=None)


def test_a_request_too_large_for_the_pool() -> None:
    with serving(fake(max_ctx=4096, num_pages=4)) as s:
        found = failure(lambda: s.generate(tokens=pb.TokenIds(ids=[5] * 600)))
        assert (found["code"], found["reason"]) == (
            "RESOURCE_EXHAUSTED", "REQUEST_TOO_LARGE_FOR_POOL",
        )  # fmt: skip
        assert "retry" not in found
        out = s.generate(tokens=pb.TokenIds(ids=[5] * 500))
        assert out[-1].finished.usage.output_tokens == 12  # what the pool holds


def test_messages_over_the_limit_are_refused_by_the_library(server: Running) -> None:
    found = failure(lambda: list(server.stub.Generate(Req(text="x" * (17 << 20)))))
    assert found["code"] == "RESOURCE_EXHAUSTED"


def test_invalid_utf8_and_garbage_are_invalid_argument(server: Running) -> None:
    for data in (b"\x1a\x02\xff\xfe", b"\xff\xff\xff", b"\x12\x05abc"):
        found = failure(lambda data=data: list(raw(server.channel)(data)))
        assert (found["code"], found["reason"]) == ("INVALID_ARGUMENT", "MALFORMED_REQUEST")
    found = failure(lambda: raw(server.channel, "GenerationService/CountTokens")(b"\xff"))
    assert (found["code"], found["reason"]) == ("INVALID_ARGUMENT", "MALFORMED_REQUEST")


def test_admin_is_not_on_the_public_port(server: Running) -> None:
    admin = pb_grpc.AdminServiceStub(server.channel)
    for call in (
        lambda: admin.GetStatus(pb.GetStatusRequest()), lambda: admin.Drain(pb.DrainRequest()),
    ):  # fmt: skip
        assert failure(call)["code"] == "UNIMPLEMENTED"


def test_a_full_queue_and_a_duplicate_id() -> None:
    executor = fake(num_slots=1, step_seconds=0.01)
    with serving(executor, settings=quick(max_waiting=1)) as s:
        first = s.stub.Generate(Req(text="a", request_id="one"))
        next(first)
        second = s.stub.Generate(Req(text="a", request_id="two"))
        until(lambda: s.scheduler.waiting == 1)
        found = failure(lambda: s.generate(text="a", request_id="one"))
        assert (found["code"], found["reason"]) == ("ALREADY_EXISTS", "DUPLICATE_REQUEST_ID")
        found = failure(lambda: s.generate(text="a"))
        assert (found["code"], found["reason"]) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        assert found["retry"] >= 1.0
        first.cancel()
        second.cancel()
        until(lambda: s.scheduler.active == 0)
        assert s.generate(text="a", request_id="one", stopping=St(max_output_tokens=2))


# ---- streams -----------------------------------------------------------------------------------


def test_the_order_of_events_and_what_they_say(server: Running) -> None:
    call = server.stub.Generate(
        Req(text="abc", stopping=St(max_output_tokens=4), request_id="my-id",
            output=O(token_ids=True))
    )  # fmt: skip
    out = list(call)
    assert ("x-request-id", "my-id") in call.initial_metadata()
    kinds = [m.WhichOneof("event") for m in out]
    assert kinds[0] == "started" and kinds[-1] == "finished" and kinds.count("finished") == 1
    started, finished = out[0].started, out[-1].finished
    assert (started.request_id, started.model) == ("my-id", "models/fake")
    assert (started.prompt_tokens, started.max_output_tokens) == (4, 4)
    assert finished.finish_reason == pb.FINISH_REASON_LENGTH
    assert (
        finished.usage.prompt_tokens == 4 and finished.usage.output_tokens == len(ids_of(out)) == 4
    )
    t = finished.timings
    parts = [x.ToNanoseconds() for x in (t.queue, t.first_token, t.total)]
    assert parts == sorted(parts)
    assert text_of(out) == TOY.decode(ids_of(out))


def test_seeds(server: Running) -> None:
    def run(**sampling: Any) -> tuple[int, list[int]]:
        out = server.generate(
            text="seed", sampling=S(**sampling), stopping=St(max_output_tokens=12),
            output=O(token_ids=True),
        )  # fmt: skip
        return out[0].started.seed, ids_of(out)

    one, two = run(), run()
    assert one[0] != two[0] and one[1] != two[1]
    assert run(seed=one[0]) == one
    assert run(seed=0) == run(seed=0) and run(seed=0)[0] == 0
    assert run(seed=(1 << 64) - 1)[0] == (1 << 64) - 1


def test_candidates(server: Running) -> None:
    def run() -> list[list[int]]:
        out = server.generate(
            text="n", candidate_count=2, sampling=S(seed=0), stopping=St(max_output_tokens=10),
            output=O(token_ids=True),
        )  # fmt: skip
        assert sum(m.HasField("started") for m in out) == 1
        assert sorted(m.finished.candidate for m in out if m.HasField("finished")) == [0, 1]
        return [ids_of(out, 0), ids_of(out, 1)]

    pair = run()
    assert pair[0] != pair[1] and run() == pair


def test_answers_that_name_no_budget_are_capped() -> None:
    with serving(default_max_tokens=7) as s:
        for stopping, most in (
            (St(ignore_eos=True), 7), (St(min_output_tokens=9), 9), (St(max_output_tokens=20), 20),
        ):  # fmt: skip
            out = s.generate(text="x", stopping=stopping)
            assert out[0].started.max_output_tokens == most
            assert out[-1].finished.usage.output_tokens == most
        assert s.models.GetModel(pb.GetModelRequest()).limits.max_output_tokens == 7


def test_prefill_only_and_prompt_of_the_whole_context(server: Running) -> None:
    out = server.generate(tokens=pb.TokenIds(ids=[5] * 2048), stopping=St(max_output_tokens=0))
    usage = out[-1].finished.usage
    assert (usage.prompt_tokens, usage.output_tokens) == (2048, 0)
    assert out[-1].finished.finish_reason == pb.FINISH_REASON_LENGTH


def test_end_of_text_and_turn_markers_stop_without_being_shown(server: Running) -> None:
    for end in (M.eos, M.user, M.assistant, M.bos):
        out = server.generate(chat=chat(thinking=OFF), sampling=scripted([*ids("done"), end, 65]))
        assert text_of(out) == "done"
        assert out[-1].finished.finish_reason == pb.FINISH_REASON_STOP
        assert out[-1].finished.WhichOneof("matched_stop") is None
        assert out[-1].finished.usage.output_tokens == 5


def test_ignoring_the_end_of_text(server: Running) -> None:
    out = server.generate(
        text="x", sampling=scripted([65, M.eos, 66, M.user, 67, 68]),
        stopping=St(ignore_eos=True, max_output_tokens=6), output=O(token_ids=True),
    )  # fmt: skip
    assert text_of(out) == "ABCD"
    assert ids_of(out) == [65, M.eos, 66, M.user, 67, 68]
    assert out[-1].finished.finish_reason == pb.FINISH_REASON_LENGTH


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("burst", [1, 5])
def test_stop_strings(server: Running, include: bool, burst: int) -> None:
    executor: Any = server.server.engine.executor
    executor.burst = burst
    try:
        out = server.generate(
            text="x", sampling=scripted("one two END three four"),
            stopping=St(stop_strings=["END", "nothing"]),
            output=O(include_stop_string=include, token_ids=True),
        )  # fmt: skip
    finally:
        executor.burst = 1
    finished = out[-1].finished
    assert text_of(out) == ("one two END" if include else "one two ")
    assert finished.stop_string == "END" and finished.finish_reason == pb.FINISH_REASON_STOP
    assert finished.usage.output_tokens == len(ids_of(out)) == 11  # not one more, however late
    until(lambda: server.scheduler.active == 0)


def test_stop_token_ids(server: Running) -> None:
    out = server.generate(
        text="x", sampling=scripted("abcZdef"), stopping=St(stop_token_ids=[ord("Z")])
    )
    assert text_of(out) == "abc"
    assert out[-1].finished.stop_token_id == ord("Z")


def test_min_output_tokens_and_max_reasoning_tokens(server: Running) -> None:
    out = server.generate(
        chat=chat(), sampling=S(seed=3), output=O(token_ids=True),
        stopping=St(max_reasoning_tokens=4, max_output_tokens=30, min_output_tokens=30),
    )  # fmt: skip
    sampled = ids_of(out)
    assert len(sampled) == 30 and M.eos not in sampled
    assert M.think_close in sampled[:5]
    assert 0 < out[-1].finished.usage.reasoning_tokens <= 6


@pytest.mark.parametrize("mode", ["SEPARATE", "OMIT", "INLINE"])
def test_reasoning_modes(server: Running, mode: str) -> None:
    out = server.generate(
        chat=chat(), sampling=scripted("why not</think>because"),
        output=O(reasoning=getattr(O, f"REASONING_{mode}")),
    )  # fmt: skip
    reasoning = "".join(m.delta.reasoning for m in out if m.HasField("delta"))
    shown = {"SEPARATE": "because", "OMIT": "because", "INLINE": "<think>why not</think>because"}
    assert text_of(out) == shown[mode]
    assert reasoning == ("why not" if mode == "SEPARATE" else "")
    assert out[-1].finished.usage.reasoning_tokens == len(ids("why not</think>"))


def test_text_is_whole_code_points_and_adds_up(server: Running) -> None:
    text = "naïve 日本語 🙂 \U0001f468\u200d\U0001f469 end"
    out = server.generate(chat=chat(thinking=OFF), sampling=scripted(text))
    assert text_of(out) == text and len(out) > 10


def test_echo(server: Running) -> None:
    out = server.generate(text="pröm", output=O(echo=True), sampling=scripted("pt"))
    assert text_of(out) == "prömpt"


def test_logprobs_come_with_their_ids(server: Running) -> None:
    out = server.generate(
        text="x", stopping=St(max_output_tokens=6), output=O(token_ids=True, top_logprobs=3)
    )
    rows = [r for m in out if m.HasField("delta") for r in m.delta.logprobs]
    assert [r.token_id for r in rows] == ids_of(out)
    assert all(len(r.top) == 3 and r.logprob < 0 for r in rows)


def test_deltas_can_be_collected(server: Running) -> None:
    text = "some longer answer that would be many deltas"
    many = server.generate(chat=chat(thinking=OFF), sampling=scripted(text))
    few = server.generate(
        chat=chat(thinking=OFF), sampling=scripted(text),
        output=O(min_delta_interval=seconds(5), token_ids=True),
    )  # fmt: skip
    assert text_of(many) == text_of(few) == text
    assert sum(m.HasField("delta") for m in few) <= 3 < sum(m.HasField("delta") for m in many)


CALL = (
    'Well.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="run">\n'
    '<｜DSML｜parameter name="cmd" string="true">ls -l</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


def test_tool_calls_stream_and_come_complete(server: Running) -> None:
    out = server.generate(chat=chat(tools=[TOOL], thinking=OFF), sampling=scripted(CALL))
    pieces = [p for m in out if m.HasField("delta") for p in m.delta.tool_calls]
    assert text_of(out) == "Well."
    assert pieces[0].start.name == "run" and pieces[-1].HasField("end")
    arguments = "".join(p.arguments for p in pieces)
    assert json.loads(arguments) == {"cmd": "ls -l", "n": 3}
    finished = out[-1].finished
    assert finished.finish_reason == pb.FINISH_REASON_TOOL_CALLS
    assert finished.tool_calls[0].id == pieces[0].start.id
    assert json.loads(finished.tool_calls[0].arguments_json) == json.loads(arguments)
    assert not finished.HasField("truncated_call")


def test_a_call_that_was_cut_is_no_call(server: Running) -> None:
    budget = len(ids(CALL.partition("ls -l")[0]))
    out = server.generate(
        chat=chat(tools=[TOOL], thinking=OFF), sampling=scripted(CALL),
        stopping=St(max_output_tokens=budget),
    )  # fmt: skip
    finished = out[-1].finished
    assert finished.finish_reason == pb.FINISH_REASON_LENGTH and not finished.tool_calls
    assert finished.truncated_call == "run"


def test_a_time_limit_ends_with_the_text_so_far() -> None:
    with serving(fake(step_seconds=0.01)) as s:
        out = s.generate(text="x", stopping=St(time_limit=seconds(0.3)))
        assert out[-1].finished.finish_reason == pb.FINISH_REASON_TIME_LIMIT
        assert 3 < out[-1].finished.usage.output_tokens < 40


@pytest.mark.parametrize("interval", [0.0, 0.02])
def test_no_chunking_shows_markup(interval: float) -> None:
    """Every recorded parse, through the server, one to seven tokens per step."""
    tok = real_tokenizer()
    scripts: dict[int, list[int]] = {}
    executor = FakeExecutor(
        vocab_size=tok.vocab_size, script=lambda lane: scripts.get(int(lane.sampling.seed or 0))
    )
    with serving(executor, tokenizer=tok) as s:
        cases = [("text", c) for c in vectors("chat/parse.json")["cases"]]
        cases += [("ids", c) for c in vectors("chat/parse_ids.json")["cases"]]
        for number, (kind, case) in enumerate(cases, start=1):
            output = case["ids"] if kind == "ids" else _marked(tok, case["raw"])
            for burst in (1, 7) if not interval else (3,):
                executor.burst = burst
                check_vector(s, case, output, scripts, number, interval)


def _marked(tok: Any, text: str) -> list[int]:
    """Ids of an output in which the markers of the parser are real and all else is text."""
    parts = re.split("(｜DSML｜|</?think>)", text)
    return tok.encode_pieces([(part, i % 2 == 1) for i, part in enumerate(parts) if part])


def check_vector(
    s: Running, case: Any, output: list[int], scripts: Any, number: int, interval: float
) -> None:
    scripts[number] = output
    length = case.get("finish") == "length"
    out = s.generate(
        chat=chat(
            tools=[TOOL] if case["tools_declared"] else [],
            thinking=pb.Thinking(mode=1 if case["thinking"] else 2),
        ),
        sampling=S(seed=number), stopping=St(max_output_tokens=len(output) + (not length)),
        output=O(min_delta_interval=seconds(interval)),
    )  # fmt: skip
    want, finished = case["expected"], out[-1].finished
    assert text_of(out) == want["content"], case["id"]
    assert "".join(m.delta.reasoning for m in out if m.HasField("delta")) == want["reasoning"]
    calls = [(c.name, json.loads(c.arguments_json)) for c in finished.tool_calls]
    assert calls == [(c["name"], c["arguments"]) for c in want["tool_calls"]], case["id"]
    assert finished.HasField("truncated_call") == (want["truncated_call"] is not None)
    pieces = [p for m in out if m.HasField("delta") for p in m.delta.tool_calls]
    if not any(
        "DSML" in json.dumps(c["arguments"], ensure_ascii=False) for c in want["tool_calls"]
    ):
        assert not any("DSML" in p.arguments for p in pieces)
    for index, (_, arguments) in enumerate(calls):
        joined = "".join(p.arguments for p in pieces if p.index == index)
        assert json.loads(joined) == arguments


# ---- cancel, deadlines, slow clients -----------------------------------------------------------


def test_cancel_in_a_long_prefill_frees_the_lane_within_one_chunk() -> None:
    executor = fake(max_ctx=32768, chunk_tokens=2048, step_seconds=0.15)
    with serving(executor) as s:
        call = s.stub.Generate(Req(tokens=pb.TokenIds(ids=[7] * 20_000)))
        next(call)
        until(lambda: executor.steps >= 3)
        before = executor.steps
        began = time.monotonic()
        call.cancel()
        until(lambda: not executor.lanes)
        assert executor.steps <= before + 1 and time.monotonic() - began < 0.35
        assert s.scheduler.counters.cancelled == {"client": 1}


def test_a_deadline_reaches_the_engine(server: Running) -> None:
    executor = fake(num_slots=1, step_seconds=0.02)
    with serving(executor) as s:
        found = failure(lambda: s.generate(timeout=0.3, text="x"))
        assert found["code"] == "DEADLINE_EXCEEDED"
        until(lambda: not executor.lanes and s.scheduler.active == 0, 1.0)
        steps = executor.steps
        time.sleep(0.1)
        assert executor.steps == steps
        for _ in range(2):  # lanes take half a second from here on, as far as is known
            s.generate(text="x", stopping=St(max_output_tokens=25))
        holder = s.stub.Generate(Req(text="x"))
        next(holder)
        queued = s.stub.Generate(Req(text="x"))
        until(lambda: s.scheduler.waiting == 1)
        began = time.monotonic()
        found = failure(lambda: s.generate(timeout=0.4, text="x"))
        assert found["code"] == "DEADLINE_EXCEEDED" and found["reason"] == "DEADLINE_NOT_MET"
        assert time.monotonic() - began < 0.25  # at once
        holder.cancel()
        queued.cancel()


def test_progress_is_a_sign_of_life() -> None:
    executor = fake(num_slots=1, max_ctx=8192, step_seconds=0.05)
    with serving(executor) as s:
        holder = s.stub.Generate(Req(text="x"))
        next(holder)
        quick_progress = O(progress_interval=seconds(0.1))
        call = s.stub.Generate(Req(tokens=pb.TokenIds(ids=[9] * 1500), output=quick_progress))
        first = next(call)
        assert first.progress.state == pb.Progress.STATE_QUEUED
        assert (first.progress.queue_position, first.progress.tokens_total) == (0, 1500)
        holder.cancel()
        seen = []
        for message in call:
            if message.HasField("progress"):
                seen.append((message.progress.state, message.progress.tokens_done))
            elif message.HasField("delta"):
                break
        done = [n for state, n in seen if state == pb.Progress.STATE_PREFILL]
        assert len(done) >= 3 and done == sorted(done) and done[-1] > done[0]
        call.cancel()


def test_a_client_that_does_not_read_hurts_nobody() -> None:
    executor = fake(max_ctx=8192, num_pages=400)
    options = [("grpc.http2.lookahead_bytes", 1 << 14), ("grpc.http2.bdp_probe", 0)]
    with serving(executor, settings=quick(slow_client_grace=1.0), stream_bytes=32 * 1024) as s:
        work = {
            "text": "x", "sampling": S(seed=1), "stopping": St(max_output_tokens=400),
            "output": O(token_ids=True),
        }  # fmt: skip
        alone = ids_of(s.generate(**work))
        with grpc.insecure_channel(s.address, options=options) as channel:
            stub = pb_grpc.GenerationServiceStub(channel)
            deaf = stub.Generate(
                Req(text="x", sampling=S(seed=2), output=O(token_ids=True, top_logprobs=20),
                    stopping=St(max_output_tokens=8000, ignore_eos=True))
            )  # fmt: skip
            until(lambda: s.scheduler.counters.suspensions >= 1)
            assert [ids_of(s.generate(**work)) for _ in range(3)] == [alone] * 3
            until(lambda: s.scheduler.counters.slow_clients == 1, 5.0)
            until(lambda: s.scheduler.active == 0)
            until(lambda: calls(s) == 0)  # the write that waits for the client is given up
            found = failure(lambda: list(deaf))
            assert (found["code"], found["reason"]) == ("RESOURCE_EXHAUSTED", "SLOW_CLIENT")


def calls(s: Running) -> float | None:
    """Generate calls that the server is busy with."""
    return s.server.metrics.registry.get_sample_value("ds4jax_requests_active")


def test_an_answer_that_nobody_reads_is_given_up_after_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its lane is free; the call itself takes room too, and there is room for so many."""
    options = [("grpc.http2.lookahead_bytes", 1 << 14), ("grpc.http2.bdp_probe", 0)]
    limits = {"stream_events": 5000, "stream_bytes": 1 << 24}
    with serving(fake(), settings=quick(slow_client_grace=0.5), **limits) as s:
        request = Req(text="x", sampling=S(seed=2), output=O(token_ids=True, top_logprobs=20),
                      stopping=St(max_output_tokens=1500, ignore_eos=True))  # fmt: skip
        whole = ids_of(list(s.stub.Generate(request)))
        with grpc.insecure_channel(s.address, options=options) as channel:
            deaf = pb_grpc.GenerationServiceStub(channel).Generate(request)
            until(lambda: s.scheduler.counters.output_tokens >= 3000)
            until(lambda: s.scheduler.active == 0)
            assert calls(s) == 1
            until(lambda: calls(s) == 0)
            got: list[int] = []
            found = failure(lambda: [got.extend(m.delta.token_ids) for m in deaf])
        assert (found["code"], found["reason"]) == ("RESOURCE_EXHAUSTED", "SLOW_CLIENT")
        assert 0 < len(got) < 1500 and got == whole[: len(got)]
        assert s.scheduler.counters.suspensions == 0
    assert not [r for r in caplog.records if r.exc_info]


def test_a_failure_does_not_wait_for_a_client_that_does_not_read() -> None:
    """Its lanes are gone; events that it has not been sent are in the way of the status."""
    options = [("grpc.http2.lookahead_bytes", 1 << 14), ("grpc.http2.bdp_probe", 0)]
    settings = quick(slow_client_grace=60.0)
    with serving(fake(max_ctx=8192, num_pages=400), settings=settings, stream_events=64) as s:
        request = Req(text="x", sampling=S(seed=2), output=O(token_ids=True, top_logprobs=20),
                      stopping=St(max_output_tokens=8000, ignore_eos=True))  # fmt: skip
        with grpc.insecure_channel(s.address, options=options) as channel:
            deaf = pb_grpc.GenerationServiceStub(channel).Generate(request)
            until(lambda: s.scheduler.counters.suspensions == 1)
            began = time.monotonic()
            s.scheduler.shut_down(refusals.shutting_down)
            until(lambda: calls(s) == 0)
            assert time.monotonic() - began < 5.0  # and not the grace of slow clients
            found = failure(lambda: list(deaf))
        assert (found["code"], found["reason"]) == ("UNAVAILABLE", "SHUTTING_DOWN")


def test_many_events_are_one_message_to_the_loop() -> None:
    posted: list[Callable[[], None]] = []
    loop: Any = SimpleNamespace(call_soon_threadsafe=posted.append)
    seen: list[str] = []
    handover = Handover()
    handover.add(lambda: seen.append("early"))
    handover.flush()  # nobody is there yet
    handover.open(loop)
    handover.add(lambda: (seen.append("a"), handover.add(lambda: seen.append("later"))))
    handover.flush()
    handover.add(lambda: seen.append("b"))
    handover.flush()
    assert len(posted) == 1 and not seen
    posted.pop()()
    assert seen == ["early", "a", "b", "later"]
    handover.flush()
    assert not posted
    handover.add(lambda: seen.append("c"))
    handover.flush()
    posted.pop()()
    assert seen[-1] == "c"


def test_a_slow_reader_gets_everything() -> None:
    executor = fake(max_ctx=8192, num_pages=400)
    with serving(executor, stream_events=8, stream_bytes=1 << 12) as s:
        work = {
            "text": "x", "sampling": S(seed=4), "stopping": St(max_output_tokens=1500),
            "output": O(token_ids=True, top_logprobs=20),
        }  # fmt: skip
        fast = ids_of(s.generate(**work))
        slow = []
        for n, message in enumerate(s.stub.Generate(Req(**work))):
            slow.append(message)
            if n % 100 == 0:
                time.sleep(0.02)
        assert ids_of(slow) == fast


def test_disconnecting_clients_leak_nothing(server: Running) -> None:
    executor: Any = server.server.engine.executor
    rng = random.Random(3)
    for _ in range(30):
        with grpc.insecure_channel(server.address) as channel:
            call = pb_grpc.GenerationServiceStub(channel).Generate(Req(text="x" * 300))
            for _ in range(rng.randint(0, 4)):
                next(call, None)
    until(lambda: server.scheduler.active == 0)
    until(lambda: not executor.lanes)
    assert executor.pages.free == executor.limits.num_pages


def test_some_tens_of_random_requests_end_with_the_right_status(server: Running) -> None:
    rng = random.Random(7)
    results: list[tuple[str, Any]] = []

    def one(n: int) -> None:
        kind = rng.choice(["good", "good", "good", "cancel", "deadline", "bad"])
        request = Req(
            tokens=pb.TokenIds(ids=[n % 200] * rng.randint(1, 400)), sampling=S(seed=n),
            stopping=St(max_output_tokens=rng.randint(0, 80)), output=O(token_ids=True),
        )  # fmt: skip
        if kind == "bad":
            request.sampling.top_p = 7
        try:
            timeout = 0.01 if kind == "deadline" else 30
            call = server.stub.Generate(request, timeout=timeout)
            if kind == "cancel":
                next(call, None)
                call.cancel()
            out = list(call)
            results.append((kind, (request, out)))
        except grpc.RpcError as error:
            results.append((kind, error.code().name))

    threads = [threading.Thread(target=one, args=(n,)) for n in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 60
    allowed = {
        "cancel": {"CANCELLED"},
        "deadline": {"DEADLINE_EXCEEDED"},
        "bad": {"INVALID_ARGUMENT"},
    }
    for kind, outcome in results:
        if isinstance(outcome, str):
            assert outcome in allowed.get(kind, ()), (kind, outcome)
        else:
            request, out = outcome
            assert out[-1].HasField("finished")
            again = server.generate(**{f.name: v for f, v in request.ListFields()})
            assert ids_of(again) == ids_of(out)
    until(lambda: server.scheduler.active == 0)


# ---- faults and health -------------------------------------------------------------------------


def test_a_nan_ends_one_call_and_health_comes_back() -> None:
    executor = fake(step_seconds=0.002)
    executor.nan_for = lambda lane, position: lane.sampling.seed == 666 and position > 20
    with serving(executor) as s:
        stub = health_pb2_grpc.HealthStub(s.channel)
        seen: list[int] = []
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="ds4jax.v1.GenerationService"))

        thread = threading.Thread(target=lambda: [seen.append(m.status) for m in _quiet(watch)])
        thread.start()
        work = {"text": "x", "sampling": S(seed=1), "stopping": St(max_output_tokens=60),
                "output": O(token_ids=True)}  # fmt: skip
        alone = ids_of(s.generate(**work))
        well: list[Any] = []
        other = threading.Thread(target=lambda: well.extend(s.generate(**work)))
        other.start()
        sick = s.stub.Generate(Req(text="x", sampling=S(seed=666)))
        found = failure(lambda: list(sick))
        assert (found["code"], found["reason"]) == ("INTERNAL", "NON_FINITE_LOGITS")
        assert dict(sick.trailing_metadata())["ds4jax-output-tokens"] != "0"
        other.join(20)
        assert ids_of(well) == alone
        serving_, not_serving = 1, 2
        until(lambda: seen[-2:] == [not_serving, serving_])
        watch.cancel()
        thread.join(5)


def _quiet(call: Any) -> Iterator[Any]:
    try:
        yield from call
    except grpc.RpcError:
        return


def test_a_lost_device_is_internal_and_then_unavailable() -> None:
    executor = fake()
    with serving(executor, settings=quick(self_test_retry=60.0)) as s:
        executor.fail_step = lambda plan: RuntimeError("lost")
        found = failure(lambda: s.generate(text="x"))
        assert (found["code"], found["reason"]) == ("INTERNAL", "DEVICE_ERROR")
        assert "lost" not in found["message"]
        until(lambda: s.scheduler.counters.self_tests == 1)
        found = failure(lambda: s.generate(text="x"))
        assert (found["code"], found["reason"]) == ("UNAVAILABLE", "DEVICE_ERROR")
        assert found["retry"] >= 1
        check = health_pb2_grpc.HealthStub(s.channel).Check(health_pb2.HealthCheckRequest())
        assert check.status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_the_port_answers_while_the_model_loads() -> None:
    gate = threading.Event()

    def load() -> FakeExecutor:
        assert gate.wait(20)
        return fake()

    with serving(load, wait=False, admin="127.0.0.1:0") as s:
        stub = health_pb2_grpc.HealthStub(s.channel)
        status = health_pb2.HealthCheckResponse
        assert stub.Check(health_pb2.HealthCheckRequest()).status == status.NOT_SERVING
        found = failure(lambda: s.generate(text="x"))
        assert (found["code"], found["reason"]) == ("UNAVAILABLE", "MODEL_LOADING")
        assert found["retry"] > 0 and "weights" in found["message"]
        found = failure(lambda: s.models.ListModels(pb.ListModelsRequest()))
        assert found["reason"] == "MODEL_LOADING"
        with grpc.insecure_channel(f"127.0.0.1:{s.server.admin_port}") as channel:
            state = pb_grpc.AdminServiceStub(channel).GetStatus(pb.GetStatusRequest())
        assert state.state == pb.GetStatusResponse.STATE_LOADING
        assert (state.loading_stage, state.loading_fraction) == ("weights", 0.5)
        gate.set()
        for name in ("", "ds4jax.v1.GenerationService", "ds4jax.v1.ModelService"):
            request = health_pb2.HealthCheckRequest(service=name)
            until(lambda request=request: stub.Check(request).status == status.SERVING)
        assert s.generate(text="x", stopping=St(max_output_tokens=1))


def test_a_drain_while_loading_holds_afterwards() -> None:
    gate = threading.Event()

    def load() -> FakeExecutor:
        assert gate.wait(20)
        return fake()

    with serving(load, wait=False, admin="127.0.0.1:0") as s:
        with grpc.insecure_channel(f"127.0.0.1:{s.server.admin_port}") as channel:
            pb_grpc.AdminServiceStub(channel).Drain(pb.DrainRequest())
        gate.set()
        assert s.server.engine.loaded.wait(20)
        found = failure(lambda: s.generate(text="x"))
        assert (found["code"], found["reason"]) == ("UNAVAILABLE", "DRAINING")
        check = health_pb2_grpc.HealthStub(s.channel).Check(health_pb2.HealthCheckRequest())
        assert check.status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_a_load_that_fails_ends_the_server_with_an_error() -> None:
    def load() -> FakeExecutor:
        raise OSError("no such weights")

    with serving(load, wait=False) as s:
        until(lambda: s.server._stopped.is_set())
    assert s.exit_code == 1


def test_a_self_test_that_fails_at_start_ends_the_server() -> None:
    executor = fake()
    executor.nan_for = lambda lane, position: True
    with serving(executor, wait=False) as s:
        until(lambda: s.server._stopped.is_set())
    assert s.exit_code == 1


# ---- tokens, models, reflection, metrics, admin ------------------------------------------------


def test_tokens_and_text(server: Running) -> None:
    stub = server.stub
    text = "<think>héllo"
    out = stub.Tokenize(pb.TokenizeRequest(text=text, pieces=True))
    assert (
        list(out.ids) == TOY.encode_completion(text) and b"".join(out.pieces[1:]).decode() == text
    )
    assert out.ids[0] == M.bos and M.think_open not in out.ids
    out = stub.Tokenize(pb.TokenizeRequest(text=text, parse_markers=True, no_bos=True))
    assert out.ids[0] == M.think_open
    assert stub.Detokenize(pb.DetokenizeRequest(ids=out.ids)).text == text
    rendered = stub.Tokenize(pb.TokenizeRequest(chat=chat("hi <think>", thinking=OFF)))
    assert rendered.prompt.endswith("<｜Assistant｜></think>")
    count = stub.CountTokens(pb.CountTokensRequest(chat=chat("hi <think>", thinking=OFF)))
    assert count.prompt_tokens == len(rendered.ids)
    assert count.available_tokens == 2048 - len(rendered.ids)
    started = server.generate(
        chat=chat("hi <think>", thinking=OFF), stopping=St(max_output_tokens=1)
    )[0].started
    assert started.prompt_tokens == len(rendered.ids)
    for call in (
        lambda: stub.Detokenize(pb.DetokenizeRequest(ids=[VOCAB])),
        lambda: stub.CountTokens(pb.CountTokensRequest()),
        lambda: stub.Tokenize(pb.TokenizeRequest(chat=pb.ChatInput())),
    ):
        assert failure(call)["code"] == "INVALID_ARGUMENT"
    assert failure(lambda: stub.Detokenize(pb.DetokenizeRequest(model="x")))["code"] == "NOT_FOUND"


@pytest.mark.parametrize(("profile", "count"), [("v4-preview", 3), ("v4-0731", 55)])
def test_recorded_prompts_are_those_that_a_server_makes(profile: str, count: int) -> None:
    """Roles, tasks, prefixes, tools, effort and thinking have their way over the wire."""
    effort = {"medium": "low", "xhigh": "high"}
    done = 0
    with serving(tokenizer=real_tokenizer(), model={"chat_profile": profile}) as s:
        for case in vectors("chat/encode.json")["cases"]:
            if case["profile"] != profile or case.get("response_format"):
                continue
            level = case.get("reasoning_effort")
            options = Options(
                messages=case["messages"], tools=case.get("tools") or (),
                tool_choice=case.get("tool_choice") or "auto", effort=effort.get(level, level),
            )  # fmt: skip
            try:
                wire = build_chat(options)
            except ValueError as error:
                assert "no place on the wire" in str(error), case["id"]
                continue
            wire.thinking.mode = 1 if case["thinking"] else 2
            if case.get("drop_thinking") is not None:
                wire.thinking.drop_thinking = case["drop_thinking"]
            out = s.stub.Tokenize(pb.TokenizeRequest(chat=wire))
            assert out.prompt == case["expected_prompt"], case["id"]
            assert list(out.ids) == case["expected_ids"], case["id"]
            done += 1
    assert done >= count


def test_a_marker_that_the_vocabulary_lacks_is_named_without_its_file() -> None:
    with serving(tokenizer=real_tokenizer(), model={"chat_profile": "v4.1"}) as s:
        found = failure(lambda: s.stub.Tokenize(pb.TokenizeRequest(chat=chat())))
    assert (found["code"], found["fields"]) == ("INVALID_ARGUMENT", ["chat"])
    assert found["message"].startswith("chat: the prompt needs the marker '<｜System｜>'")


def test_developers_are_systems_and_late_systems_can_be_users(server: Running) -> None:
    def render(role: Any, **kwargs: Any) -> str:
        user = pb.Message(role=pb.Message.ROLE_USER, parts=[pb.Part(text="hi")])
        other = pb.Message(role=role, parts=[pb.Part(text="be brief")])
        wire = pb.ChatInput(messages=[user, other], **kwargs)
        return str(server.stub.Tokenize(pb.TokenizeRequest(chat=wire)).prompt)

    system, developer = pb.Message.ROLE_SYSTEM, pb.Message.ROLE_DEVELOPER
    front = render(system)
    assert render(developer) == front == render(system, system_placement=1)
    as_user = render(system, system_placement=pb.SYSTEM_PLACEMENT_AS_USER)
    assert front.index("be brief") < front.index("<｜User｜>hi")
    assert as_user.index("<｜User｜>hi") < as_user.index("be brief")


def test_struct_arguments_render_like_json_ones(server: Running) -> None:
    arguments = {"b": 1, "a": "x", "c": [1.5, None, True, {"d": "é"}]}
    struct = struct_pb2.Struct()
    struct.update(arguments)
    prompts = []
    for call in (
        pb.ToolCall(id="1", name="run", arguments_struct=struct),
        pb.ToolCall(id="1", name="run", arguments_json=json.dumps(dict(sorted(arguments.items())))),
    ):
        messages = [
            pb.Message(role=pb.Message.ROLE_USER, parts=[pb.Part(text="a"), pb.Part(text="b")]),
            pb.Message(role=pb.Message.ROLE_ASSISTANT, tool_calls=[call]),
            pb.Message(role=pb.Message.ROLE_TOOL, tool_call_id="1", parts=[pb.Part(text="r")]),
        ]
        out = server.stub.Tokenize(pb.TokenizeRequest(chat=pb.ChatInput(messages=messages)))
        prompts.append(out.prompt)
    assert prompts[0] == prompts[1] and "a\n\nb" in prompts[0]


def test_models(server: Running) -> None:
    models = server.models.ListModels(pb.ListModelsRequest()).models
    assert len(models) == 1 and models[0] == server.models.GetModel(
        pb.GetModelRequest(name="models/fake")
    )
    assert models[0].limits.lanes == 6 and models[0].context_length == 2048
    assert models[0].limits.max_concurrent_streams >= 6 + models[0].limits.queue
    assert not models[0].capabilities.prompt_logprobs and models[0].capabilities.logprobs
    assert (
        failure(lambda: server.models.GetModel(pb.GetModelRequest(name="x")))["code"] == "NOT_FOUND"
    )


def test_deviations_are_shown_wherever_it_matters() -> None:
    model = {"approximate": True, "experts_per_token": 4, "unqualified": True}
    with serving(model=model) as s:
        info = s.models.GetModel(pb.GetModelRequest())
        assert info.approximate and info.unqualified and info.experts_per_token == 4
        assert info.numerics == "plain approximate"
        call = s.stub.Generate(Req(text="x", stopping=St(max_output_tokens=1)))
        assert next(call).started.numerics == "plain approximate"
        metadata = dict(call.initial_metadata())
        assert metadata["ds4jax-approximate"] == "experts_per_token=4"
        assert metadata["ds4jax-unqualified"] == "answers may depend on load"
        list(call)


def test_a_model_without_a_tokenizer_serves_ids() -> None:
    with serving(FakeExecutor(vocab_size=300), tokenizer=None) as s:
        out = s.generate(
            tokens=pb.TokenIds(ids=[1, 2]),
            stopping=St(max_output_tokens=5),
            output=O(token_ids=True),
        )
        assert len(ids_of(out)) == 5 and text_of(out) == ""
        for request in (Req(text="x"), Req(chat=chat())):
            found = failure(lambda request=request: list(s.stub.Generate(request)))
            assert (found["code"], found["reason"]) == ("UNIMPLEMENTED", "FEATURE_UNSUPPORTED")


def test_reflection_lists_the_services_in_both_versions(server: Running) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    symbol = reflection_pb2.ServerReflectionRequest(
        file_containing_symbol="ds4jax.v1.GenerationService"
    )
    for version in ("v1", "v1alpha"):
        call = server.channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        listed, file = list(call(iter([request, symbol]), timeout=10))
        names = {x.name for x in listed.list_services_response.service}
        assert {"ds4jax.v1.GenerationService", "ds4jax.v1.ModelService"} <= names
        assert "ds4jax.v1.AdminService" not in names
        assert len(file.file_descriptor_response.file_descriptor_proto) >= 1
    assert reflection_pb2_grpc.ServerReflectionStub(server.channel)


METRICS = [
    "requests_total", "requests_active", "requests_queued", "time_to_first_token_seconds_bucket",
    "time_per_output_token_seconds_bucket", "request_duration_seconds_bucket",
    "queue_duration_seconds_bucket", "prefill_duration_seconds_bucket", "prompt_tokens_total",
    "output_tokens_total", "kv_pages_used", "kv_pages_total", "prefix_cache_lookups_total",
    "prefix_cache_hits_total", "spec_drafts_total", "spec_proposed_tokens_total",
    "batch_lanes_bucket", "step_duration_seconds_bucket", "compilations_total",
    "compile_seconds_total", "slow_client_total", "device_memory_bytes", "build_info",
    "steps_total", "step_rows_total", "engine_seconds_total", "lanes_parked", "faults_total",
    "compilations_after_ready", "forked_tokens_total", "health_changes_total",
]  # fmt: skip


def test_metrics_on_the_side_port() -> None:
    executor = fake(script=script)
    port = _free_port()
    with serving(executor, metrics_port=port) as s:
        s.generate(chat=chat(), sampling=scripted("hm</think>ok"))
        failure(lambda: s.generate(text=""))
        time.sleep(0.1)  # a call is counted after its status is sent
        text = (
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
        )
    lines = dict(x.rsplit(" ", 1) for x in text.splitlines() if not x.startswith("#"))
    for name in METRICS:
        assert any(k.startswith(f"ds4jax_{name}") for k in lines), name
    assert lines['ds4jax_requests_total{code="OK",finish_reason="stop"}'] == "1.0"
    assert lines['ds4jax_requests_total{code="INVALID_ARGUMENT",finish_reason=""}'] == "1.0"
    assert lines['ds4jax_output_tokens_total{kind="reasoning"}'] == "3.0"
    assert lines["ds4jax_requests_active"] == "0.0"
    assert lines['ds4jax_slow_client_total{reason="ended"}'] == "0.0"
    assert lines['ds4jax_compilations_total{program="other"}'] == "3.0"
    # The self-test is two tokens in one step; the chat is chunks, steps of one row after it, and
    # one more that was on its way when the answer ended.
    prompt = int(float(lines['ds4jax_prompt_tokens_total{source="computed"}']))
    out = len(ids("hm</think>ok")) + 2
    assert lines['ds4jax_steps_total{bucket="8",phase="decode"}'] == f"{out - 1}.0"
    assert float(lines['ds4jax_step_rows_total{kind="real"}']) == 2 + prompt + out - 1
    assert float(lines['ds4jax_step_rows_total{kind="padded"}']) >= 6 + 7 * (out - 1)
    count = lambda name: float(lines[f"ds4jax_{name}_count"])  # noqa: E731
    for name in ("time_to_first_token", "time_per_output_token", "queue_duration",
                 "prefill_duration"):  # fmt: skip
        assert count(f"{name}_seconds") == 1.0, name
    assert count("request_duration_seconds") == 2.0
    assert float(lines['ds4jax_batch_lanes_count{path="single"}']) == out - 1
    assert lines['ds4jax_batch_lanes_count{path="batched"}'] == "0.0"
    phases = {p: float(lines[f'ds4jax_step_duration_seconds_count{{phase="{p}"}}'])
              for p in ("prefill", "decode")}  # fmt: skip
    assert phases == {"prefill": 1 - (-prompt // 128), "decode": out - 1}
    assert "ds4jax_parser_anomalies" in text and "ds4jax_cancelled" in text


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_admin_service_on_its_own_port() -> None:
    executor = fake(step_seconds=0.01)
    with serving(executor, admin="127.0.0.1:0", shown=(("ctx", "4096"),)) as s:  # noqa: SIM117
        with grpc.insecure_channel(f"127.0.0.1:{s.server.admin_port}") as channel:
            admin = pb_grpc.AdminServiceStub(channel)
            admin.StartProfile(pb.StartProfileRequest(max_records=5))
            endless = St(ignore_eos=True)
            call = s.stub.Generate(Req(text="x", request_id="watched", stopping=endless))
            for _ in range(20):
                next(call)
            until(lambda: len(admin.GetStatus(pb.GetStatusRequest()).lanes) == 1)
            state = admin.GetStatus(pb.GetStatusRequest())
            assert state.state == pb.GetStatusResponse.STATE_SERVING
            assert state.lanes[0].request_id == "watched" and state.lanes[0].state == "decode"
            assert state.lanes_total == 6 and state.pages_free < state.pages_total
            assert state.configuration["ctx"] == "4096" and state.memory_plan["raw"] == 4096
            assert state.counters.steps > 10 and state.counters.compiles_after_ready == 0
            profile = admin.StopProfile(pb.StopProfileRequest())
            records = [json.loads(x) for x in profile.json_lines.splitlines()]
            assert len(records) == 5 and profile.records_dropped > 0
            assert {"phase", "rows", "bucket", "seconds"} <= set(records[0])
            assert failure(lambda: admin.FlushPrefixCache(pb.FlushPrefixCacheRequest()))[
                "code"
            ] == ("UNIMPLEMENTED")
            bad = pb.StartProfileRequest(max_records=0)
            assert failure(lambda: admin.StartProfile(bad))["fields"] == ["max_records"]
            admin.Drain(pb.DrainRequest())
            found = failure(lambda: s.generate(text="x"))
            assert (found["code"], found["reason"]) == ("UNAVAILABLE", "DRAINING")
            assert found["retry"] > 0
            state = admin.GetStatus(pb.GetStatusRequest())
            assert state.state == pb.GetStatusResponse.STATE_DRAINING
            call.cancel()


def test_stopping_under_load_ends_every_stream() -> None:
    executor = fake(num_slots=2, step_seconds=0.01)
    with serving(executor) as s:
        endless = St(ignore_eos=True)
        calls = [s.stub.Generate(Req(text="x", stopping=endless)) for _ in range(4)]
        next(calls[0])
        until(lambda: s.scheduler.active == 4 and s.scheduler.waiting == 2)
        s.call(lambda: s.server.stop(0.3))
        reasons = [failure(lambda call=call: list(call))["reason"] for call in calls]
        assert sorted(reasons) == ["DRAINING"] * 2 + ["SHUTTING_DOWN"] * 2
        until(lambda: s.server._stopped.is_set())
    assert s.exit_code == 0


# ---- hostile bytes -----------------------------------------------------------------------------


def test_hostile_bytes_never_disturb_another_stream(server: Running) -> None:
    import socket

    work = {
        "text": "x", "sampling": S(seed=9), "stopping": St(max_output_tokens=300),
        "output": O(token_ids=True),
    }  # fmt: skip
    alone = ids_of(server.generate(**work))
    rng = random.Random(11)
    base = Req(
        chat=chat(tools=[TOOL]), sampling=S(seed=1, logit_bias={3: 1.0}), candidate_count=2,
        stopping=St(stop_strings=["a"], max_output_tokens=3), output=O(top_logprobs=2),
    ).SerializeToString()  # fmt: skip
    host, port = server.address.split(":")
    generate = raw(server.channel)
    codes = set()
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(ids_of(server.generate(**work))))
    for round_ in range(120):
        if round_ % 12 == 0:
            thread = threading.Thread(
                target=lambda: results.append(ids_of(server.generate(**work)))
            )
            thread.start()
            with socket.create_connection((host, int(port))) as junk:
                junk.sendall(rng.randbytes(rng.randint(1, 2000)))
        data = bytearray(base)
        for _ in range(rng.choice([1, 1, 1, 5])):
            action, at = rng.randrange(3), rng.randrange(len(data))
            if action == 0:
                data[at] = rng.randrange(256)
            elif action == 1:
                del data[at : at + rng.randint(1, 8)]
            else:
                data[at:at] = rng.randbytes(rng.randint(1, 8))
            data = data or bytearray(b"\0")
        try:
            for _ in generate(bytes(data), timeout=10):
                pass
            codes.add("OK")
        except grpc.RpcError as error:
            codes.add(error.code().name)
            assert error.code().name in (
                "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED",
            ), details(error)  # fmt: skip
        if round_ % 12 == 11:
            thread.join(20)
    assert results == [alone] * 10
    assert "INVALID_ARGUMENT" in codes and len(codes) >= 2
    until(lambda: server.scheduler.active == 0)


def test_a_deeply_nested_struct_is_refused(server: Running) -> None:
    value = b""
    for _ in range(300):  # Value{list_value{values: ...}}
        inner = b"\x0a" + _length(value) + value
        value = b"\x32" + _length(inner) + inner
    entry = b"\x0a\x01k\x12" + _length(value) + value
    struct = b"\x0a" + _length(entry) + entry
    call = b"\x22" + _length(struct) + struct
    message = b"\x08\x03\x22" + _length(call) + call
    chat_ = b"\x0a" + _length(message) + message
    data = b"\x12" + _length(chat_) + chat_
    found = failure(lambda: list(raw(server.channel)(data)))
    assert found["code"] == "INVALID_ARGUMENT"


def _length(data: bytes) -> bytes:
    out, n = bytearray(), len(data)
    while True:
        out.append((n & 127) | (128 if n > 127 else 0))
        n >>= 7
        if not n:
            return bytes(out)


def converted(request: pb.GenerateRequest) -> Call:
    model = ServedModel(id="m", display_name="m", vocab_size=VOCAB, tokenizer=TOY)
    return Converter(model, fake().limits, ServerConfig()).call(request)


SAMPLING = {
    "temperature": 0.5, "top_p": 0.75, "top_k": 3, "min_p": 0.125, "repetition_penalty": 1.5,
    "frequency_penalty": 0.25, "presence_penalty": -0.5, "penalty_window": 7,
    "logit_bias": ((3, 2.0), (5, -100.0)), "seed": 1 << 63, "top_logprobs": 0,
    "logprobs_after_sampling": True,
}  # fmt: skip
STOPPING = {
    "max_output_tokens": 9, "min_output_tokens": 2, "stop_strings": ("a", "b"),
    "stop_token_ids": (5,), "ignore_eos": True, "max_reasoning_tokens": 0, "time_limit": 1.5,
}  # fmt: skip


@pytest.mark.parametrize("name", [*SAMPLING, *STOPPING])
def test_every_option_reaches_the_lane_as_it_was_sent(name: str) -> None:
    """From typed options over the wire and back: alone, and all of them together."""
    for chosen in ([name], [*SAMPLING, *STOPPING]):
        sampling = SamplingParams(**{"seed": 1} | {k: SAMPLING[k] for k in chosen if k in SAMPLING})
        stopping = StoppingCriteria(**{k: STOPPING[k] for k in chosen if k in STOPPING})
        assert sampling != SamplingParams(seed=1) or stopping != StoppingCriteria()
        options = Options(prompt="x", sampling=sampling, stopping=stopping, speculate=False)
        call = converted(build_request(options))
        (lane,) = call.lanes
        assert lane.sampling == sampling and call.stopping == stopping
        assert (lane.min_output_tokens, lane.speculate) == (stopping.min_output_tokens, False)
        most = stopping.max_output_tokens
        assert lane.max_output_tokens == (4096 - 2 if most is None else most)
        assert set(stopping.stop_token_ids) <= set(lane.stop_ids)
        assert (M.eos in lane.stop_ids) != stopping.ignore_eos
        if stopping.max_reasoning_tokens is not None:
            assert lane.reasoning is not None and lane.reasoning.max_tokens == 0


def test_lanes_differ_only_by_candidate() -> None:
    """What makes candidates comparable: one prompt array, one seed."""
    call = converted(Req(text="x", candidate_count=3))
    assert [lane.candidate for lane in call.lanes] == [0, 1, 2]
    assert len({id(lane.prompt) for lane in call.lanes}) == 1
    assert len({lane.sampling for lane in call.lanes}) == 1
    assert replace(call.lanes[1], candidate=0).stop_ids == call.lanes[0].stop_ids
