"""The side of the scheduler that any thread may touch: ids in use, the queue's length, commands.

Everything else of the scheduler belongs to the engine thread; what others want of it arrives here
as a command and is done at the next turn. One lock, held for moments only.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from ds4jax import refusals
from ds4jax.request import Phase, Progress, Request, ServiceError

Action = Callable[[], None]


class Front:
    """Requests that have not ended, and commands for the engine thread.

    Args:
        max_waiting: requests that may wait for a lane.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._wake = threading.Condition()
        self._inbox: deque[Action] = deque()
        self._poked = False
        self._active: dict[str, Request] = {}
        self._waiting = 0
        self._refusal: Callable[[], ServiceError] | None = None

    @property
    def waiting(self) -> int:
        """Requests without a lane."""
        return self._waiting

    @property
    def active(self) -> int:
        """Requests that have not ended, waiting ones included."""
        return len(self._active)

    @property
    def refusal(self) -> Callable[[], ServiceError] | None:
        """What every new request gets, once closed."""
        return self._refusal

    def requests(self) -> list[Request]:
        """Requests that have not ended."""
        with self._wake:
            return list(self._active.values())

    def is_active(self, request: Request) -> bool:
        """Whether the request has not ended."""
        return self._active.get(request.id) is request

    # ---- requests ------------------------------------------------------------------------------

    def enter(self, request: Request, then: Action, estimate: Callable[[], float]) -> None:
        """Take a request in; `then` is done at the next turn.

        Args:
            estimate: seconds until there is room, for the refusal of a full queue.

        Raises:
            ServiceError: closed, id in use, or queue full.
        """
        with self._wake:
            if self._refusal is not None:
                raise self._refusal()
            if request.id in self._active:
                raise refusals.duplicate_id(request.id)
            if self._waiting >= self._max_waiting:
                raise refusals.queue_full(self._waiting, self._max_waiting, estimate())
            total = len(request.lanes[0].prompt)
            request.progress = Progress(Phase.QUEUED, self._waiting, 0, total)
            request.stream.on_drained = self.poke
            self._active[request.id] = request
            self._waiting += 1
            self._inbox.append(then)
            self._wake.notify()

    def seated(self) -> None:
        """A request has its first lane."""
        with self._wake:
            self._waiting -= 1

    def leave(self, request: Request) -> None:
        """A request has ended, in whatever phase."""
        with self._wake:
            if self._active.get(request.id) is request:
                del self._active[request.id]
                self._waiting -= request.progress.phase is Phase.QUEUED

    def close(self, refusal: Callable[[], ServiceError]) -> None:
        """Refuse every new request with `refusal()`."""
        with self._wake:
            self._refusal = refusal

    # ---- commands ------------------------------------------------------------------------------

    def post(self, action: Action) -> None:
        """Have something done at the next turn."""
        with self._wake:
            self._inbox.append(action)
            self._wake.notify()

    def poke(self) -> None:
        """End a `rest` early: something has changed that the next turn looks at."""
        with self._wake:
            self._poked = True
            self._wake.notify()

    @property
    def has_commands(self) -> bool:
        """Whether anything waits to be done."""
        return bool(self._inbox)

    def commands(self) -> Iterator[Action]:
        """Take the commands, in order; for the engine thread."""
        while True:
            with self._wake:
                if not self._inbox:
                    return
                action = self._inbox.popleft()
            yield action

    def rest(self, seconds: float | None) -> None:
        """Wait in the engine thread for a command or a poke, at most this long."""
        with self._wake:
            if not self._inbox and not self._poked:
                self._wake.wait(seconds)
            self._poked = False
