"""Who runs next: the scheduler of lanes over one executor. Lists and integers, no JAX, no sockets.

`Scheduler.turn` does one round of work: take in commands, enforce deadlines, admit, plan, dispatch
one step, read the step before it. It runs in one thread (the engine thread of the server, or the
only one of a command); `submit`, `cancel` and the other commands may come from any thread. Time
comes from an injected clock, so every behaviour can be tested without waiting.

What a lane computes never depends on what is decided here; only when it is computed does.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ds4jax import config, health, refusals
from ds4jax import plan as plan_lib
from ds4jax.front import Front
from ds4jax.health import Health
from ds4jax.plan import Chunk, DecodeRow, Executor, LaneRef, LaneResult, LaneSpec, StepPlan
from ds4jax.request import (
    Ended,
    Event,
    Failed,
    Finish,
    Phase,
    Progress,
    Request,
    ServiceError,
    Started,
    Tokens,
)
from ds4jax.telemetry import Counters, LaneView, SlotState, Snapshot, StepRecord


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Policy knobs. Times in seconds.

    Raises:
        ConfigError: listing every value out of range.
    """

    max_waiting: int = 64  # requests
    queue_timeout: float | None = None  # longest wait for a lane; None: no limit
    coalesce: float = 0.020  # idle window before the first plan; 0: none
    decode_steps_per_chunk: int = 8
    max_prefill_lanes: int = 2
    slow_client_grace: float = 30.0
    watchdog: float = 60.0
    self_test_retry: float = 30.0
    check_invariants: bool = False  # page books after every turn (tests)

    def __post_init__(self) -> None:
        problems = []
        for name, low in (
            ("max_waiting", 1), ("coalesce", 0), ("decode_steps_per_chunk", 1),
            ("max_prefill_lanes", 1), ("slow_client_grace", 0), ("watchdog", 0.001),
            ("self_test_retry", 0),
        ):  # fmt: skip
            if not getattr(self, name) >= low:
                problems.append(f"{name} is {getattr(self, name)}, must be at least {low}")
        if self.queue_timeout is not None and not self.queue_timeout > 0:
            problems.append(f"queue_timeout is {self.queue_timeout}, must be above 0")
        if problems:
            raise config.ConfigError("scheduler", problems)


_LOG = logging.getLogger(__name__)
_RUNNING = (SlotState.RESERVED, SlotState.PREFILL, SlotState.DECODE, SlotState.SUSPENDED)


@dataclass(eq=False, kw_only=True)
class _Lane:
    """One candidate. `dispatched_known`: what plans have asked for, `outputs`: what has arrived."""

    request: Request
    spec: LaneSpec
    order: int
    state: SlotState = SlotState.WAITING
    ref: LaneRef | None = None
    in_flight: int = 0
    dispatched_known: int = 0
    outputs: list[int] = field(default_factory=list)
    known: int = 0  # tokens that prefill covers
    seated: LaneSpec | None = None  # as the executor has it: `spec`, or with tokens to replay
    snapshot: Any | None = None
    paused: bool = False  # by an operator
    suspended_at: float | None = None
    admitted_at: float | None = None
    ended: bool = False  # its last event is out
    test: bool = False  # the self-test

    @property
    def wants_decode(self) -> bool:
        """Whether another step is due: each in flight gives a token, with drafts even more."""
        if self.state is not SlotState.DECODE:
            return False
        return len(self.outputs) + self.in_flight < self.spec.max_output_tokens


@dataclass(eq=False)
class _InFlight:
    handle: plan_lib.StepHandle
    plan: StepPlan
    lanes: tuple[_Lane, ...]
    dispatched_at: float


