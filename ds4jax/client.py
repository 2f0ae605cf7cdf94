"""Typed client of the service, sync and async: streams, a collecting helper, retries, deadlines.

    with Client("127.0.0.1:50051") as client:
        print(client.generate(messages=[{"role": "user", "content": "Hello"}]).text)

Messages and tools have the OpenAI shape. Calls that end with UNAVAILABLE before their first event
are tried again; one that has begun never is. Needs the extra `server` (grpcio); nothing of JAX.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds4jax.config import SamplingParams, StoppingCriteria
from ds4jax.wire import (
    CallPiece,
    Delta,
    Event,
    Finished,
    Options,
    Progress,
    RequestFailed,
    Result,
    Started,
    Timings,
    TokenLogprob,
    ToolCall,
    Usage,
    build_chat,
    build_request,
    read_error,
    read_event,
)

__all__ = [
    "AsyncClient", "CallPiece", "Client", "Collector", "Connection", "Delta", "Event", "Finished",
    "Options", "Progress", "RequestFailed", "Result", "SamplingParams", "Started",
    "StoppingCriteria", "Timings", "TokenLogprob", "ToolCall", "Usage", "build_chat",
    "build_request", "read_error", "read_event",
]  # fmt: skip

_CHANNEL_OPTIONS = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


class Collector:
    """Adds up the events of a call."""

    def __init__(self) -> None:
        self.started: Started | None = None
        self._pieces: dict[int, list[Delta]] = {}
        self._finished: dict[int, Finished] = {}

    def add(self, event: Event) -> None:
        """Take one more event."""
        if isinstance(event, Started):
            self.started = event
        elif isinstance(event, Delta):
            self._pieces.setdefault(event.candidate, []).append(event)
        elif isinstance(event, Finished):
            self._finished[event.candidate] = event

    def results(self) -> list[Result]:
        """One result per candidate.

        Raises:
            RequestFailed: the stream ended without its last events.
        """
        if self.started is None or not self._finished:
            raise RequestFailed("INTERNAL", "STREAM_INCOMPLETE", "the stream ended too early")
        return [self._result(c, end) for c, end in sorted(self._finished.items())]

    def _result(self, candidate: int, end: Finished) -> Result:
        assert self.started is not None
        pieces = self._pieces.get(candidate, [])
        return Result(
            started=self.started,
            finished=end,
            text="".join(p.content for p in pieces),
            reasoning="".join(p.reasoning for p in pieces),
            token_ids=tuple(t for p in pieces for t in p.token_ids),
            logprobs=tuple(r for p in pieces for r in p.logprobs),
        )


# ---- connections -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Connection:
    """How to reach a server. Files are PEM; times in seconds.

    `ca` (or `tls`) encrypts; `cert` and `key` identify the client (mutual TLS).
    """

    address: str  # host:port or unix:path
    token: str | None = None
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    server_name: str | None = None  # expected name, if the address is not it
    timeout: float | None = None  # of every call, tries included; None: no limit
    retries: int = 3  # after UNAVAILABLE

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    @property
    def options(self) -> list[tuple[str, Any]]:
        """Options of the channel."""
        name = [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []
        return [*_CHANNEL_OPTIONS, *name]

    def channel(self, library: Any) -> Any:
        """A channel made by `grpc` or `grpc.aio`."""
        import grpc

        if not (self.tls or self.ca or self.cert):
            return library.insecure_channel(self.address, options=self.options)
        read = [Path(p).read_bytes() if p else None for p in (self.ca, self.key, self.cert)]
        credentials = grpc.ssl_channel_credentials(*read)
        return library.secure_channel(self.address, credentials, options=self.options)


class _Attempts:
    """Counts tries and says how long to wait before the next."""

    def __init__(self, connection: Connection, timeout: float | None) -> None:
        timeout = connection.timeout if timeout is None else timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._left = connection.retries
        self._pause = 0.1

    def timeout(self) -> float | None:
        """Seconds left for the call."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def pause(self, error: RequestFailed) -> float:
        """Seconds to wait before another try.

        Raises:
            RequestFailed: `error` itself, if there is to be none.
        """
        wait = error.retry_after or self._pause * random.uniform(0.75, 1.25)
        left = self.timeout()
        if error.code != "UNAVAILABLE" or not self._left or (left is not None and wait >= left):
            raise error
        self._left -= 1
        self._pause = min(5.0, 2 * self._pause)
        return wait


def _options(options: Options | None, fields: Mapping[str, Any]) -> Options:
    if options is not None and fields:
        raise ValueError("give an Options value or fields, not both")
    return Options(**fields) if options is None else options


