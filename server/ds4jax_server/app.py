"""The server as a process: ports, security, health, reflection, and an orderly end.

It binds before the model is loaded, so that health checks get an answer (NOT_SERVING) from the
first second. SIGTERM or SIGINT drains, a second one stops at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from ds4jax.request import ServiceError
from ds4jax_server import errors
from ds4jax_server.admin import Admin
from ds4jax_server.engine import Engine
from ds4jax_server.metrics import Metrics
from ds4jax_server.probes import Health, Streams, reflection_handlers
from ds4jax_server.service import Services, metadata_id
from ds4jax_server.settings import (
    PROBE_STREAMS,
    RECEIVE_BYTES,
    SEND_BYTES,
    SPARE_STREAMS,
    Loader,
    ServerConfig,
    host_port,
)

_LOG = logging.getLogger("ds4jax.server")
PUBLIC = ("ds4jax.v1.GenerationService", "ds4jax.v1.ModelService")
ADMIN = "ds4jax.v1.AdminService"
SWITCH_SECONDS = 0.0005


def channel_options(streams: int) -> list[tuple[str, int]]:
    """Options of the listening side, by their exact names: gRPC ignores a misspelt one silently."""
    return [
        ("grpc.max_receive_message_length", RECEIVE_BYTES),
        ("grpc.max_send_message_length", SEND_BYTES),
        ("grpc.max_concurrent_streams", streams),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    ]


class BindError(OSError):
    """An address that the server cannot listen on; the message says which and why."""


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets nothing but health checks through without the bearer token."""

    def __init__(self, token: str) -> None:
        self._wanted = f"Bearer {token}".encode()

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """Pass the call on, or answer it with UNAUTHENTICATED."""
        if details.method.startswith("/grpc.health.v1.Health/"):
            return await continuation(details)
        given = [v for k, v in details.invocation_metadata or () if k == "authorization"]
        sent = (given[0] if isinstance(given[0], bytes) else given[0].encode()) if given else b""
        if hmac.compare_digest(sent, self._wanted):
            return await continuation(details)
        handler = await continuation(details)
        return handler and _refusing(handler, errors.unauthenticated(bool(given)))


def _refusing(handler: Any, error: ServiceError) -> Any:
    """A handler that answers with an error, without waiting for a request."""

    async def refuse(messages: Any, context: Any) -> None:
        await context.abort_with_status(errors.status_of(error, metadata_id(context)[0]))

    streams = handler.response_streaming
    make = (
        grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
    )
    return make(refuse, handler.request_deserializer, handler.response_serializer)


