"""Bytes of a call on their way to a message, and where the work on large ones is done.

Nothing here knows what a message means. Bytes that are no message become violations, so that they
end as INVALID_ARGUMENT and nothing else; the event loop that all streams share never works on many
of them.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from ds4jax.request import ServiceError
from ds4jax_server.errors import InvalidRequest, Violation

INLINE_BYTES = 32 << 10
LARGE_BYTES = 1 << 20
MAX_FIELDS = 1000
"""Fields at the top level of one message; far more than there are numbers for."""


@dataclass(frozen=True)
class Parsed:
    """What the bytes of a call were: a message (None: no message), and what is wrong with them."""

    message: Any
    violations: tuple[Violation, ...] = ()

    def checked(self) -> Any:
        """The message.

        Raises:
            InvalidRequest: there is none.
        """
        if self.message is None:
            raise InvalidRequest(self.violations)
        return self.message


@dataclass(frozen=True, eq=False)
class Incoming:
    """The bytes of one call, not read yet."""

    kind: Any  # class of the message
    data: bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.data)

    def parse(self) -> Parsed:
        """Read them.

        A oneof that was given twice is no error for protobuf (the last one wins), but one for us:
        which of two prompts was meant?
        """
        descriptor = self.kind.DESCRIPTOR
        try:
            message = self.kind.FromString(self.data)
        except DecodeError:
            return _malformed(
                f"is no {descriptor.name}: malformed, nested too deeply, or text that is not UTF-8"
            )
        oneofs = {f.number: o for o in descriptor.oneofs for f in o.fields if len(o.fields) > 1}
        found = set()
        for count, number in enumerate(_field_numbers(self.data)):
            if count == MAX_FIELDS:
                return _malformed(f"holds more than {MAX_FIELDS} fields at its top level")
            if number in oneofs:
                found.add(number)
        if len({oneofs[n].name for n in found}) == len(found):
            return Parsed(message)
        names = " and ".join(descriptor.fields_by_number[n].name for n in sorted(found))
        field = oneofs[min(found)].name
        return Parsed(message, (Violation(field, f"holds {names}, must hold one of them"),))


def reader(kind: Any) -> Callable[[bytes], Incoming]:
    """The deserialiser of a method; it only wraps the bytes."""
    return lambda data: Incoming(kind, data)


def _malformed(text: str) -> Parsed:
    return Parsed(None, (Violation("request", text, "MALFORMED_REQUEST"),))


def _field_numbers(data: bytes) -> Iterator[int]:
    """Field numbers at the top level of a well-formed message."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        yield tag >> 3
        if tag & 7 == 0:
            _, at = _varint(data, at)
        elif tag & 7 == 2:
            size, at = _varint(data, at)
            at += size
        elif tag & 7 in (1, 5):
            at += 8 if tag & 7 == 1 else 4
        else:
            return  # a group: of no message of ours


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


class Workshop:
    """Does work on requests: small ones at once, others in threads, large ones one by one.

    The threads share the interpreter with the engine, so their number bounds how much a flood of
    large requests can slow down the streams that run.
    """

    def __init__(self) -> None:
        self._several = ThreadPoolExecutor(2, "ds4jax-requests")
        self._single = ThreadPoolExecutor(1, "ds4jax-large-requests")

    async def run(self, size: int, work: Callable[[], Any]) -> Any:
        """The result of `work`, which concerns a request of so many bytes."""
        if size <= INLINE_BYTES:
            return work()
        loop = asyncio.get_running_loop()
        if size <= LARGE_BYTES:
            result, error = await loop.run_in_executor(self._several, _apart, work)
        else:
            result, error = await loop.run_in_executor(self._single, _large, work)
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Start nothing more."""
        for pool in (self._several, self._single):
            pool.shutdown(wait=False, cancel_futures=True)


def _apart(work: Callable[[], Any]) -> tuple[Any, ServiceError | None]:
    """Result or refusal. A refusal keeps nothing of the work alive: its frames hold messages."""
    try:
        return work(), None
    except ServiceError as error:
        error.__context__ = error.__cause__ = None
        return None, error.with_traceback(None)


def _large(work: Callable[[], Any]) -> tuple[Any, ServiceError | None]:
    """The same; afterwards what was freed goes back to the system.

    A message can become forty times its bytes, in small pieces that glibc would keep.
    """
    outcome = _apart(work)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return outcome
