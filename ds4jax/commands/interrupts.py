"""What Ctrl-C does: it ends an answer between two steps, or the reading of a line; none is lost.

`interruptible` is for a command with one answer, `Interrupts` for a conversation.
"""

from __future__ import annotations

import contextlib
import enum
import signal
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Protocol

TICK_SECONDS = 0.2
PATIENCE = 2
"""Presses that an answer of a conversation takes before the next one leaves at once."""

WasPressed = Callable[[], bool]


class Cancellable(Protocol):
    """An answer on its way; its iteration raises ServiceError CANCELLED after `cancel`."""

    def cancel(self) -> None:
        """End it soon."""


@contextlib.contextmanager
def interruptible(answer: Cancellable) -> Iterator[WasPressed]:
    """Ctrl-C ends the answer between two steps; a second one at once.

    The block ends quietly then; the function that the context gives tells whether it happened.
    """
    presses = 0

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            raise KeyboardInterrupt
        answer.cancel()

    try:
        before = signal.signal(signal.SIGINT, handler)
    except ValueError:  # not the main thread: nobody can press anything
        yield lambda: False
        return
    try:
        with _quiet_end():
            yield lambda: presses > 0
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _quiet_end() -> Iterator[None]:
    from ds4jax.request import ServiceError

    try:
        yield
    except ServiceError as error:
        if error.code != "CANCELLED":
            raise


class _Doing(enum.Enum):
    """What is going on, and so what a press does."""

    OTHER = "keep the press"
    READING = "give up the line"
    ANSWERING = "cancel the answer"
    WORKING = "raise"


class Interrupts:
    """Ctrl-C in a conversation, for as long as the block lasts.

    One handler stays all the time, so that a press cannot hit between two statements: outside of
    `read`, `answering` and `working` it is kept, and whichever of them comes next obeys it.
    """

    def __init__(self) -> None:
        self._doing = _Doing.OTHER
        self._kept = False
        self._answer: Cancellable | None = None
        self._presses = 0  # during the answer
        self._before: Any = None
        self._installed = False

    def __enter__(self) -> Interrupts:
        with contextlib.suppress(ValueError):  # not the main thread: nobody can press anything
            self._before = signal.signal(signal.SIGINT, self._pressed)
            self._installed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._before)

    def read(self, read: Callable[[], str]) -> str:
        """What `read` gives.

        Raises:
            KeyboardInterrupt: pressed while it waited, or before, and not yet obeyed.
        """
        with self._ticking():
            try:
                self._doing = _Doing.READING
                self._obey_kept()
                return read()
            finally:
                self._doing = _Doing.OTHER

    @contextlib.contextmanager
    def answering(self, answer: Cancellable) -> Iterator[WasPressed]:
        """As `interruptible`; only a press too many raises KeyboardInterrupt."""
        self._answer, self._presses = answer, 0
        self._doing = _Doing.ANSWERING
        try:
            with _quiet_end():
                if self._kept:
                    self._kept = False
                    self._pressed()
                yield lambda: self._presses > 0
        finally:
            self._doing = _Doing.OTHER

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """A press raises KeyboardInterrupt, wherever it hits: for work that nothing outlives."""
        try:
            self._doing = _Doing.WORKING
            self._obey_kept()
            yield
        finally:
            self._doing = _Doing.OTHER

    def _obey_kept(self) -> None:
        if self._kept:
            self._kept = False
            raise KeyboardInterrupt

    def _pressed(self, number: int = 0, frame: FrameType | None = None) -> None:
        if self._doing is _Doing.OTHER:
            self._kept = True
        elif self._doing is _Doing.ANSWERING and self._answer is not None:
            self._presses += 1
            if self._presses > PATIENCE:
                raise KeyboardInterrupt
            self._answer.cancel()
        else:
            self._doing = _Doing.OTHER  # nothing raises a second time on the way out
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def _ticking(self) -> Iterator[None]:
        """Signals at a steady pace that do nothing.

        Reading waits in C, and a press just before the wait begins is noticed at its end: the next
        key, or the next tick.
        """
        if not self._installed or not hasattr(signal, "setitimer"):
            yield
            return
        before = signal.signal(signal.SIGALRM, lambda number, frame: None)
        timer = signal.setitimer(signal.ITIMER_REAL, TICK_SECONDS, TICK_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
            signal.setitimer(signal.ITIMER_REAL, *timer)