class Server:
    """One server. `start`, then `wait`; `stop` from the same event loop, or signals.

    Attributes:
        port: the bound TCP port, or None.
    """

    def __init__(self, config: ServerConfig, loader: Loader, *, lanes: int) -> None:
        self.config = config
        self.port: int | None = None
        self.admin_port: int | None = None
        self.metrics_port: int | None = None
        self.metrics = Metrics()
        self.engine = Engine(
            config, loader, on_health=self._health_changed, on_step=self.metrics.on_step
        )
        self.services = Services(self.engine, config, self.metrics)
        self.admin = Admin(self.engine, config)
        self._streams = lanes + config.scheduler.max_waiting + SPARE_STREAMS
        self._probes = Streams(PROBE_STREAMS)
        self._health = Health(("", *PUBLIC, ADMIN), self._probes)
        self._servers: list[Any] = []
        self._close_metrics: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._stop_now = asyncio.Event()
        self._stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    # ---- start ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bind every port, then begin loading.

        Raises:
            OSError, RuntimeError: an address that cannot be bound.
        """
        self._loop = asyncio.get_running_loop()
        token = self.config.token()
        interceptors = [TokenInterceptor(token)] if token else []
        for text in self.config.warnings():
            _LOG.warning("%s", text)
        public = self._server(interceptors, self.services.handlers(), PUBLIC)
        if self.config.port is not None:
            address = host_port(self.config.host, self.config.port)
            self.port = self._bind(public, address, secure=self.config.tls_cert is not None)
        if self.config.unix is not None:
            self._bind_unix(public, self.config.unix)
        if self.config.admin is not None:
            admin = self._server(interceptors, self.admin.handlers(), (ADMIN,))
            if self.config.admin.startswith("unix:"):
                self._bind_unix(admin, self.config.admin.removeprefix("unix:"))
            else:
                host, _, port = self.config.admin.rpartition(":")
                self.admin_port = self._bind(admin, host_port(host, int(port)), secure=False)
                _LOG.info("admin on %s", host_port(host, self.admin_port))
        self.metrics.watch(self.engine)
        if self.config.metrics_port is not None:
            self._bind_metrics(self.config.metrics_host, self.config.metrics_port)
        for server in self._servers:
            await server.start()
        self.engine.start()
        self._background(self._watch_engine())

    def _server(self, interceptors: Any, handlers: list[Any], names: tuple[str, ...]) -> Any:
        streams = self._streams + PROBE_STREAMS
        server = grpc.aio.server(
            interceptors=interceptors, options=channel_options(streams),
            maximum_concurrent_rpcs=streams,
        )  # fmt: skip
        server.add_generic_rpc_handlers(handlers)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        server.add_generic_rpc_handlers(reflection_handlers(names, self._probes))
        self._servers.append(server)
        return server

    def _bind(self, server: Any, address: str, *, secure: bool) -> int:
        try:
            if secure:
                bound = server.add_secure_port(address, self._credentials())
            else:
                bound = server.add_insecure_port(address)
        except RuntimeError as error:
            raise BindError(f"cannot bind {address}: {_why_not(address)}") from error
        if not bound:
            raise BindError(f"cannot bind {address}: {_why_not(address)}")
        return int(bound)

    def _bind_metrics(self, host: str, port: int) -> None:
        try:
            self._close_metrics = self.metrics.serve(port, host)
        except OSError as error:
            where = host_port(host, port)
            raise BindError(f"cannot bind the metrics port {where}: {error}") from error
        self.metrics_port = self.metrics.port
        assert self.metrics_port is not None
        _LOG.info("metrics on http://%s/metrics", host_port(host, self.metrics_port))

    def _bind_unix(self, server: Any, path: str) -> None:
        """A socket file of a dead server is removed; anything else in its place is not."""
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                raise BindError(
                    f"cannot bind unix:{path}: a file that is no socket is in its place"
                )
            if _is_alive(path):
                raise BindError(f"cannot bind unix:{path}: another server listens there")
            os.unlink(path)
        self._bind(server, f"unix:{path}", secure=False)

    def _credentials(self) -> Any:
        c = self.config
        assert c.tls_cert and c.tls_key
        pair = (Path(c.tls_key).read_bytes(), Path(c.tls_cert).read_bytes())
        ca = Path(c.tls_client_ca).read_bytes() if c.tls_client_ca else None
        return grpc.ssl_server_credentials(
            [pair], root_certificates=ca, require_client_auth=ca is not None
        )

    # ---- health --------------------------------------------------------------------------------

    def _health_changed(self, ready: bool, reason: str) -> None:
        """From any thread."""
        loop = self._loop
        if loop is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: self._health.set(self.engine.ready))

    def _background(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch_engine(self) -> None:
        """Stop if the engine ends by itself (loading failed, or it died)."""
        while not self.engine.ended.is_set():
            await asyncio.sleep(0.1)
        if self._stopping is None:
            self.stop(0.0)

    # ---- stop ----------------------------------------------------------------------------------

    def install_signals(self) -> None:
        """SIGTERM and SIGINT: drain; once more: stop now."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.on_signal)

    def on_signal(self) -> None:
        """First call drains, the next one stops now."""
        if self._stopping is None:
            _LOG.info("draining for at most %g s; once more stops now", self.config.grace)
            self.stop(self.config.grace)
        else:
            self._stop_now.set()

    def stop(self, grace: float) -> None:
        """Refuse new requests, let running ones finish within `grace` seconds, then end them."""
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop(grace))

    async def _stop(self, grace: float) -> None:
        self.engine.drain()
        self._health.set(False)
        await self._until(lambda: self.engine.idle, grace)
        self.engine.shut_down()
        await self._until(lambda: self.engine.idle, 2.0, urgent=False)
        for server in self._servers:
            await server.stop(0.5)
        await asyncio.to_thread(self.engine.stop, 5.0)
        self._close_metrics()
        self.services.workshop.close()
        self._stopped.set()

    async def _until(
        self, condition: Callable[[], bool], seconds: float, *, urgent: bool = True
    ) -> None:
        """Wait for a condition, the time, or (if urgent) the second signal."""
        end = asyncio.get_running_loop().time() + seconds
        while not condition() and asyncio.get_running_loop().time() < end:
            if urgent and self._stop_now.is_set():
                return
            await asyncio.sleep(0.02)

    async def wait(self) -> int:
        """Until the server has stopped; the exit code."""
        await self._stopped.wait()
        return 0 if self.engine.error is None else 1


def _why_not(address: str) -> str:
    """Why an address cannot be bound, which the library does not tell."""
    try:
        if address.startswith("unix:"):
            path = address.removeprefix("unix:")
            with socket.socket(socket.AF_UNIX) as probe:
                probe.bind(path)
            os.unlink(path)
        else:
            host, _, port = address.rpartition(":")
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            with socket.socket(found[0][0], socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(found[0][4])
    except OSError as error:
        return error.strerror or str(error)
    return "is it in use?"


def _is_alive(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def run(config: ServerConfig, loader: Loader, *, lanes: int, announce: Any = None) -> int:
    """Serve until told to stop; the exit code. `announce(server)` is called once it is bound.

    Raises:
        BindError: an address that cannot be bound. Exception: what loading the model has raised.
    """

    # The engine thread wants the interpreter back right after each step, not 5 ms later.
    sys.setswitchinterval(SWITCH_SECONDS)
    engines: list[Engine] = []

    async def main() -> int:
        server = Server(config, loader, lanes=lanes)
        engines.append(server.engine)
        await server.start()
        server.install_signals()
        if announce is not None:
            announce(server)
        return await server.wait()

    code = asyncio.run(main())
    failed = engines[0].load_error if engines else None
    if failed is not None:
        raise failed
    if engines and not engines[0].ended.is_set():
        # It is still loading or compiling and cannot be interrupted: leave without it.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
    return code


__all__ = ["Server", "channel_options", "run"]
