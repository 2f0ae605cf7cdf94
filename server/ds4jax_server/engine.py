"""The engine thread: loads the model, then turns the scheduler until told to stop.

Only this thread touches the executor, and through it JAX. Everybody else submits and cancels.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ds4jax import refusals
from ds4jax.plan import Executor
from ds4jax.request import ServiceError
from ds4jax.scheduler import Scheduler
from ds4jax.telemetry import StepRecord
from ds4jax_server import errors
from ds4jax_server.settings import Loader, ServedModel, ServerConfig

_LOG = logging.getLogger("ds4jax.server")


class SelfTestFailed(RuntimeError):
    """The first token after loading was no token."""


class Handover:
    """Tells readers in the event loop that there are events for them, all of a turn at once.

    To wake the loop is a system call, during which the loop takes the interpreter away from the
    engine thread: one for each lane of a step took longer than everything else that a turn does.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: deque[Callable[[], None]] = deque()
        self._posted = False

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Where the readers are."""
        self._loop = loop

    def add(self, wake: Callable[[], None]) -> None:
        """Have `wake` called in the loop after the next `flush`; from any thread."""
        self._ready.append(wake)

    def flush(self) -> None:
        """Post what was added; from any thread."""
        if not self._ready or self._posted or self._loop is None:
            return
        self._posted = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped
            self._loop.call_soon_threadsafe(self._wake_all)

    def _wake_all(self) -> None:
        self._posted = False  # first: what is added from now on may need another post
        while self._ready:
            self._ready.popleft()()


class Engine:
    """Owner of the engine thread.

    Args:
        config: of the server.
        loader: makes executor and model, called in the engine thread.
        on_health: called from any thread on every change of readiness, with a reason.
        on_step: called in the engine thread with every step.
    """

    def __init__(
        self,
        config: ServerConfig,
        loader: Loader,
        *,
        on_health: Callable[[bool, str], None] = lambda ready, reason: None,
        on_step: Callable[[StepRecord], None] = lambda record: None,
    ) -> None:
        self.config = config
        self.stage = "starting"
        self.fraction = 0.0
        self.error: BaseException | None = None
        self._loader = loader
        self._on_health = on_health
        self._on_step = on_step
        self._scheduler: Scheduler | None = None
        self._model: ServedModel | None = None
        self._executor: Executor | None = None
        self._stop = threading.Event()
        self._drained = False
        self._profile: deque[StepRecord] | None = None
        self._profile_dropped = 0
        self.handover = Handover()
        self.loaded = threading.Event()
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ds4jax-engine", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name="ds4jax-watchdog", daemon=True)

    def start(self) -> None:
        """Begin loading; called in the event loop that serves."""
        self.handover.open(asyncio.get_running_loop())
        self._thread.start()
        self._watchdog.start()

    def stop(self, timeout: float) -> bool:
        """End the thread; whether it ended in time. Running requests come first."""
        self._stop.set()
        if self._scheduler is not None:
            self._scheduler.poke()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler.

        Raises:
            ServiceError: the model is not loaded yet.
        """
        if self._scheduler is None:
            raise errors.model_loading(self.stage)
        return self._scheduler

    @property
    def model(self) -> ServedModel:
        """The model.

        Raises:
            ServiceError: it is not loaded yet.
        """
        if self._model is None or self._scheduler is None:
            raise errors.model_loading(self.stage)
        return self._model

    @property
    def executor(self) -> Executor | None:
        """For reading counters and the memory plan; None while loading."""
        return self._executor if self._scheduler is not None else None

    @property
    def load_error(self) -> BaseException | None:
        """Why there is no model, if loading has failed."""
        return self.error if self._scheduler is None else None

    @property
    def ready(self) -> bool:
        """Whether requests are welcome."""
        s = self._scheduler
        return s is not None and s.healthy and not s.draining and not self.ended.is_set()

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        return self._scheduler is None or self.ended.is_set() or self._scheduler.active == 0

    def drain(self) -> None:
        """Refuse new and queued requests from now on; while loading, all that come after it."""
        self._drained = True
        if self._scheduler is not None:
            self._scheduler.drain()
            self._on_health(False, "draining")

    def shut_down(self) -> None:
        """End what still runs."""
        if self._scheduler is not None:
            self._scheduler.shut_down(refusals.shutting_down)

    # ---- profile -------------------------------------------------------------------------------

    def start_profile(self, records: int) -> None:
        """Keep the newest `records` step records."""
        self._profile_dropped = 0
        self._profile = deque(maxlen=records)

    def stop_profile(self) -> tuple[list[dict[str, Any]], int]:
        """Records as dictionaries, and how many older ones were dropped."""
        profile, self._profile = self._profile, None
        return [asdict(r) for r in profile or ()], self._profile_dropped

    def _step(self, record: StepRecord) -> None:
        profile = self._profile
        if profile is not None:
            self._profile_dropped += len(profile) == profile.maxlen
            profile.append(record)
        self._on_step(record)

    # ---- thread --------------------------------------------------------------------------------

    def _report(self, stage: str, fraction: float) -> None:
        self.stage, self.fraction = stage, fraction

    def _run(self) -> None:
        try:
            try:
                self._load()
            except Exception as error:  # whoever started the server says what it is
                self.error = error
                return
            self._loop()
        except BaseException as error:
            self.error = error
            _LOG.exception("the engine ended")
        finally:
            self.ended.set()
            self.loaded.set()
            if self._scheduler is not None:
                self._scheduler.abandon()
            self._on_health(False, "the engine ended")
            if self._executor is not None:
                with contextlib.suppress(Exception):  # whatever is wrong has been logged
                    self._executor.close()

    def _load(self) -> None:
        executor, model = self._loader(self._report)
        self._executor, self._model = executor, model
        self._report("self-test", 1.0)
        scheduler = Scheduler(
            executor, self.config.scheduler, observer=self._step, on_health=self._health_changed,
            deliver=self.handover.flush,
        )  # fmt: skip
        try:
            scheduler.self_test()
        except ServiceError as error:
            raise SelfTestFailed(f"the self-test failed: {error.message}") from error
        if self._drained:
            scheduler.drain()
        self._scheduler = scheduler
        self.loaded.set()
        self._on_health(self.ready, "loaded")

    def _health_changed(self, healthy: bool, reason: str) -> None:
        if self._scheduler is not None:
            _LOG.log(logging.INFO if healthy else logging.ERROR, "health: %s", reason)
            self._on_health(self.ready, reason)

    def _loop(self) -> None:
        scheduler = self._scheduler
        assert scheduler is not None
        while not self._stop.is_set():
            wait = scheduler.turn()
            if wait != 0.0:
                scheduler.rest(wait)

    def _watch(self) -> None:
        """Ends requests whose step hangs; the engine thread itself may be stuck in it."""
        period = min(1.0, self.config.scheduler.watchdog / 4)
        while not self._stop.wait(period) and not self.ended.is_set():
            if self._scheduler is not None and self._scheduler.fail_hung_step():
                _LOG.error("a step has taken longer than %g s", self.config.scheduler.watchdog)
