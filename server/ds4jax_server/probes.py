"""What others ask a server about itself with the standard services: health and reflection.

Answers need no token (health) and cost next to nothing; the streams among them are counted apart
from requests, so that nobody can take the room of requests by watching.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

HEALTH = health.SERVICE_NAME
REFLECTION = ("grpc.reflection.v1.ServerReflection", reflection.SERVICE_NAME)
"""Two names of one service: v1 has the messages of v1alpha."""


class Streams:
    """Places for streams that stay open as long as their client likes."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.open = 0

    async def take(self, context: Any) -> None:
        """Take a place, or end the call. Whoever has one gives it back by `open -= 1`."""
        if self.open >= self.most:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self.open} streams of health and reflection are open, at most {self.most}:"
                " close one, or use Check",
            )
        self.open += 1


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """grpc.health.v1.Health for some service names. Used in one event loop.

    A watcher that does not read delays nobody: each waits for its own client alone.
    """

    def __init__(self, names: Iterable[str], streams: Streams) -> None:
        self._names = frozenset(names)
        self._streams = streams
        self._serving = False
        self._watchers: set[asyncio.Event] = set()

    def set(self, serving: bool) -> None:
        """Change the status of every name and tell the watchers."""
        self._serving = serving
        for event in self._watchers:
            event.set()

    def _status(self, name: str) -> Any:
        kinds = health_pb2.HealthCheckResponse
        if name not in self._names:
            return kinds.SERVICE_UNKNOWN
        return kinds.SERVING if self._serving else kinds.NOT_SERVING

    async def Check(self, request: Any, context: Any) -> Any:
        """The status now; an unknown name is NOT_FOUND."""
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(self, request: Any, context: Any) -> None:
        """The status now and whenever it has changed."""
        await self._streams.take(context)
        changed, last = asyncio.Event(), None
        self._watchers.add(changed)
        try:
            while True:
                changed.clear()
                status = self._status(request.service)
                if status != last:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
                await changed.wait()
        finally:
            self._watchers.discard(changed)
            self._streams.open -= 1


def reflection_handlers(names: Iterable[str], streams: Streams) -> list[Any]:
    """Handlers of both versions of reflection, for the named services and the standard ones."""
    servicer = reflection.aio.ReflectionServicer(service_names=(*names, HEALTH, *REFLECTION))

    async def info(requests: Any, context: Any) -> AsyncIterator[Any]:
        await streams.take(context)
        try:
            async for reply in servicer.ServerReflectionInfo(requests, context):
                yield reply
        finally:
            streams.open -= 1

    method = grpc.stream_stream_rpc_method_handler(
        info,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return [
        grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method})
        for name in REFLECTION
    ]
