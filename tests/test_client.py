"""The typed client, sync and async, against a server on a real port."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ds4jax import client as lib
from ds4jax.client import AsyncClient, Client, Options, RequestFailed
from ds4jax.config import SamplingParams, StoppingCriteria
from tests.serve_tools import Running, fake, serving, until
from tests.test_server import CALL, ids
from tests.text_tools import toy_tokenizer

SCRIPTS: dict[int, list[int]] = {}
TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
SHORT = StoppingCriteria(max_output_tokens=6)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    executor = fake(max_ctx=2048, script=lambda lane: SCRIPTS.get(int(lane.sampling.seed or 0)))
    with serving(executor) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[Client]:
    with Client(server.address, timeout=20) as made:
        yield made


def scripted(seed: int, text: str) -> SamplingParams:
    SCRIPTS[seed] = ids(text)
    return SamplingParams(seed=seed)


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_a_chat_is_collected(client: Client) -> None:
    result = client.generate(messages=user("hi"), sampling=scripted(1, "hm</think>yes"))
    assert (result.reasoning, result.text, result.finish_reason) == ("hm", "yes", "stop")
    assert result.seed == 1 and result.finished.usage.output_tokens == 7
    assert result.finished.timings.total > 0 and result.started.model == "models/fake"
    off = client.generate(messages=user("hi"), effort="none", sampling=scripted(2, "yes"))
    assert (off.reasoning, off.text) == ("", "yes")


def test_the_stream_is_typed_and_adds_up(client: Client) -> None:
    events = list(
        client.stream(
            prompt="x", token_ids=True, sampling=SamplingParams(seed=3, top_logprobs=2),
            stopping=SHORT,
        )
    )  # fmt: skip
    assert isinstance(events[0], lib.Started) and isinstance(events[-1], lib.Finished)
    deltas = [e for e in events if isinstance(e, lib.Delta)]
    token_ids = [t for d in deltas for t in d.token_ids]
    rows = [r for d in deltas for r in d.logprobs]
    assert [r.token for r in rows] == token_ids and all(len(r.top) == 2 for r in rows)
    assert "".join(d.content for d in deltas) == toy_tokenizer().decode(token_ids)


def test_tool_calls(client: Client) -> None:
    options = Options(messages=user("go"), tools=[TOOL], effort="none", sampling=scripted(4, CALL))
    result = client.generate(options)
    assert result.finish_reason == "tool_calls" and result.text == "Well."
    assert json.loads(result.tool_calls[0].arguments) == {"cmd": "ls -l", "n": 3}
    pieces = [p for e in client.stream(options) if isinstance(e, lib.Delta) for p in e.tool_calls]
    assert pieces[0].name == "run" and pieces[-1].end


def test_every_option_reaches_the_wire() -> None:
    sampling = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, repetition_penalty=1.5,
        frequency_penalty=0.25, presence_penalty=-0.5, penalty_window=7, logit_bias=((3, 2.0),),
        seed=0, top_logprobs=4, logprobs_after_sampling=True,
    )  # fmt: skip
    stopping = StoppingCriteria(
        max_output_tokens=9, min_output_tokens=2, stop_strings=("a",), stop_token_ids=(5,),
        ignore_eos=True, max_reasoning_tokens=3, time_limit=1.5,
    )  # fmt: skip
    wire = lib.build_request(
        Options(
            prompt="p", sampling=sampling, stopping=stopping, candidates=2, model="m",
            request_id="r", token_ids=True, reasoning="inline", include_stop_string=True, echo=True,
            speculate=False, min_delta_interval=0.5, progress_interval=3.0,
        )
    )  # fmt: skip
    for message in (wire.sampling, wire.stopping, wire.output):
        missing = {f.name for f in message.DESCRIPTOR.fields} - {
            f.name for f, _ in message.ListFields()
        }
        assert missing <= {"prompt_logprobs"}, missing
    assert wire.sampling.HasField("seed") and wire.sampling.seed == 0
    assert wire.candidate_count == 2 and wire.stopping.time_limit.ToMilliseconds() == 1500


def test_messages_keep_their_parts() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "run", "arguments": '{"b": 1}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
        {"role": "assistant", "content": "The", "prefix": True},
    ]  # fmt: skip
    chat = lib.build_chat(Options(messages=messages, tools=[TOOL["function"]], tool_choice="none"))
    assert [p.text for p in chat.messages[1].parts] == ["a", "b"]
    assert chat.messages[2].tool_calls[0].arguments_json == '{"b": 1}'
    assert chat.messages[2].reasoning == "r" and chat.messages[4].prefix
    assert chat.tools[0].parameters_json == '{"type": "object"}'
    for bad in (
        [{"role": "nobody", "content": ""}], [{"role": "user", "contents": ""}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
    ):  # fmt: skip
        with pytest.raises(ValueError, match="messages"):
            lib.build_chat(Options(messages=bad))


def test_exactly_one_input() -> None:
    for fields in ({}, {"prompt": "a", "tokens": [1]}):
        with pytest.raises(ValueError, match="must be one"):
            Options(**fields)


def test_errors_are_typed(client: Client) -> None:
    with pytest.raises(RequestFailed) as caught:
        client.generate(prompt="", candidates=9)
    error = caught.value
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
    assert {f for f, _ in error.violations} == {"text", "candidate_count"}
    with pytest.raises(RequestFailed) as caught:
        client.generate(tokens=[5] * 3000)
    assert caught.value.metadata["context_length"] == "2048"


def test_tokens(client: Client) -> None:
    token_ids = client.tokenize("héllo")
    assert client.detokenize(token_ids[1:]) == "héllo"
    assert client.count_tokens(prompt="héllo") == len(token_ids)
    assert client.count_tokens(messages=user("hi")) > 3
    assert client.model().name == "models/fake" and client.healthy()


def test_candidates(client: Client) -> None:
    results = client.generate_all(
        prompt="x", candidates=2, token_ids=True, stopping=SHORT, sampling=SamplingParams(seed=0)
    )
    assert [r.finished.candidate for r in results] == [0, 1]
    assert results[0].token_ids != results[1].token_ids


def test_closing_the_stream_cancels(server: Running, client: Client) -> None:
    stream = client.stream(prompt="x", stopping=StoppingCriteria(ignore_eos=True))
    next(stream)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    until(lambda: server.scheduler.active == 0)


def test_a_deadline_covers_the_call() -> None:
    with serving(fake(step_seconds=0.05)) as s, Client(s.address) as client:
        began = time.monotonic()
        with pytest.raises(RequestFailed) as caught:
            client.generate(prompt="x", timeout=0.3)
        assert caught.value.code == "DEADLINE_EXCEEDED" and time.monotonic() - began < 1.0


def test_unavailable_is_tried_again_until_it_is_there() -> None:
    gates = []

    def load() -> Any:
        until(lambda: bool(gates), 20)
        return fake()

    with serving(load, wait=False) as s, Client(s.address, retries=3, timeout=20) as client:
        threading.Timer(0.5, lambda: gates.append(1)).start()
        began = time.monotonic()
        assert client.generate(prompt="x", stopping=SHORT).finish_reason == "length"
        assert time.monotonic() - began > 1.5  # the server had asked for two seconds
    with Client("127.0.0.1:1", retries=1) as nobody:
        with pytest.raises(RequestFailed) as caught:
            nobody.generate(prompt="x")
        assert caught.value.code == "UNAVAILABLE" and not nobody.healthy()


def test_the_async_client_tries_again_and_keeps_to_its_deadline() -> None:
    gate = threading.Event()

    def load() -> Any:
        assert gate.wait(20)
        return fake(step_seconds=0.02)

    async def main(address: str) -> None:
        async with AsyncClient(address, retries=0) as client:
            with pytest.raises(RequestFailed) as caught:
                await client.model()
            assert (caught.value.code, caught.value.reason) == ("UNAVAILABLE", "MODEL_LOADING")
        async with AsyncClient(address, retries=3, timeout=20) as client:
            asyncio.get_running_loop().call_later(0.3, gate.set)
            began = time.monotonic()
            counted, result = await asyncio.gather(
                client.count_tokens(prompt="abc"), client.generate(prompt="x", stopping=SHORT)
            )
            assert counted == 4 and result.finish_reason == "length"
            assert time.monotonic() - began > 1.5  # the server had asked for two seconds
            began = time.monotonic()
            with pytest.raises(RequestFailed) as caught:
                await client.generate(prompt="x", timeout=0.2)
            assert caught.value.code == "DEADLINE_EXCEEDED" and time.monotonic() - began < 1

    with serving(load, wait=False) as s:
        asyncio.run(main(s.address))


def test_no_try_is_made_that_would_end_after_the_deadline() -> None:
    """The server asks for two seconds, the caller has one: that is told at once."""
    gate = threading.Event()

    def load() -> Any:
        assert gate.wait(20)
        return fake()

    with serving(load, wait=False) as s, Client(s.address, retries=3) as client:
        began = time.monotonic()
        with pytest.raises(RequestFailed) as caught:
            client.generate(prompt="x", timeout=1.0)
        assert caught.value.reason == "MODEL_LOADING" and time.monotonic() - began < 0.9
        gate.set()


def test_what_has_begun_is_not_tried_again() -> None:
    executor = fake(step_seconds=0.01)
    with serving(executor) as s, Client(s.address) as client:
        stream = client.stream(prompt="x", stopping=StoppingCriteria(ignore_eos=True))
        next(stream)
        s.call(lambda: s.server.stop(0.0))
        with pytest.raises(RequestFailed) as caught:
            list(stream)
        assert (caught.value.code, caught.value.reason) == ("UNAVAILABLE", "SHUTTING_DOWN")


def test_async(server: Running) -> None:
    async def main() -> None:
        async with AsyncClient(server.address, timeout=20) as client:
            jobs = [
                client.generate(
                    prompt=f"p{n}", stopping=SHORT, token_ids=True, sampling=SamplingParams(seed=n)
                )
                for n in range(20, 28)
            ]
            together = await asyncio.gather(*jobs)
            for n, result in enumerate(together, start=20):
                alone = await client.generate(
                    prompt=f"p{n}", stopping=SHORT, token_ids=True, sampling=SamplingParams(seed=n)
                )
                assert alone.token_ids == result.token_ids
            assert (await client.model()).name == "models/fake"
            assert await client.count_tokens(prompt="abc") == 4
            with pytest.raises(RequestFailed) as caught:
                await client.generate(prompt="")
            assert caught.value.reason == "EMPTY_PROMPT"
            async for _ in client.stream(prompt="x", stopping=StoppingCriteria(ignore_eos=True)):
                break

    asyncio.run(main())
    until(lambda: server.scheduler.active == 0)


def test_a_remote_generation_reads_like_a_local_one(server: Running) -> None:
    from ds4jax import parser
    from ds4jax.client import Connection
    from ds4jax.remote import RemoteModel
    from ds4jax.request import ServiceError

    model = RemoteModel(Connection(address=server.address, timeout=20))
    options = Options(
        messages=user("go"), tools=[TOOL], sampling=scripted(30, f"hm</think>{CALL}")
    )  # fmt: skip
    generation = model.generate(options)
    outputs = list(generation)
    events = [e for o in outputs for e in o.events]
    assert isinstance(events[0], parser.Reasoning) and isinstance(events[-1], parser.CallEnd)
    result = generation.results[0]
    assert result.parsed is not None and result.parsed.content == "Well."
    assert result.parsed.reasoning == "hm" and result.finish_reason == "tool_calls"
    assert json.loads(result.parsed.tool_calls[0].arguments) == {"cmd": "ls -l", "n": 3}
    assert list(result.ids[:-1]) == ids(f"hm</think>{CALL}")
    assert generation.seed == 30 and generation.prompt_tokens > 3
    assert generation.timings.total >= generation.timings.prefill > 0
    endless = model.generate(Options(prompt="x", stopping=StoppingCriteria(ignore_eos=True)))
    with pytest.raises(ServiceError) as caught:
        for n, _ in enumerate(endless):
            if n == 3:
                endless.cancel()
    assert caught.value.code == "CANCELLED" and len(endless.partial().ids) >= 3
    until(lambda: server.scheduler.active == 0)
    model.close()