class Client:
    """Blocking client. One channel; safe to use from several threads.

    Args:
        address: "host:port" or "unix:path", or a `Connection`.
        fields: those of `Connection`, if `address` is text.
    """

    def __init__(self, address: str | Connection, **fields: Any) -> None:
        import grpc
        from ds4jax_server.pb import generation_pb2_grpc

        made = address if isinstance(address, Connection) else None
        self.connection = made or Connection(address=str(address), **fields)
        self._grpc = grpc
        self._channel = self.connection.channel(grpc)
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._models = generation_pb2_grpc.ModelServiceStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel; calls in progress end."""
        self._channel.close()

    def stream(
        self, options: Options | None = None, *, timeout: float | None = None, **fields: Any
    ) -> Iterator[Event]:
        """Events of one call (`fields`: those of `Options`). Closing the iterator cancels the call.

        Raises:
            RequestFailed: the call ended with a status.
        """
        request = build_request(_options(options, fields))
        attempts = _Attempts(self.connection, timeout)
        while True:
            call = self._generation.Generate(
                request, timeout=attempts.timeout(), metadata=self.connection.metadata
            )
            begun = False
            try:
                for message in call:
                    begun = True
                    yield read_event(message)
                return
            except self._grpc.RpcError as error:
                failed = read_error(error)
                if begun:
                    raise failed from None
                time.sleep(attempts.pause(failed))
            finally:
                call.cancel()

    def generate(self, options: Options | None = None, **fields: Any) -> Result:
        """One whole answer; see `stream`."""
        return self.generate_all(options, **fields)[0]

    def generate_all(
        self, options: Options | None = None, *, timeout: float | None = None, **fields: Any
    ) -> list[Result]:
        """All candidates, whole; see `stream`."""
        collector = Collector()
        for event in self.stream(options, timeout=timeout, **fields):
            collector.add(event)
        return collector.results()

    def _unary(self, method: Any, request: Any, timeout: float | None = None) -> Any:
        attempts = _Attempts(self.connection, timeout)
        while True:
            try:
                return method(
                    request, timeout=attempts.timeout(), metadata=self.connection.metadata
                )
            except self._grpc.RpcError as error:
                time.sleep(attempts.pause(read_error(error)))

    def model(self) -> Any:
        """The served model, as the wire message `ds4jax.v1.Model`."""
        from ds4jax_server.pb import generation_pb2 as pb

        return self._unary(self._models.ListModels, pb.ListModelsRequest()).models[0]

    def count_tokens(self, options: Options | None = None, **fields: Any) -> int:
        """Prompt tokens of an input."""
        request = _count_request(_options(options, fields))
        return int(self._unary(self._generation.CountTokens, request).prompt_tokens)

    def tokenize(self, text: str, *, markers: bool = False) -> list[int]:
        """Ids of a text, begin-of-sentence first; `markers`: spelled markers are markers."""
        from ds4jax_server.pb import generation_pb2 as pb

        request = pb.TokenizeRequest(text=text, parse_markers=markers)
        return list(self._unary(self._generation.Tokenize, request).ids)

    def detokenize(self, ids: Iterable[int]) -> str:
        """Text of ids."""
        from ds4jax_server.pb import generation_pb2 as pb

        request = pb.DetokenizeRequest(ids=list(ids))
        return str(self._unary(self._generation.Detokenize, request).text)

    def healthy(self, service: str = "") -> bool:
        """Whether the server says SERVING; False also if it cannot be reached."""
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        request = health_pb2.HealthCheckRequest(service=service)
        try:
            reply = health_pb2_grpc.HealthStub(self._channel).Check(request, timeout=5.0)
        except self._grpc.RpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def _count_request(o: Options) -> Any:
    from ds4jax_server.pb import generation_pb2 as pb

    full = build_request(o)
    request = pb.CountTokensRequest(model=full.model)
    kind = full.WhichOneof("input")
    if kind == "text":
        request.text = full.text
    else:
        getattr(request, kind).CopyFrom(getattr(full, kind))
    return request


class AsyncClient:
    """The same for asyncio. Made and used in one event loop."""

    def __init__(self, address: str | Connection, **fields: Any) -> None:
        import grpc
        from ds4jax_server.pb import generation_pb2_grpc

        made = address if isinstance(address, Connection) else None
        self.connection = made or Connection(address=str(address), **fields)
        self._grpc = grpc
        self._channel = self.connection.channel(grpc.aio)
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._models = generation_pb2_grpc.ModelServiceStub(self._channel)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel; calls in progress end."""
        await self._channel.close()

    async def stream(
        self, options: Options | None = None, *, timeout: float | None = None, **fields: Any
    ) -> AsyncIterator[Event]:
        """See `Client.stream`."""
        request = build_request(_options(options, fields))
        attempts = _Attempts(self.connection, timeout)
        while True:
            call = self._generation.Generate(
                request, timeout=attempts.timeout(), metadata=self.connection.metadata
            )
            begun = False
            try:
                async for message in call:
                    begun = True
                    yield read_event(message)
                return
            except self._grpc.RpcError as error:
                failed = read_error(error)
                if begun:
                    raise failed from None
                await asyncio.sleep(attempts.pause(failed))
            finally:
                call.cancel()

    async def generate(self, options: Options | None = None, **fields: Any) -> Result:
        """See `Client.generate`."""
        return (await self.generate_all(options, **fields))[0]

    async def generate_all(
        self, options: Options | None = None, *, timeout: float | None = None, **fields: Any
    ) -> list[Result]:
        """See `Client.generate_all`."""
        collector = Collector()
        async for event in self.stream(options, timeout=timeout, **fields):
            collector.add(event)
        return collector.results()

    async def _unary(self, method: Any, request: Any, timeout: float | None = None) -> Any:
        attempts = _Attempts(self.connection, timeout)
        while True:
            try:
                return await method(
                    request, timeout=attempts.timeout(), metadata=self.connection.metadata
                )
            except self._grpc.RpcError as error:
                await asyncio.sleep(attempts.pause(read_error(error)))

    async def model(self) -> Any:
        """See `Client.model`."""
        from ds4jax_server.pb import generation_pb2 as pb

        return (await self._unary(self._models.ListModels, pb.ListModelsRequest())).models[0]

    async def count_tokens(self, options: Options | None = None, **fields: Any) -> int:
        """See `Client.count_tokens`."""
        request = _count_request(_options(options, fields))
        return int((await self._unary(self._generation.CountTokens, request)).prompt_tokens)