class Scheduler:
    """Shares one executor among requests.

    Args:
        executor: used by the thread that calls `turn` only.
        settings: policy.
        clock: monotonic seconds.
        observer: called with every finished step's record.
        on_health: called with (healthy, reason) on every change.
        deliver: called when streams may have new events: before every wait for a step, and at the
            end of a turn. A reader that is in another thread is woken here, once for all events,
            rather than by each of them.
    """

    def __init__(
        self,
        executor: Executor,
        settings: SchedulerConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        observer: Callable[[StepRecord], None] = lambda record: None,
        on_health: Callable[[bool, str], None] = lambda healthy, reason: None,
        deliver: Callable[[], None] = lambda: None,
    ) -> None:
        self.executor = executor
        self.limits = executor.limits
        self.settings = settings or SchedulerConfig()
        self.clock = clock
        self.counters = Counters()
        self._front = Front(self.settings.max_waiting)
        self._health = Health(self.settings.self_test_retry, clock, on_health)
        self._observer = observer
        self._deliver = deliver
        self._open: dict[Request, int] = {}  # candidates not ended, per request
        self._lanes: dict[LaneRef, _Lane] = {}
        self._cpu_elsewhere = 0.0  # this thread's, in the executor
        self._waiting: deque[_Lane] = deque()
        self._parked: list[_Lane] = []
        self._in_flight: deque[_InFlight] = deque()
        self._orders = 0
        self._window_until: float | None = None
        self._last_chunk_order = -1
        self._decode_credit = 0
        self._last_done = 0.0
        self._last_seconds = {"prefill": 0.0, "decode": 0.0}
        self._mean_service = 0.0
        self._dispatching: tuple[tuple[_Lane, ...], float] | None = None
        self._can_fork = True  # until the executor says that it cannot
        self._freed = False  # the last turn made room for somebody
        self._published: Snapshot | None = None

    # ---- commands, from any thread -------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ServiceError: refused (full, draining, unhealthy, impossible, duplicate id, too late).
        """
        now = self.clock()
        request.arrival = now
        error = refusals.impossible(request, self.limits)
        if error is not None:
            raise error
        if request.deadline is not None and request.deadline <= now + self.estimate_wait():
            raise refusals.deadline_not_met(request.deadline - now, self.estimate_wait())
        if not self._health.healthy and not self._health.testing:
            raise refusals.unhealthy("it runs again shortly", self.settings.self_test_retry)
        self._front.enter(request, lambda: self._enqueue(request), self.estimate_wait)

    def cancel(
        self, request: Request, cause: str = "client", error: ServiceError | None = None
    ) -> None:
        """End a request in whatever state it is; `error`, if given, is its last event."""
        self._front.post(lambda: self._end_request(request, cause, error))

    def stop_candidate(self, request: Request, candidate: int) -> None:
        """The consumer has what it wanted (a stop string matched): end without an event."""

        def act() -> None:
            for lane in self._all_lanes():
                if lane.request is request and lane.spec.candidate == candidate:
                    self._end_lane(lane, None)

        self._front.post(act)

    def pause(self, request: Request, paused: bool) -> None:
        """Operator pause: suspend the request's lanes, or let them go on."""

        def act() -> None:
            for lane in self._all_lanes():
                if lane.request is request:
                    lane.paused = paused

        self._front.post(act)

    def park(self, request: Request) -> None:
        """Operator preemption: park the request's decoding lanes as if pages had run out."""

        def act() -> None:
            self._read_all()
            for lane in list(self._lanes.values()):
                if lane.request is request and lane.state in (
                    SlotState.DECODE,
                    SlotState.SUSPENDED,
                ):
                    self._park(lane)

        self._front.post(act)

    def drain(self, error: Callable[[], ServiceError] | None = None) -> None:
        """Refuse new and queued requests with `error()` (default DRAINING); live ones finish."""
        self._front.close(error or refusals.draining)
        self._front.post(self._refuse_waiting)

    def shut_down(self, error: Callable[[], ServiceError]) -> None:
        """End everything that is still there with `error()`."""

        def act() -> None:
            for request in list(self._open):
                self._end_request(request, "shutdown", error())

        self.drain(error)
        self._front.post(act)

    def fail_hung_step(self) -> bool:
        """Watchdog, from another thread: if a step is overdue, fail its requests without waiting.

        Returns: whether one was. The lanes themselves are retired once the step returns.
        """
        pending = self._dispatching
        if pending is not None:
            lanes, started = pending
        else:
            try:
                step = self._in_flight[0]
            except IndexError:
                return False
            lanes, started = step.lanes, max(step.dispatched_at, self._last_done)
        if self.clock() - started <= self.settings.watchdog:
            return False
        self._health.doubt("a step is overdue")
        for lane in lanes:
            if not lane.test:  # the engine thread judges that one, when it gets to it
                lane.request.stream.put(Failed(self.clock(), self._watchdog_error()))
        self._deliver()
        return True

    def is_active(self, request: Request) -> bool:
        """Whether a request has not ended, from any thread."""
        return self._front.is_active(request)

    @property
    def healthy(self) -> bool:
        """Whether new requests are welcome, as far as the device goes."""
        return self._health.healthy

    @property
    def health_changes(self) -> int:
        """How often `healthy` has changed."""
        return self._health.changes

    @property
    def draining(self) -> bool:
        """Whether `drain` was called."""
        return self._front.refusal is not None

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self._front.waiting

    @property
    def active(self) -> int:
        """Requests that have not ended, queued ones included."""
        return self._front.active

    def latest(self) -> Snapshot | None:
        """The last published state; at most a quarter of a second old while steps run."""
        return self._published

    def estimate_wait(self) -> float:
        """Seconds until a request that arrives now would start, from how long lanes took so far."""
        ahead = self._front.waiting - (self.limits.num_slots - len(self._lanes))
        if ahead < 0:
            return 0.0
        return (ahead + 1) * self._mean_service / self.limits.num_slots

    # ---- one turn ------------------------------------------------------------------------------

    def turn(self) -> float | None:
        """One round of work.

        Returns: seconds after which the next turn should come at the latest (0: at once), or None
        if only a command can bring new work.
        """
        began, cpu = self.clock(), time.thread_time() - self._cpu_elsewhere
        c = self.counters
        elsewhere = c.wait_seconds + c.dispatch_seconds
        steps = c.steps
        try:
            dispatched = self._work()
        except Exception as error:  # an executor call outside of a step
            if self.settings.check_invariants:
                raise
            _LOG.exception("the executor failed between steps")
            self._device_failed(error)
            dispatched = False
        self._deliver()
        now = self.clock()
        self._publish(now)
        wake = self._next_wake(now)
        if dispatched or c.steps > steps:
            elsewhere = c.wait_seconds + c.dispatch_seconds - elsewhere
            c.host_seconds += self.clock() - began - elsewhere
            c.host_cpu_seconds += time.thread_time() - self._cpu_elsewhere - cpu
        return wake

    def _work(self) -> bool:
        for action in self._front.commands():
            action()
        now = self.clock()
        self._expire(now)
        self._update_suspensions(now)
        self._free_retiring()
        self._run_self_test(now)
        self._admit(now)
        dispatched = self._dispatch()
        if self._in_flight and (len(self._in_flight) > 1 or not dispatched):
            self._read_oldest()
        self._freed = self._free_retiring()
        if self.settings.check_invariants:
            self._check()
        return dispatched

    def poke(self) -> None:
        """End a `rest` early, from any thread."""
        self._front.poke()

    def rest(self, seconds: float | None) -> None:
        """Wait in the engine thread for a command or a drained stream, at most this long."""
        self._front.rest(seconds)

    def abandon(self) -> None:
        """The engine thread is gone: refuse everything, and end every stream from outside."""
        self._front.close(refusals.shutting_down)
        for request in self._front.requests():
            request.stream.put(Failed(self.clock(), refusals.shutting_down()))
        self._deliver()

    def self_test(self) -> None:
        """Start-up test: one greedy token of a fixed prompt; its id is what later tests must give.

        Raises:
            ServiceError: it did not finish with a finite result.
        """
        request = health.self_test_request(self.limits, self.clock())
        lane = self._make_lane(request, request.lanes[0], test=True)
        self._open[request] = 1
        self._waiting.append(lane)
        while not lane.ended:
            self.turn()
        while (event := request.stream.pop()) is not None:
            if isinstance(event, Failed):
                raise event.error
            self._health.judge(event)

    def _next_wake(self, now: float) -> float | None:
        if self._in_flight or self._freed or self._front.has_commands:
            return 0.0
        lanes = self._lanes.values()
        room = not lanes or any(x.state is SlotState.SUSPENDED and not x.in_flight for x in lanes)
        ready = room and any(not self._blocked(x) for x in self._parked)
        ready = ready and not self._health.needs_reset
        if ready or self._prefill_lanes() or self._decode_lanes():
            return 0.0
        times = []
        for request in self._open:
            if request.deadline is not None:
                times.append(request.deadline)
            if request.time_limit is not None:
                times.append(request.arrival + request.time_limit)
            if self.settings.queue_timeout is not None:
                times.append(self._queue_end(request))
        for lane in self._all_lanes():
            if lane.suspended_at is not None and not lane.paused:
                times.append(lane.suspended_at + self.settings.slow_client_grace)
        if self._window_until is not None:
            times.append(self._window_until)
        if self._health.due is not None:
            times.append(self._health.due)
        soonest = min(times, default=math.inf)
        return None if soonest == math.inf else max(0.001, soonest - now)

    # ---- queue, admission ----------------------------------------------------------------------

    def _enqueue(self, request: Request) -> None:
        if self._front.refusal is not None:
            self._drop(request, self._front.refusal())
            return
        self.counters.requests += 1
        self._open[request] = len(request.lanes)
        for spec in request.lanes:
            self._waiting.append(self._make_lane(request, spec))
        self._number_queue()

    def _make_lane(self, request: Request, spec: LaneSpec, test: bool = False) -> _Lane:
        self._orders += 1
        return _Lane(
            request=request, spec=spec, order=self._orders, known=len(spec.prompt), test=test
        )

    def _number_queue(self) -> None:
        position, last = -1, None
        for lane in self._waiting:
            if lane.request is not last and lane.request.progress.phase is Phase.QUEUED:
                position, last = position + 1, lane.request
                lane.request.progress = Progress(Phase.QUEUED, position, 0, lane.known)

    def _admit(self, now: float) -> None:
        """Restore parked lanes, oldest first, then take newcomers in strict order of arrival."""
        if self._health.needs_reset:
            return
        for lane in sorted(self._parked, key=lambda x: x.order):
            if self._blocked(lane):
                continue
            if not self._restore(lane) and not self._restore_for_suspended(lane):
                return
        if not self._waiting:
            self._window_until = None
            return
        if self._coalescing(now):
            return
        while self._waiting and self._admit_one(self._waiting[0], now):
            self._waiting.popleft()
            self._number_queue()

    def _coalescing(self, now: float) -> bool:
        if self._lanes or self._parked or self._waiting[0].test:
            self._window_until = None
            return False
        if self._window_until is None:
            self._window_until = self._waiting[0].request.arrival + self.settings.coalesce
        if now < self._window_until:
            return True
        self._window_until = None
        return False

    def _admit_one(self, lane: _Lane, now: float) -> bool:
        if self._health.testing and not lane.test:
            return False
        ref = self.executor.admit(lane.spec)
        if ref is None:
            return False
        self._seat(lane, ref, SlotState.RESERVED)
        lane.admitted_at = now
        request = lane.request
        if request.progress.phase is Phase.QUEUED:
            request.progress = Progress(Phase.PREFILL, 0, 0, lane.known)
            if not lane.test:
                self._front.seated()
            request.stream.put(Started(now, now - request.arrival))
        return True

    def _seat(self, lane: _Lane, ref: LaneRef, state: SlotState) -> None:
        lane.ref, lane.state = ref, state
        self._lanes[ref] = lane

    # ---- parking -------------------------------------------------------------------------------

    def _blocked(self, lane: _Lane) -> bool:
        """Whether a lane may not run for its client's or an operator's sake."""
        return lane.paused or (lane.suspended_at is not None)

    def _park(self, lane: _Lane) -> None:
        """Release slot and pages; requires that no step in flight names the lane."""
        assert lane.ref is not None and not lane.in_flight
        lane.snapshot = self.executor.park(lane.ref)
        del self._lanes[lane.ref]
        lane.ref, lane.state = None, SlotState.PARKED
        self._parked.append(lane)
        self.counters.preemptions += 1

    def _restore(self, lane: _Lane) -> bool:
        if lane.snapshot is not None:
            spec = lane.seated or lane.spec
            ref = self.executor.restore(spec, lane.snapshot)
            state = SlotState.DECODE
        else:
            spec = replace(lane.spec, replay=np.array(lane.outputs, np.int32))
            ref = self.executor.admit(spec)
            state = SlotState.RESERVED
        if ref is None:
            return False
        if lane.snapshot is None:
            lane.known = len(lane.spec.prompt) + max(0, len(lane.outputs) - 1)
            lane.dispatched_known = 0
        lane.snapshot, lane.seated = None, spec
        self._parked.remove(lane)
        self._seat(lane, ref, state)
        return True

    def _restore_for_suspended(self, lane: _Lane) -> bool:
        """Restore at the cost of lanes whose clients do not read: they are parked instead."""
        held = [x for x in self._lanes.values() if x.state is SlotState.SUSPENDED]
        for victim in sorted(held, key=lambda x: -x.order):
            if not victim.in_flight:
                self._park(victim)
                if self._restore(lane):
                    return True
        return False

    def _make_room(self, rows: list[_Lane]) -> tuple[list[_Lane], int]:
        """Lanes and drafts of a decode step, parking the youngest until its pages are there."""
        while rows:
            limits = self.executor.plan_limits([lane.ref for lane in rows if lane.ref])
            if not limits.lacking:
                return rows, limits.drafts
            if self._in_flight:  # results may end lanes, and a parked lane must be at rest
                self._read_all()
                self._free_retiring()
            else:
                held = [x for x in self._lanes.values() if x.state is SlotState.SUSPENDED]
                self._park(max(held or rows, key=lambda x: x.order))
            rows = self._decode_lanes()
        return rows, 0

    # ---- planning ------------------------------------------------------------------------------

    def _decode_lanes(self) -> list[_Lane]:
        rows = [lane for lane in self._lanes.values() if lane.wants_decode]
        return sorted(rows, key=lambda x: x.order)

    def _prefill_lanes(self) -> list[_Lane]:
        """The oldest lanes with chunks to dispatch, at most `max_prefill_lanes`."""
        pending = [
            lane for lane in self._lanes.values()
            if lane.state in (SlotState.RESERVED, SlotState.PREFILL)
            and lane.dispatched_known < lane.known and not lane.paused
            and not self._waits_for_fork(lane)
        ]  # fmt: skip
        return sorted(pending, key=lambda x: x.order)[: self.settings.max_prefill_lanes]

    def _siblings(self, lane: _Lane) -> list[_Lane]:
        """Candidates of the same request that could do with one prefill of their prompt."""
        if lane.outputs or len(lane.request.lanes) == 1:
            return []
        return [
            x for x in self._lanes.values()
            if x.request is lane.request and x is not lane and not x.outputs
            and x.state in (SlotState.RESERVED, SlotState.PREFILL)
        ]  # fmt: skip

    def _waits_for_fork(self, lane: _Lane) -> bool:
        """Whether an older candidate computes what this one would."""
        if lane.dispatched_known or not self._can_fork or lane.known <= self.limits.chunk_tokens:
            return False
        return any(x.order < lane.order for x in self._siblings(lane))

    def _fork(self, lane: _Lane, start: int) -> None:
        """Before a lane's last chunk: give the younger candidates all chunks up to it."""
        young = [x for x in self._siblings(lane) if not x.dispatched_known]
        refs = [x.ref for x in young if x.ref is not None]
        if not refs or not start or not self._can_fork:
            return
        assert lane.ref is not None
        self._can_fork = self.executor.fork(lane.ref, refs, start)
        if not self._can_fork:
            return
        for x in young:
            x.dispatched_known, x.state = start, SlotState.PREFILL
        self.counters.forked_tokens += start * len(young)

    def _dispatch(self) -> bool:
        """Plan and dispatch one step. False if there is no work, or a result has to come first."""
        prefill, decode = self._prefill_lanes(), self._decode_lanes()
        if prefill and (not decode or self._decode_credit <= 0):
            if any(step.plan.chunk for step in self._in_flight):
                return False  # chunks are long: a cancel must not wait for two of them
            return self._dispatch_chunk(prefill)
        lanes, drafts = self._make_room(decode)
        if not lanes:
            return False
        self._decode_credit -= 1
        rows = tuple(DecodeRow(lane.ref) for lane in lanes if lane.ref is not None)
        return self._step(StepPlan(decode=rows, drafts=drafts), lanes)

    def _dispatch_chunk(self, prefill: list[_Lane]) -> bool:
        later = [x for x in prefill if x.order > self._last_chunk_order]
        lane = (later or prefill)[0]
        assert lane.ref is not None
        self._last_chunk_order = lane.order
        self._decode_credit = self.settings.decode_steps_per_chunk
        start = lane.dispatched_known
        stop = min(start + self.limits.chunk_tokens, lane.known)
        chunk = Chunk(lane.ref, start, stop, last=stop == lane.known)
        if chunk.last:
            self._fork(lane, start)
        lane.state = SlotState.PREFILL
        return self._step(StepPlan(chunk=chunk), [lane])

    def _step(self, plan: StepPlan, lanes: list[_Lane]) -> bool:
        before, cpu = self.clock(), time.thread_time()
        self._dispatching = (tuple(lanes), before)
        try:
            handle = self.executor.step(plan)
        except plan_lib.PlanError as error:
            for lane in lanes:
                self._fail_lane(lane, refusals.device_error(f"a plan was refused: {error}"))
            return False
        except Exception as error:
            self._device_failed(error)
            return False
        finally:
            self._dispatching = None
            self._cpu_elsewhere += time.thread_time() - cpu
        now = self.clock()
        self.counters.dispatch_seconds += now - before
        self._in_flight.append(_InFlight(handle, plan, tuple(lanes), before))
        for lane in lanes:
            lane.in_flight += 1
            if plan.chunk is not None:
                lane.dispatched_known = plan.chunk.stop
                if plan.chunk.last:
                    lane.state = SlotState.DECODE
        return True

    # ---- results -------------------------------------------------------------------------------

    def _read_all(self) -> None:
        while self._in_flight:
            self._read_oldest()

    def _read_oldest(self) -> None:
        step = self._in_flight[0]
        self._deliver()
        before, cpu = self.clock(), time.thread_time()
        try:
            result = step.handle.result()
        except Exception as error:
            self._device_failed(error)
            return
        finally:
            self._cpu_elsewhere += time.thread_time() - cpu
        now = self.clock()
        self._in_flight.popleft()
        seconds = now - max(step.dispatched_at, self._last_done)
        self._last_done = now
        record = self.counters.add_step(step.plan, result, seconds, now - before)
        self._last_seconds[record.phase] = seconds
        self._observer(record)
        for lane, lane_result in zip(step.lanes, result.lanes, strict=True):
            lane.in_flight -= 1
            if lane.ref != lane_result.lane or lane.ended:
                self.counters.dropped_results += 1
            elif seconds > self.settings.watchdog:
                self.counters.watchdog += 1
                self._fail_lane(lane, self._watchdog_error(), unhealthy="a step was overdue")
            elif not lane_result.finite:
                self.counters.non_finite += 1
                self._fail_lane(lane, refusals.non_finite(), unhealthy="non-finite logits")
            else:
                self._accept(lane, step.plan.chunk, lane_result, now)

    def _accept(self, lane: _Lane, chunk: Chunk | None, result: LaneResult, now: float) -> None:
        if chunk is not None:
            if lane.request.progress.phase is Phase.PREFILL and not lane.spec.candidate:
                done = min(chunk.stop, len(lane.spec.prompt))
                lane.request.progress = Progress(Phase.PREFILL, 0, done, len(lane.spec.prompt))
            if not chunk.last:
                return
            lane.request.progress = replace(lane.request.progress, phase=Phase.DECODE)
        if lane.spec.max_output_tokens == 0:
            self._end_lane(lane, Ended(now, lane.spec.candidate, Finish.LENGTH))
            return
        tokens = result.tokens
        if chunk is not None and lane.outputs:  # the end of a replay repeats its last token
            if tokens[0].token != lane.outputs[-1]:
                error = refusals.device_error(
                    f"token {len(lane.outputs) - 1} was {lane.outputs[-1]} and came out as"
                    f" {tokens[0].token} when the lane was computed again"
                )
                self._fail_lane(lane, error)
            return
        spec, count, end = lane.spec, 0, None
        for token in tokens:
            lane.outputs.append(token.token)
            count += 1
            if token.token in spec.stop_ids:
                end = Ended(now, spec.candidate, Finish.STOP, token.token)
            elif len(lane.outputs) >= spec.max_output_tokens:
                end = Ended(now, spec.candidate, Finish.LENGTH)
            if end is not None:
                break
        self.counters.output_tokens += count
        lane.request.stream.put(
            Tokens(
                now, spec.candidate, tokens[:count],
                result.proposed, result.verified, result.accepted,
            )
        )  # fmt: skip
        if end is not None:
            self._end_lane(lane, end)

    # ---- ends ----------------------------------------------------------------------------------

    def _all_lanes(self) -> list[_Lane]:
        return [*self._lanes.values(), *self._waiting, *self._parked]

    def _end_lane(self, lane: _Lane, event: Event | None) -> None:
        """Last event of a candidate (None: nobody listens); its slot goes when it is at rest."""
        if lane.ended:
            return
        lane.ended = True
        if lane.state is SlotState.WAITING:
            self._waiting.remove(lane)
            self._number_queue()
        elif lane.state is SlotState.PARKED:
            self._parked.remove(lane)
            lane.snapshot = None
        else:
            lane.state = SlotState.RETIRING
        if lane.admitted_at is not None and not lane.test:
            took = self.clock() - lane.admitted_at
            self._mean_service = took if not self._mean_service else (
                0.8 * self._mean_service + 0.2 * took
            )  # fmt: skip
        if event is not None:
            lane.request.stream.put(event)
        self._close_candidate(lane.request)

    def _close_candidate(self, request: Request) -> None:
        self._open[request] -= 1
        if self._open[request]:
            return
        del self._open[request]
        self._front.leave(request)

    def _end_request(self, request: Request, cause: str, error: ServiceError | None) -> None:
        lanes = [x for x in self._all_lanes() if x.request is request and not x.ended]
        if not lanes:
            return
        if cause:
            self.counters.cancelled[cause] = self.counters.cancelled.get(cause, 0) + 1
        if error is not None:
            request.stream.put(Failed(self.clock(), error))
        for lane in lanes:
            self._end_lane(lane, None)

    def _drop(self, request: Request, error: ServiceError) -> None:
        """End a request that never became lanes."""
        self._open[request] = 1
        request.stream.put(Failed(self.clock(), error))
        self._close_candidate(request)

    def _fail_lane(self, lane: _Lane, error: ServiceError, unhealthy: str = "") -> None:
        """End the lane's whole request with an error; the other requests go on."""
        if unhealthy:
            self._health.lost(unhealthy)
        if lane.test:
            lane.request.stream.put(Failed(self.clock(), error))
            self._end_lane(lane, None)
        else:
            self._end_request(lane.request, "", error)

    def _refuse_waiting(self) -> None:
        refusal = self._front.refusal or refusals.draining
        waiting = {x.request: None for x in self._waiting if not x.test}
        for request in waiting:
            if request.progress.phase is Phase.QUEUED:
                self._end_request(request, "draining", refusal())

    def _free_retiring(self) -> bool:
        freed = False
        for ref, lane in list(self._lanes.items()):
            if lane.state is SlotState.RETIRING and not lane.in_flight:
                self.executor.retire(ref)
                del self._lanes[ref]
                freed = True
        return freed

    def _expire(self, now: float) -> None:
        """Deadlines, time limits, and clients that have been slow for too long."""
        for request in list(self._open):
            if request.deadline is not None and now >= request.deadline:
                error = refusals.deadline_passed(now - request.arrival)
                self._end_request(request, "deadline", error)
            elif self._queue_end(request) <= now:
                error = refusals.queue_timeout(now - request.arrival)
                self._end_request(request, "queue_timeout", error)
            elif request.time_limit is not None and now >= request.arrival + request.time_limit:
                if request.progress.phase is Phase.QUEUED:
                    request.stream.put(Started(now, now - request.arrival))
                for lane in [x for x in self._all_lanes() if x.request is request]:
                    self._end_lane(lane, Ended(now, lane.spec.candidate, Finish.TIME_LIMIT))

    def _queue_end(self, request: Request) -> float:
        """When a request has waited for too long."""
        limit = self.settings.queue_timeout
        if limit is None or not request.id or request.progress.phase is not Phase.QUEUED:
            return math.inf
        return request.arrival + limit

    def _update_suspensions(self, now: float) -> None:
        grace = self.settings.slow_client_grace
        for lane in self._all_lanes():
            if lane.ended:
                continue
            stream = lane.request.stream
            if lane.suspended_at is None and stream.full and lane.state is SlotState.DECODE:
                lane.suspended_at = now
            elif lane.suspended_at is not None and stream.below_half:
                lane.suspended_at = None
            if lane.suspended_at is not None and now - lane.suspended_at >= grace:
                self.counters.slow_clients += 1
                error = refusals.slow_client(stream.unread, grace)
                self._end_request(lane.request, "slow_client", error)
            self._hold(lane)

    def _hold(self, lane: _Lane) -> None:
        """Make the lane's state agree with whether it may run."""
        if lane.ref is None:
            return
        if self._blocked(lane) and lane.state is SlotState.DECODE:
            lane.state = SlotState.SUSPENDED
            self.executor.suspend(lane.ref)
            self.counters.suspensions += 1
        elif lane.state is SlotState.SUSPENDED and not self._blocked(lane):
            lane.state = SlotState.DECODE
            self.executor.resume(lane.ref)

    # ---- faults and the self-test --------------------------------------------------------------

    def _device_failed(self, error: Exception) -> None:
        """A step raised: every live lane is lost, the cache is made new, then tested."""
        self.counters.device_errors += 1
        self._health.lost(f"device error: {error}", reset=True)
        self._in_flight.clear()
        for lane in list(self._lanes.values()):
            lane.in_flight = 0
            self._fail_lane(
                lane, refusals.device_error(f"the device failed: {type(error).__name__}")
            )
        self._lanes.clear()

    def _run_self_test(self, now: float) -> None:
        """Put the self-test in front of the queue when one is due."""
        due = self._health.due
        if due is None or now < due:
            return
        self.counters.self_tests += 1
        if self._health.needs_reset:
            try:
                self.executor.reset()
            except Exception as error:
                self._health.failed()
                self._refuse_unhealthy(f"the cache could not be made new: {error}")
                return
            self._health.needs_reset = False
        self._health.begin()
        request = health.self_test_request(self.limits, now)
        self._open[request] = 1
        self._waiting.appendleft(self._make_lane(request, request.lanes[0], test=True))
        request.stream.notify = lambda: self._judge(request)

    def _judge(self, request: Request) -> None:
        why = self._health.judge(request.stream.pop())
        if why is not None:
            self._refuse_unhealthy(why)

    def _refuse_unhealthy(self, why: str) -> None:
        waiting = {x.request: None for x in self._waiting if not x.test}
        for request in waiting:
            error = refusals.unhealthy(why, self.settings.self_test_retry)
            self._end_request(request, "unhealthy", error)

    def _watchdog_error(self) -> ServiceError:
        return refusals.device_error(f"a step took longer than {self.settings.watchdog:g} s")

    # ---- views ---------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """State now; from the engine thread only."""
        lanes = sorted((x for x in self._all_lanes() if not x.test), key=lambda x: x.order)
        views = tuple(
            LaneView(
                request_id=x.request.id, candidate=x.spec.candidate,
                slot=x.ref.slot if x.ref else None, state=x.state,
                prompt_tokens=len(x.spec.prompt),
                prefilled_tokens=min(x.dispatched_known, len(x.spec.prompt)),
                output_tokens=len(x.outputs),
            )
            for x in lanes
        )  # fmt: skip
        return Snapshot(
            at=self.clock(), healthy=self._health.healthy, draining=self.draining,
            waiting=self._front.waiting, lanes=views, pages=self.executor.page_counts(),
            num_slots=self.limits.num_slots, output_tokens=self.counters.output_tokens,
            steps=self.counters.steps, last_decode_seconds=self._last_seconds["decode"],
            last_prefill_seconds=self._last_seconds["prefill"],
        )  # fmt: skip

    def _publish(self, now: float) -> None:
        old = self._published
        if old is None or now - old.at >= 0.25 or not self._lanes:
            self._published = self.snapshot()

    def _check(self) -> None:
        counts = self.executor.page_counts()
        if counts.free + counts.owned != counts.total:
            raise AssertionError(f"pages do not add up: {counts}")
        for lane in self._lanes.values():
            assert lane.ref is not None and lane.state in (*_RUNNING, SlotState.RETIRING)
