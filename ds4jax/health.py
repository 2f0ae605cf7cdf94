"""Whether the device can be trusted, and the self-test that decides it after a fault.

The test is one greedy token of a fixed prompt. What it gave at start is what it must give later. It
runs as an ordinary lane; the scheduler puts it in front of the queue when `due` says so.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ds4jax import config
from ds4jax.plan import ExecutorLimits, LaneSpec
from ds4jax.request import Event, Failed, Request, Tokens

_PROMPT = np.array([0, 1], np.int32)


class Health:
    """State of the device as far as is known.

    Args:
        retry: seconds between two tests that fail.
        clock: monotonic seconds.
        on_change: called with (healthy, reason) on every change, from any thread.

    Attributes:
        healthy: new requests are welcome.
        testing: a test is on its way.
        needs_reset: the executor must be reset before anything else.
        changes: how often `healthy` has changed.
    """

    def __init__(
        self,
        retry: float,
        clock: Callable[[], float],
        on_change: Callable[[bool, str], None],
    ) -> None:
        self.healthy = True
        self.testing = False
        self.needs_reset = False
        self.changes = 0
        self._retry = retry
        self._clock = clock
        self._on_change = on_change
        self._due: float | None = None
        self._reference: int | None = None

    @property
    def due(self) -> float | None:
        """When the next test should begin, or None."""
        return None if self.testing else self._due

    def doubt(self, reason: str) -> None:
        """Something looks wrong: not healthy until a test has passed. From any thread."""
        self._set(False, reason)

    def lost(self, reason: str, *, reset: bool = False) -> None:
        """Something went wrong: not healthy, and a test is due (after a reset, if need be)."""
        self._set(False, reason)
        self.needs_reset = self.needs_reset or reset
        if self._due is None and not self.testing:
            self._due = self._clock()

    def begin(self) -> None:
        """The test is on its way."""
        self._due = None
        self.testing = True

    def failed(self) -> None:
        """The test, or the reset before it, failed: again after a while."""
        self.testing = False
        self._due = self._clock() + self._retry

    def judge(self, event: Event | None) -> str | None:
        """Look at an event of the test's stream; the reason if it has failed, else None."""
        if isinstance(event, Failed):
            self.failed()
            return event.error.message
        if not isinstance(event, Tokens):
            return None
        token = event.tokens[0].token
        if self._reference not in (None, token):
            self.failed()
            return f"token {token}, at start it was {self._reference}"
        self._reference = token
        self.testing = False
        self._set(True, "self-test passed")
        return None

    def _set(self, healthy: bool, reason: str) -> None:
        if self.healthy != healthy:
            self.healthy = healthy
            self.changes += 1
            self._on_change(healthy, reason)


def self_test_request(limits: ExecutorLimits, now: float) -> Request:
    """The self-test as a request."""
    prompt = np.minimum(_PROMPT, limits.vocab_size - 1)
    prompt = prompt[: max(1, limits.max_ctx - 1)].astype(np.int32)
    sampling = config.SamplingParams(temperature=0.0, seed=0)
    spec = LaneSpec(prompt=prompt, sampling=sampling, max_output_tokens=1, speculate=False)
    return Request(id="", lanes=(spec,), arrival=now)
