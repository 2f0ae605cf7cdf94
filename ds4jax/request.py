"""A request on its way through the scheduler, its events, and the bounded stream they travel in.

No policy and no wire format: the scheduler fills streams, a consumer (the gRPC service, or a plain
loop in the same process) empties them. Everything here may be touched from both threads.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ds4jax.plan import LaneSpec, TokenResult

Code = str
"""Name of a canonical status code, such as "RESOURCE_EXHAUSTED"."""


class ServiceError(Exception):
    """A request that ends with a status instead of a finish reason.

    Attributes:
        code: canonical status name.
        reason: stable UPPER_SNAKE reason, empty where the code says it all.
        metadata: facts for programs (numbers as text).
        retry_after: seconds after which trying again makes sense, or None.
    """

    def __init__(
        self,
        code: Code,
        reason: str,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.metadata = dict(metadata or {})
        self.retry_after = retry_after


class Finish(enum.Enum):
    """Why a candidate ended well."""

    STOP = "stop"
    LENGTH = "length"
    TIME_LIMIT = "time_limit"


class Phase(enum.Enum):
    """Where a request is, for progress reports."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Progress:
    """Queue position (0: next) while queued, else prompt tokens done of `total`."""

    phase: Phase
    queue_position: int
    done: int
    total: int


@dataclass(frozen=True)
class Started:
    """The first candidate has a slot. Times are of the scheduler's clock, in seconds."""

    at: float
    queue_s: float
    cached_tokens: int = 0

    @property
    def size(self) -> int:
        """Rough bytes on the wire."""
        return 64


@dataclass(frozen=True)
class Tokens:
    """What one step gave one candidate; draft counts are those of the step."""

    at: float
    candidate: int
    tokens: tuple[TokenResult, ...]
    proposed: int = 0
    verified: int = 0
    accepted: int = 0

    @property
    def size(self) -> int:
        """Rough bytes on the wire."""
        return 32 + sum(16 + 12 * len(t.top) for t in self.tokens)


@dataclass(frozen=True)
class Ended:
    """A candidate's end. `stop_token`: the id that ended it, if one did."""

    at: float
    candidate: int
    finish: Finish
    stop_token: int | None = None

    @property
    def size(self) -> int:
        """Rough bytes on the wire."""
        return 32


@dataclass(frozen=True)
class Failed:
    """The request's end with a status; nothing comes after it."""

    at: float
    error: ServiceError

    @property
    def size(self) -> int:
        """Rough bytes on the wire."""
        return 64


Event = Started | Tokens | Ended | Failed


class Stream:
    """Events of one request, from the scheduler to one consumer. Puts never wait.

    Args:
        max_events, max_bytes: at either, `full` is true and the lane should be suspended; an event
            that is put nevertheless (its step was in flight) is kept.
        notify: called after every put, from the putting thread; must not block. Waking another
            thread costs that one dear: it should wait for `Scheduler`'s `deliver`.
    """

    def __init__(
        self,
        max_events: int = 256,
        max_bytes: int = 256 * 1024,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        self.max_events = max_events
        self.max_bytes = max_bytes
        self.notify = notify
        self.on_drained: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._bytes = 0
        self._was_full = False
        self._failed: Failed | None = None

    def put(self, event: Event) -> None:
        """Append. After a `Failed` event everything is dropped: the first failure wins."""
        with self._lock:
            if self._failed is not None:
                return
            if isinstance(event, Failed):
                self._failed = event
            self._events.append(event)
            self._bytes += event.size
            self._was_full = self._was_full or self._is_full()
        self.notify()

    def pop(self) -> Event | None:
        """The oldest event, or None."""
        with self._lock:
            if not self._events:
                return None
            event = self._events.popleft()
            self._bytes -= event.size
            drained = self._was_full and self._below_half()
            if drained:
                self._was_full = False
        if drained:
            self.on_drained()
        return event

    @property
    def failure(self) -> Failed | None:
        """The failure, as soon as it is known, even while events are queued before it."""
        return self._failed

    @property
    def full(self) -> bool:
        """Whether the consumer is too far behind."""
        return self._is_full()  # without the lock: it may be otherwise a moment later anyway

    @property
    def below_half(self) -> bool:
        """Whether a suspended lane may go on."""
        return self._below_half()

    @property
    def unread(self) -> int:
        """Events that the consumer has not taken."""
        return len(self._events)

    def _is_full(self) -> bool:
        return len(self._events) >= self.max_events or self._bytes >= self.max_bytes

    def _below_half(self) -> bool:
        return 2 * len(self._events) < self.max_events and 2 * self._bytes < self.max_bytes


@dataclass(eq=False, kw_only=True)
class Request:
    """One call: one or more candidates that differ in `LaneSpec.candidate` only.

    `deadline` is absolute (scheduler clock): passing it is an error. `time_limit` is in seconds
    from arrival: reaching it is a finish reason. `progress` is for the consumer to look at whenever
    it wants to tell its client something; it is replaced as a whole.
    """

    id: str
    lanes: tuple[LaneSpec, ...]
    stream: Stream = field(default_factory=Stream)
    deadline: float | None = None
    time_limit: float | None = None
    arrival: float = 0.0  # set by submit
    progress: Progress = Progress(Phase.QUEUED, 0, 0, 0)
