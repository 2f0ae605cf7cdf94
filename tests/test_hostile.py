"""What a stranger can send to the port: nothing of it may cost others more than a moment.

A fake engine on a real port. Between attacks a well-behaved request must give the same ids, and
afterwards the server must hold nothing and have logged no failure of its own.
"""

from __future__ import annotations

import gc
import random
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import psutil
import pytest
from ds4jax_server import errors, service, settings
from ds4jax_server.pb import generation_pb2 as pb
from ds4jax_server.pb import generation_pb2_grpc as pb_grpc
from google.protobuf import duration_pb2, struct_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.serve_tools import Running, details, failure, fake, ids_of, serving, text_of, until
from tests.text_tools import toy_tokenizer

MIB = 1 << 20
WORK = pb.GenerateRequest(
    text="x", sampling=pb.SamplingParams(seed=5), output=pb.OutputOptions(token_ids=True),
    stopping=pb.StoppingCriteria(max_output_tokens=30, ignore_eos=True),
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(fake(max_ctx=2048), metrics_port=0) as running:
        yield running


@pytest.fixture(scope="module")
def expected(server: Running) -> list[int]:
    return ids_of(list(server.stub.Generate(WORK)))


@pytest.fixture(autouse=True)
def _unharmed(
    server: Running, expected: list[int], capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> Iterator[None]:  # fmt: skip
    yield
    assert ids_of(list(server.stub.Generate(WORK, timeout=30))) == expected
    until(lambda: server.scheduler.active == 0)
    executor: Any = server.server.engine.executor
    until(lambda: not executor.lanes and executor.pages.free == executor.limits.num_pages)
    assert "Traceback" not in capfd.readouterr().err
    assert not [r for r in caplog.records if r.exc_info]


def call(server: Running, data: bytes, method: str = "GenerationService/Generate") -> Any:
    """Details of how a call with these bytes ends; None if it ends well."""
    make = server.channel.unary_unary
    if method.endswith("Generate"):
        make = server.channel.unary_stream
    stub = make(f"/ds4jax.v1.{method}", request_serializer=None, response_deserializer=None)
    try:
        reply = stub(data, timeout=60)
        list(reply) if method.endswith("Generate") else None
    except grpc.RpcError as error:
        return details(error)
    return None


def number(n: int) -> bytes:
    out = bytearray()
    while True:
        out.append((n & 127) | (128 if n > 127 else 0))
        n >>= 7
        if not n:
            return bytes(out)


def field(n: int, data: bytes) -> bytes:
    """A length-delimited field."""
    return number(n << 3 | 2) + number(len(data)) + data


TEXT = field(3, b"a")
MANY = {
    "fields": (lambda: b"\x0a\x00" * (6 * MIB), "MALFORMED_REQUEST"),
    "numbers": (lambda: b"\x48\x01" * (6 * MIB), "MALFORMED_REQUEST"),
    "messages": (lambda: field(2, b"\x0a\x00" * (6 * MIB)), "INVALID_REQUEST"),
    "parts": (lambda: field(2, field(1, b"\x08\x02" + b"\x12\x00" * (6 * MIB))), "INVALID_REQUEST"),
    "tools": (lambda: field(2, b"\x12\x00" * (6 * MIB)), "INVALID_REQUEST"),
    "ids": (lambda: field(4, field(1, b"\x05" * (14 * MIB))), "CONTEXT_LENGTH_EXCEEDED"),
    "text": (lambda: field(3, b"a" * (14 * MIB)), "CONTEXT_LENGTH_EXCEEDED"),
    "chat": (
        lambda: field(2, field(1, b"\x08\x02" + field(2, field(1, b"a" * (14 * MIB))))),
        "CONTEXT_LENGTH_EXCEEDED",
    ),
    "stop strings": (lambda: TEXT + field(6, field(3, b"x") * (4 * MIB)), "INVALID_REQUEST"),
    "stop ids": (lambda: TEXT + field(6, field(4, b"\x01" * (14 * MIB))), "INVALID_REQUEST"),
    "biases": (
        lambda: TEXT + field(5, b"".join(field(9, b"\x08" + number(i)) for i in range(MIB))),
        "INVALID_REQUEST",
    ),
    "unknown fields": (lambda: TEXT + field(5, field(100, b"x") * (2 * MIB)), "INVALID_REQUEST"),
}  # fmt: skip
"""Bytes, nearly as many as are taken, and the reason they are refused for."""


@pytest.mark.parametrize("name", MANY)
def test_sixteen_megabytes_of_anything_cost_little(server: Running, name: str) -> None:
    make, reason = MANY[name]
    data = make()
    began = time.process_time()  # of this process, in which the server runs too
    found = call(server, data)
    assert (found["code"], found["reason"]) == ("INVALID_ARGUMENT", reason)
    assert time.process_time() - began < 4
    if reason == "CONTEXT_LENGTH_EXCEEDED":
        assert int(found["metadata"]["prompt_tokens"]) > 2048


def test_large_requests_leave_no_memory_behind(server: Running) -> None:
    """Not even until the next collection: what one of them becomes is forty times its size."""
    process = psutil.Process()
    data = field(2, b"\x0a\x00" * (2 * MIB))
    call(server, field(2, b"\x0a\x00" * MIB))
    gc.collect()
    before = process.memory_info().rss
    gc.disable()
    try:
        for _ in range(3):
            call(server, data)
            call(server, data, "GenerationService/CountTokens")
        until(lambda: process.memory_info().rss - before < 60 * MIB, 3)
    finally:
        gc.enable()


@pytest.mark.parametrize(("method", "data", "reason"), [
    ("Detokenize", field(2, b"\x05" * (15 * MIB)), "INVALID_REQUEST"),
    ("Detokenize", field(2, number(toy_tokenizer().markers.eos) * MIB), "REPLY_TOO_LARGE"),
    ("Detokenize", field(2, number(1 << 20) * MIB), "INVALID_TOKEN_ID"),
    ("CountTokens", field(3, b"a" * (15 * MIB)), "INVALID_REQUEST"),
    ("CountTokens", field(4, field(1, b"\x05" * (15 * MIB))), "INVALID_REQUEST"),
    ("CountTokens", field(2, b"\x0a\x00" * (6 * MIB)), "INVALID_REQUEST"),
    ("Tokenize", field(3, b"a" * (15 * MIB)), "INVALID_REQUEST"),
    ("Tokenize", field(3, b"a" * MIB) + b"\x30\x01", "REPLY_TOO_LARGE"),
])  # fmt: skip
def test_unary_calls_are_bounded_too(
    server: Running, method: str, data: bytes, reason: str
) -> None:
    began = time.process_time()
    assert call(server, data, f"GenerationService/{method}")["reason"] == reason
    assert time.process_time() - began < 5


def test_a_stream_goes_on_beside_large_requests(server: Running, expected: list[int]) -> None:
    """Tokens keep coming while others send what takes the server seconds to look through."""
    executor: Any = server.server.engine.executor
    stop = threading.Event()
    codes: list[str] = []
    large = [MANY[name][0]() for name in ("messages", "text", "biases", "unknown fields")]

    def flood() -> None:
        rng = random.Random(1)
        while not stop.is_set():
            codes.append(call(server, rng.choice(large))["code"])

    threads = [threading.Thread(target=flood) for _ in range(2)]
    executor.step_seconds = 0.02
    try:
        for thread in threads:
            thread.start()
        gaps, last = [], time.monotonic()
        request = pb.GenerateRequest()
        request.CopyFrom(WORK)
        request.stopping.max_output_tokens = 50
        got = []
        for message in server.stub.Generate(request, timeout=120):
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
            got += message.delta.token_ids
    finally:
        stop.set()
        executor.step_seconds = 0.0
        for thread in threads:
            thread.join(120)
    assert got[:30] == expected and len(got) == 50
    assert set(codes) == {"INVALID_ARGUMENT"}
    assert sorted(gaps)[len(gaps) // 2] < 0.25, "tokens hardly come"


# ---- errors must fit ---------------------------------------------------------------------------


def test_errors_are_small_enough_to_arrive(server: Running) -> None:
    """Clients refuse trailers of more than 8 KiB, and would see another code than was sent."""
    many = pb.GenerateRequest(tokens=pb.TokenIds(ids=[1 << 30] * 2000))
    found = failure(lambda: list(server.stub.Generate(many)))
    assert found["code"] == "INVALID_ARGUMENT" and found["reason"] == "INVALID_TOKEN_ID"
    assert 10 < len(found["fields"]) < 100
    named = pb.GenerateRequest(text="x", model="ж" * 100_000)
    assert failure(lambda: list(server.stub.Generate(named)))["reason"] == "MODEL_NOT_FOUND"
    tools = [pb.Tool(name='"' * 5000 + str(i)) for i in range(100)]
    wide = pb.GenerateRequest(chat=pb.ChatInput(tools=tools))
    assert failure(lambda: list(server.stub.Generate(wide)))["code"] == "INVALID_ARGUMENT"


@pytest.mark.parametrize("text", ["x" * 500, "ж" * 500])
def test_the_largest_status_fits(text: str) -> None:
    violations = [errors.Violation(text, text) for _ in range(100)]
    status = errors.status_of(errors.InvalidRequest(violations), "r" * 128)
    sent = sum(len(v) * (4 / 3 if k.endswith("-bin") else 1) for k, v in status.trailing_metadata)
    percent = sum(1 if 32 <= b < 127 else 3 for b in status.details.encode())
    assert sent + percent < 8 << 10


# ---- values that mean nothing ------------------------------------------------------------------


def arguments(**fields: Any) -> pb.GenerateRequest:
    """A chat with a past tool call."""
    user = pb.Message(role=pb.Message.ROLE_USER, parts=[pb.Part(text="x")])
    made = pb.Message(role=pb.Message.ROLE_ASSISTANT, tool_calls=[pb.ToolCall(name="t", **fields)])
    return pb.GenerateRequest(
        chat=pb.ChatInput(messages=[user, made, user]),
        stopping=pb.StoppingCriteria(max_output_tokens=1),
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_json_cannot_hold_are_refused(server: Running, value: float) -> None:
    made = struct_pb2.Struct()
    made.fields["a"].list_value.values.add().number_value = value
    found = failure(lambda: list(server.stub.Generate(arguments(arguments_struct=made))))
    assert found["fields"] == ["chat.messages[1].tool_calls[0].arguments_struct"]
    made.fields["a"].list_value.values[0].number_value = 1e300
    assert list(server.stub.Generate(arguments(arguments_struct=made)))


@pytest.mark.parametrize("text", [
    "[" * 100_000, '{"a":' * 1000, '{"a": "\\ud800"}', "\0", '{"\\ud800": 1}',
])  # fmt: skip
def test_json_of_all_kinds_ends_in_an_answer_or_a_reason(server: Running, text: str) -> None:
    for request in (
        arguments(arguments_json=text),
        pb.GenerateRequest(
            chat=pb.ChatInput(
                messages=[pb.Message(role=2, parts=[pb.Part(text="x")])],
                tools=[pb.Tool(name="t", parameters_json=text)],
            ),
            stopping=pb.StoppingCriteria(max_output_tokens=1),
        ),
    ):
        try:
            list(server.stub.Generate(request))
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(("seconds", "nanos"), [
    (1, -5), (-1, 5), (0, 2_000_000_000), (1 << 40, 0), (0, -2_000_000_000),
])  # fmt: skip
def test_a_broken_duration_is_named(server: Running, seconds: int, nanos: int) -> None:
    wrong = duration_pb2.Duration(seconds=seconds, nanos=nanos)
    for group, name in (
        ("stopping", "time_limit"), ("output", "progress_interval"),
        ("output", "min_delta_interval"),
    ):  # fmt: skip
        request = pb.GenerateRequest(text="x")
        getattr(getattr(request, group), name).CopyFrom(wrong)
        found = failure(lambda request=request: list(server.stub.Generate(request)))
        assert f"{group}.{name}" in found["fields"]


def test_banning_every_id_is_refused(server: Running) -> None:
    size = server.models.ListModels(pb.ListModelsRequest()).models[0].vocab_size
    request = pb.GenerateRequest(text="x")
    for i in range(size):
        request.sampling.logit_bias[i] = -100.0
    found = failure(lambda: list(server.stub.Generate(request)))
    assert found["fields"] == ["sampling.logit_bias"] and "every id" in found["message"]


# ---- names -------------------------------------------------------------------------------------


def test_the_id_in_the_metadata_is_checked(server: Running) -> None:
    def run(name: str, **fields: Any) -> str:
        request = pb.GenerateRequest(
            text="x", stopping=pb.StoppingCriteria(max_output_tokens=1), **fields
        )
        call = server.stub.Generate(request, metadata=(("x-request-id", name),))
        return str(next(call).started.request_id)

    assert run("from-metadata") == "from-metadata"
    assert run("from-metadata", request_id="from-field") == "from-field"
    found = failure(lambda: run("y" * 129))
    assert found["fields"] == ["x-request-id"] and found["request_id"].startswith("req-")
    for name in ("\x1b[2Jgone", "a\nb", "ж"):
        found = failure(lambda name=name: run("m", request_id=name))
        assert found["fields"] == ["request_id"] and found["request_id"] == "m"
    tokenize = server.stub.Tokenize
    wrong = (("x-request-id", "y" * 129),)
    found = failure(lambda: tokenize(pb.TokenizeRequest(text="x"), metadata=wrong))
    assert found["fields"] == ["x-request-id"]


def test_a_model_may_have_any_name() -> None:
    with serving(model={"id": "модель 1%\n"}) as s:  # as the file may be called
        call = s.stub.Generate(WORK)
        assert next(call).started.model == "models/модель 1%\n"
        name = dict(call.initial_metadata())["ds4jax-model"]
        assert name.isascii() and name.isprintable() and "%" in name
        list(call)


# ---- streams that stay open --------------------------------------------------------------------


def test_watchers_take_no_room_of_requests(server: Running) -> None:
    channels = [
        grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)])
        for _ in range(4)
    ]
    most = settings.PROBE_STREAMS
    watches = [
        health_pb2_grpc.HealthStub(channels[i % 4]).Watch(health_pb2.HealthCheckRequest())
        for i in range(most + 20)
    ]
    first: list[str] = []

    def look(watch: Any) -> None:
        try:
            first.append(str(next(watch).status))
        except grpc.RpcError as error:
            first.append(error.code().name)

    threads = [threading.Thread(target=look, args=(w,)) for w in watches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(first) == ["1"] * most + ["RESOURCE_EXHAUSTED"] * 20
    check = health_pb2_grpc.HealthStub(server.channel).Check(health_pb2.HealthCheckRequest())
    assert check.status == health_pb2.HealthCheckResponse.SERVING
    stub = server.channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        request_serializer=None, response_deserializer=None,
    )  # fmt: skip
    assert failure(lambda: list(stub(iter([]))))["code"] == "RESOURCE_EXHAUSTED"
    for channel in channels:
        channel.close()
    until(lambda: server.server._probes.open == 0)
    assert list(stub(iter([]))) == []


def test_calls_that_never_say_what_they_want_are_ended(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "FIRST_MESSAGE_SECONDS", 0.5)
    room = 6 + 64 + settings.SPARE_STREAMS + settings.PROBE_STREAMS
    end = threading.Event()

    def nothing() -> Iterator[bytes]:
        end.wait(20)
        yield from ()

    with grpc.insecure_channel(server.address) as channel:
        stubs = [
            channel.stream_stream(
                f"/ds4jax.v1.GenerationService/{name}",
                request_serializer=None, response_deserializer=None,
            )
            for name in ("Generate", "Tokenize")
        ]  # fmt: skip
        calls = [stubs[i % 2](nothing()) for i in range(room)]
        found = [failure(lambda c=c: list(c)) for c in calls]
        end.set()
    assert {f["code"] for f in found} <= {"DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}
    assert sum(f.get("reason") == "REQUEST_NOT_RECEIVED" for f in found) > room // 2
    empty = server.channel.stream_stream(
        "/ds4jax.v1.GenerationService/Generate",
        request_serializer=None, response_deserializer=None,
    )  # fmt: skip
    assert failure(lambda: list(empty(iter([]))))["code"] == "INVALID_ARGUMENT"


def test_without_a_token_nothing_is_waited_for(tmp_path: Any) -> None:
    file = tmp_path / "token"
    file.write_text("secret")
    end = threading.Event()

    def nothing() -> Iterator[bytes]:
        end.wait(20)
        yield from ()

    with serving(auth_token_file=str(file)) as s:
        for name in ("GenerationService/Generate", "ModelService/GetModel"):
            stub = s.channel.stream_stream(
                f"/ds4jax.v1.{name}", request_serializer=None, response_deserializer=None
            )
            for token in (None, "Bearer wrong", "secret", "bearer secret"):
                metadata = (("authorization", token),) if token else ()
                found = failure(lambda m=metadata, stub=stub: list(stub(nothing(), metadata=m)))
                assert found["code"] == "UNAUTHENTICATED" and found["request_id"]
        end.set()


def test_a_watcher_that_does_not_read_delays_nobody() -> None:
    """Its window is 0 bytes, so that nothing can be sent to it; health must change all the same."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    no_window = b"\0\0\6\4\0\0\0\0\0" + b"\0\4" + b"\0\0\0\0"  # SETTINGS: initial window 0
    names = [
        (b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"x"),
        (b":path", b"/grpc.health.v1.Health/Watch"), (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ]  # fmt: skip
    block = b"".join(
        b"\0" + bytes([len(k)]) + k + bytes([len(v)]) + v for k, v in names
    )  # fmt: skip
    headers = len(block).to_bytes(3, "big") + b"\1\4\0\0\0\1" + block
    data = b"\0\0\5\0\1\0\0\0\1" + b"\0" * 5  # an empty message, end of stream
    with serving() as s:
        host, port = s.address.split(":")
        with socket.create_connection((host, int(port))) as deaf:
            deaf.sendall(preface + no_window + headers + data)
            until(lambda: s.server._probes.open == 1)
            began = time.monotonic()
            s.call(lambda: s.server.stop(0.0))
            until(s.server._stopped.is_set)
            assert time.monotonic() - began < 5


# ---- sockets -----------------------------------------------------------------------------------


def test_half_open_and_reset_connections(server: Running) -> None:
    host, port = server.address.split(":")
    rng = random.Random(2)
    held = []
    for i in range(200):
        s = socket.create_connection((host, int(port)))
        if i % 4 == 1:
            s.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(i))
        elif i % 4 == 2:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            s.close()
            continue
        held.append(s)
    assert list(server.stub.Generate(WORK, timeout=20))
    for s in held:
        s.close()


def test_two_hundred_connections_at_once(server: Running, expected: list[int]) -> None:
    results: list[Any] = []

    def one() -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(server.address, options=options) as channel:
            try:
                stub = pb_grpc.GenerationServiceStub(channel)
                results.append(ids_of(list(stub.Generate(WORK, timeout=60))))
            except grpc.RpcError as error:
                results.append(error.code().name)

    threads = [threading.Thread(target=one) for _ in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    good = [r for r in results if isinstance(r, list)]
    assert len(results) == 200 and all(r == expected for r in good) and len(good) >= 6
    assert {r for r in results if isinstance(r, str)} <= {"RESOURCE_EXHAUSTED"}


def test_cancels_at_any_moment_leave_nothing(server: Running) -> None:
    rng = random.Random(4)

    def one(n: int) -> None:
        request = pb.GenerateRequest(
            tokens=pb.TokenIds(ids=[n % 200] * rng.randint(1, 1500)),
            candidate_count=rng.randint(1, 3),
            stopping=pb.StoppingCriteria(max_output_tokens=rng.randint(0, 300)),
        )
        call = server.stub.Generate(request, timeout=rng.choice([None, 0.001, 0.05]))
        threading.Timer(rng.random() * 0.05, call.cancel).start()
        for _ in quiet(call):
            pass

    for _ in range(8):
        threads = [threading.Thread(target=one, args=(n,)) for n in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)


def quiet(call: Any) -> Iterator[Any]:
    try:
        yield from call
    except grpc.RpcError:
        return


def test_the_metrics_port_minds_nothing(server: Running) -> None:
    port = server.server.metrics_port
    assert port
    rng = random.Random(3)
    held = []
    began = time.monotonic()
    for i in range(60):
        s = socket.create_connection(("127.0.0.1", port))
        if i % 4 == 0:
            s.sendall(rng.randbytes(200))
        elif i % 4 == 1:
            s.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif i % 4 == 2:
            s.sendall(b"POST /metrics HTTP/1.1\r\nContent-Length: 100000\r\n\r\nxx")
        elif len(held) < 8:
            held.append(s)
            continue
        s.close()
    url = f"http://127.0.0.1:{port}/metrics"
    until(lambda: b"ds4jax_requests_total" in fetch(url))
    assert time.monotonic() - began < 4, "connections are not taken"
    for s in held:
        s.close()


def fetch(url: str) -> bytes:
    try:
        return bytes(urllib.request.urlopen(url, timeout=10).read())
    except OSError:
        return b""


# ---- sizes on the way out ----------------------------------------------------------------------


def test_a_long_echo_and_long_deltas_come_in_pieces() -> None:
    with serving(fake(max_ctx=1 << 17, num_pages=2000, num_slots=2)) as s:
        text = "ä" * 40_000
        out = s.generate(
            text=text, output=pb.OutputOptions(echo=True), sampling=pb.SamplingParams(seed=1),
            stopping=pb.StoppingCriteria(max_output_tokens=1), timeout=60,
        )  # fmt: skip
        assert text_of(out).startswith(text)
        assert max(m.ByteSize() for m in out) < 1 << 18
        out = s.generate(
            text="x", output=pb.OutputOptions(
                token_ids=True, top_logprobs=20,
                min_delta_interval=duration_pb2.Duration(seconds=60),
            ),
            stopping=pb.StoppingCriteria(max_output_tokens=2000, ignore_eos=True), timeout=60,
        )  # fmt: skip
        assert len(ids_of(out)) == 2000 and max(m.ByteSize() for m in out) < 300_000


def test_one_request_is_counted_once(server: Running) -> None:
    def count() -> float:
        text = fetch(f"http://127.0.0.1:{server.server.metrics_port}/metrics").decode()
        lines = [x for x in text.splitlines() if x.startswith("ds4jax_requests_total")]
        return sum(float(x.rsplit(" ", 1)[1]) for x in lines)

    before = count()
    request = pb.GenerateRequest()
    request.CopyFrom(WORK)
    request.candidate_count = 3
    list(server.stub.Generate(request))
    until(lambda: count() == before + 1)
