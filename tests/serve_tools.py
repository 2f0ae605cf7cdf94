"""A server over the fake executor, in a thread of this process, on a real port; and raw stubs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from ds4jax_server.app import Server
from ds4jax_server.pb import generation_pb2 as pb
from ds4jax_server.pb import generation_pb2_grpc as pb_grpc
from ds4jax_server.settings import Report, ServedModel, ServerConfig
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from ds4jax.plan import Executor
from ds4jax.scheduler import SchedulerConfig
from ds4jax.tokenizer import Tokenizer
from tests.fake_executor import FakeExecutor
from tests.text_tools import toy_tokenizer


def fake(**kwargs: Any) -> FakeExecutor:
    """An executor with the toy vocabulary that says no marker unless told to."""
    return FakeExecutor(vocab_size=toy_tokenizer().vocab_size, draw_below=256, **kwargs)


def quick(**kwargs: Any) -> SchedulerConfig:
    """Scheduler settings of a test server."""
    return SchedulerConfig(**{"coalesce": 0.0, "check_invariants": True, **kwargs})


class Running:
    """A started server and a channel to it."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop, address: str) -> None:
        self.server = server
        self.loop = loop
        self.address = address
        self.exit_code: int | None = None
        self.channel = grpc.insecure_channel(address)
        self.stub = pb_grpc.GenerationServiceStub(self.channel)
        self.models = pb_grpc.ModelServiceStub(self.channel)

    @property
    def scheduler(self) -> Any:
        return self.server.engine.scheduler

    def call(self, work: Callable[[], Any]) -> None:
        """Run something in the server's event loop."""
        self.loop.call_soon_threadsafe(work)

    def generate(self, timeout: float = 20.0, **fields: Any) -> list[Any]:
        """All messages of one call."""
        return list(self.stub.Generate(pb.GenerateRequest(**fields), timeout=timeout))


@contextmanager
def serving(
    executor: Executor | Callable[[], Executor] | None = None,
    *,
    tokenizer: Tokenizer | str | None = "toy",
    settings: SchedulerConfig | None = None,
    wait: bool = True,
    model: dict[str, Any] | None = None,
    **config: Any,
) -> Iterator[Running]:
    """A server for the time of the block."""
    made = fake() if executor is None else executor
    tok = toy_tokenizer() if tokenizer == "toy" else tokenizer

    def loader(report: Report) -> tuple[Executor, ServedModel]:
        report("weights", 0.5)
        ready = made() if callable(made) else made
        facts: dict[str, Any] = {"id": "fake", "display_name": "Fake", "tokenizer": tok}
        facts |= {"vocab_size": ready.limits.vocab_size, **(model or {})}
        return ready, ServedModel(**facts)

    options = {"port": 0, "grace": 5.0, **config}
    server_config = ServerConfig(scheduler=settings or quick(), **options)
    box: dict[str, Any] = {}
    up = threading.Event()

    def main() -> None:
        async def body() -> None:
            server = Server(server_config, loader, lanes=6)
            box["server"], box["loop"] = server, asyncio.get_running_loop()
            try:
                await server.start()
            except BaseException as error:
                box["error"] = error
                up.set()
                return
            up.set()
            box["code"] = await server.wait()

        asyncio.run(body())

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    assert up.wait(20)
    if "error" in box:
        raise box["error"]
    server = box["server"]
    address = f"127.0.0.1:{server.port}" if server.port else f"unix:{server_config.unix}"
    running = Running(server, box["loop"], address)
    try:
        if wait:
            assert server.engine.loaded.wait(20) and server.engine.error is None
        yield running
    finally:
        running.channel.close()
        if thread.is_alive():
            running.call(lambda: server.stop(0.0))
        thread.join(15)
        running.exit_code = box.get("code")
        assert not thread.is_alive(), "the server did not stop"


def details(error: grpc.RpcError) -> dict[str, Any]:
    """Code, reason, metadata, field violations and retry delay of a failed call."""
    status = rpc_status.from_call(error)
    out: dict[str, Any] = {"code": error.code().name, "message": error.details(), "fields": []}
    for item in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        bad = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        request = error_details_pb2.RequestInfo()
        if item.Unpack(info):
            out |= {"reason": info.reason, "domain": info.domain, "metadata": dict(info.metadata)}
        elif item.Unpack(bad):
            out["fields"] = [v.field for v in bad.field_violations]
        elif item.Unpack(retry):
            out["retry"] = retry.retry_delay.ToMilliseconds() / 1000
        elif item.Unpack(request):
            out["request_id"] = request.request_id
    return out


def failure(call: Callable[[], Any]) -> dict[str, Any]:
    """Details of the error that a call ends with."""
    try:
        call()
    except grpc.RpcError as error:
        return details(error)
    raise AssertionError("the call did not fail")


def text_of(messages: list[Any], candidate: int = 0) -> str:
    """Content of one candidate."""
    return "".join(
        m.delta.content for m in messages
        if m.HasField("delta") and m.delta.candidate == candidate
    )  # fmt: skip


def ids_of(messages: list[Any], candidate: int = 0) -> list[int]:
    """Token ids of one candidate."""
    return [
        t for m in messages if m.HasField("delta") and m.delta.candidate == candidate
        for t in m.delta.token_ids
    ]  # fmt: skip


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for a condition, or fail."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


class Silence:
    """A client that pings every 10 s while its call says nothing for a minute."""

    _shared: Silence | None = None

    @classmethod
    def shared(cls) -> Silence:
        """The one of this run, started by the first who asks."""
        if cls._shared is None:
            cls._shared = cls()
        return cls._shared

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.tokens = 0
        self.gap = 0.0
        executor = fake()

        def on_step(plan: Any) -> None:  # step 0 is the self-test, step 1 the prompt
            executor.step_seconds = 60.0 if executor.steps == 1 else 0.0

        executor.on_step = on_step
        self._server = serving(executor, settings=quick(watchdog=300.0))
        address = self._server.__enter__().address
        self._thread = threading.Thread(target=self._run, args=(address,), daemon=True)
        self._thread.start()

    def _run(self, address: str) -> None:
        options = [
            ("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1), ("grpc.http2.max_pings_without_data", 0),
        ]  # fmt: skip
        request = pb.GenerateRequest(
            text="x", stopping=pb.StoppingCriteria(max_output_tokens=2),
            output=pb.OutputOptions(token_ids=True),
        )  # fmt: skip
        request.output.progress_interval.FromSeconds(3600)
        try:
            with grpc.insecure_channel(address, options=options) as channel:
                last = time.monotonic()
                for message in pb_grpc.GenerationServiceStub(channel).Generate(request):
                    now = time.monotonic()
                    self.gap, last = max(self.gap, now - last), now
                    self.tokens += len(message.delta.token_ids)
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join(120)

    def close(self) -> None:
        """Stop its server."""
        if type(self)._shared is self:
            type(self)._shared = None
            self._server.__exit__(None, None, None)
