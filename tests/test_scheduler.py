"""Scheduler over the fake executor: order, fairness, faults, exactness, and a randomised run."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ds4jax import config
from ds4jax.plan import (
    ExecutorLimits,
    LaneSpec,
    PlanError,
    ReasoningLimit,
    StepPlan,
    forced_token,
)
from ds4jax.request import (
    Ended,
    Failed,
    Finish,
    Phase,
    Request,
    ServiceError,
    Started,
    Stream,
    Tokens,
)
from ds4jax.scheduler import Scheduler, SchedulerConfig, SlotState
from tests.executor_contract import ExecutorContract, generate
from tests.fake_executor import FakeExecutor, spec


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A scheduler over a fake executor with a fake clock; a step takes `step` seconds."""

    def __init__(self, *, step: float = 0.01, settings: dict | None = None, **kwargs) -> None:
        self.clock = Clock()
        self.executor = FakeExecutor(clock=self.clock, **kwargs)
        self.executor.keep_plans = True
        self.step = step
        self.executor.on_result = self._pass
        self.health: list[tuple[bool, str]] = []
        options = {"coalesce": 0.0, "check_invariants": True, **(settings or {})}
        self.scheduler = Scheduler(
            self.executor,
            SchedulerConfig(**options),
            clock=self.clock,
            on_health=lambda ok, why: self.health.append((ok, why)),
        )
        self.count = 0

    def _pass(self) -> None:
        self.clock.now += self.step

    def submit(self, *lanes: LaneSpec, **kwargs) -> Request:
        self.count += 1
        stream = kwargs.pop("stream", None) or Stream(1 << 30, 1 << 40)
        request = Request(id=f"r{self.count}", lanes=lanes, stream=stream, **kwargs)
        self.scheduler.submit(request)
        return request

    def run(self, until: Callable[[], bool] | None = None, turns: int = 100_000) -> None:
        """Turns until nothing is left to do (or `until`), letting idle time pass."""
        for _ in range(turns):
            if until is not None and until():
                return
            wait = self.scheduler.turn()
            if wait is None:
                assert until is None or until(), "nothing left to do, and not there yet"
                return
            self.clock.now += wait
        raise AssertionError("it does not come to rest")


def drain(request: Request) -> list:
    return list(iter(request.stream.pop, None))


def ids(events: list, candidate: int = 0) -> list[int]:
    return [
        t.token for e in events if isinstance(e, Tokens) and e.candidate == candidate
        for t in e.tokens
    ]  # fmt: skip


def alone(lane: LaneSpec, **kwargs) -> list[int]:
    return [t.token for t in generate(FakeExecutor(**kwargs), lane)]


class TestFakeExecutor(ExecutorContract):
    @pytest.fixture(params=["snapshots", "no snapshots"])
    def executor(self, request) -> FakeExecutor:
        room = 1 << 30 if request.param == "snapshots" else 0
        return FakeExecutor(num_slots=3, max_ctx=512, chunk_tokens=16, snapshot_room=room)


def test_forced_token_counts_reasoning_only() -> None:
    limit = ReasoningLimit(max_tokens=2, starts_open=True, open_id=8, close_id=9)
    assert forced_token(None, [1, 2, 3]) is None
    assert forced_token(limit, [1]) is None
    assert forced_token(limit, [1, 2]) == 9
    assert forced_token(limit, [8, 1]) is None  # a repeated opener does not count
    assert forced_token(limit, [1, 9, 1, 1, 1]) is None
    assert forced_token(limit, [1, 9, 5, 8, 1]) == 9  # one before, one after it opened again


@pytest.mark.parametrize("bad", [
    {"prompt": np.zeros((0,), np.int32)}, {"prompt": np.zeros((2,), np.int64)},
    {"sampling": config.SamplingParams()}, {"max_output_tokens": -1},
    {"stop_ids": tuple(range(99))}, {"replay": np.zeros((9,), np.int32)},
])  # fmt: skip
def test_a_lane_that_validation_should_have_stopped_is_refused(bad: dict) -> None:
    good = {
        "prompt": np.zeros((2,), np.int32), "sampling": config.SamplingParams(seed=0),
        "max_output_tokens": 3,
    }  # fmt: skip
    LaneSpec(**good)
    with pytest.raises(PlanError):
        LaneSpec(**{**good, **bad})


def test_settings_are_checked_all_at_once() -> None:
    with pytest.raises(config.ConfigError) as caught:
        SchedulerConfig(max_waiting=0, coalesce=-1)
    assert len(caught.value.problems) == 2


# ---- one request -------------------------------------------------------------------------------


def test_events_of_one_request() -> None:
    bench = Bench()
    lane = spec(300, 5)
    request = bench.submit(lane)
    assert request.progress.phase is Phase.QUEUED
    bench.run()
    events = drain(request)
    assert isinstance(events[0], Started) and isinstance(events[-1], Ended)
    assert all(isinstance(e, Tokens) for e in events[1:-1])
    assert ids(events) == alone(lane)
    assert events[-1].finish is Finish.LENGTH and events[-1].stop_token is None
    assert request.progress.phase is Phase.DECODE and request.progress.done == 300
    assert [len(p.decode) for p in bench.executor.plans] == [0, 0, 0, 1, 1, 1, 1]
    assert bench.scheduler.active == 0


def test_a_stop_id_ends_the_lane_and_the_surplus_step_is_dropped() -> None:
    lane = spec(5, 20)
    stop = alone(lane)[4]
    cut = alone(lane).index(stop) + 1
    bench = Bench()
    request = bench.submit(replace(lane, stop_ids=(stop,)))
    bench.run()
    events = drain(request)
    assert ids(events) == alone(lane)[:cut]
    assert events[-1] == Ended(events[-1].at, 0, Finish.STOP, stop)
    assert len(bench.executor.plans) == cut + 1  # exactly one surplus step
    assert bench.scheduler.counters.dropped_results == 1


def test_no_step_is_dispatched_for_tokens_that_those_in_flight_give() -> None:
    """With drafts the budget may be full long before as many steps as tokens were asked for."""
    bench = Bench()
    bench.executor.burst = 4
    request = bench.submit(spec(5, 10))
    bench.run()
    sizes = [len(e.tokens) for e in drain(request) if isinstance(e, Tokens)]
    assert sizes == [1, 4, 4, 1]
    assert len(bench.executor.plans) == 4 and bench.scheduler.counters.dropped_results == 0


def test_events_are_delivered_together_and_before_every_wait() -> None:
    """One call for all lanes of a step, and none is left for the turn after it."""
    bench = Bench(num_slots=4, num_pages=16)
    told = {"pending": 0, "calls": 0}

    def deliver() -> None:
        told["calls"] += bool(told["pending"])
        told["pending"] = 0

    def notify() -> None:
        told["pending"] += 1

    def on_result() -> None:
        assert not told["pending"]  # a step may take seconds
        bench.clock.now += bench.step

    bench.scheduler._deliver = deliver
    bench.executor.on_result = on_result
    for n in range(4):
        bench.submit(spec(5, 60, seed=n), stream=Stream(1 << 30, 1 << 40, notify))
    while bench.scheduler.turn() is not None:
        assert not told["pending"]
    assert told["calls"] <= bench.scheduler.counters.steps + 4


@pytest.mark.parametrize("out", [0, 1])
def test_tiny_budgets(out: int) -> None:
    bench = Bench()
    request = bench.submit(spec(200, out))
    bench.run()
    events = drain(request)
    assert len(ids(events)) == out and events[-1].finish is Finish.LENGTH
    assert len(bench.executor.plans) == 2


def test_the_next_step_is_dispatched_before_the_last_one_is_read() -> None:
    bench = Bench()
    depth = []
    bench.executor.on_step = lambda plan: depth.append(len(bench.executor.in_flight))
    bench.submit(spec(5, 6))
    bench.run()
    assert depth == [0, 1, 1, 1, 1, 1]


def test_candidates_of_one_request() -> None:
    bench = Bench()
    lanes = [spec(5, 6, candidate=c) for c in range(3)]
    request = bench.submit(*lanes)
    bench.run()
    events = drain(request)
    assert sum(isinstance(e, Started) for e in events) == 1
    assert sorted(e.candidate for e in events if isinstance(e, Ended)) == [0, 1, 2]
    outputs = [ids(events, c) for c in range(3)]
    assert outputs == [alone(lane) for lane in lanes]
    assert len({tuple(x) for x in outputs}) == 3


@pytest.mark.parametrize("can_fork", [True, False])
def test_candidates_share_the_prefill_of_their_prompt(can_fork: bool) -> None:
    bench = Bench(chunk_tokens=64)
    bench.executor.can_fork = can_fork
    lanes = [spec(200, 6, candidate=c) for c in range(3)]
    request, other = bench.submit(*lanes), bench.submit(spec(100, 5, seed=9))
    bench.run()
    events = drain(request)
    assert [ids(events, c) for c in range(3)] == [alone(lane, chunk_tokens=64) for lane in lanes]
    assert ids(drain(other)) == alone(spec(100, 5, seed=9))
    chunks = [p.chunk for p in bench.executor.plans if p.chunk and p.chunk.lane.slot < 3]
    assert len(chunks) == (3 + 3 if can_fork else 12)  # whole chunks once, the last one each
    assert bench.scheduler.counters.forked_tokens == (2 * 192 if can_fork else 0)
    assert bench.executor.forks == (2 if can_fork else 0)


def test_a_candidate_that_comes_late_computes_its_own_prefill() -> None:
    bench = Bench(chunk_tokens=64, num_slots=2)
    blocker = bench.submit(spec(5, 40))
    bench.run(until=lambda: blocker.progress.phase is Phase.DECODE)
    lanes = [spec(200, 30, candidate=c) for c in range(2)]
    request = bench.submit(*lanes)
    bench.run()
    events = drain(request)
    assert [ids(events, c) for c in range(2)] == [alone(lane, chunk_tokens=64) for lane in lanes]
    assert bench.executor.forks == 0 and isinstance(drain(blocker)[-1], Ended)


def test_cancelling_a_request_that_shares_its_prefill_frees_all_its_lanes() -> None:
    for chunks in (1, 3, 4):
        bench = Bench(chunk_tokens=64)
        request = bench.submit(*[spec(200, 30, candidate=c) for c in range(3)])
        bench.run(until=lambda bench=bench, n=chunks: len(bench.executor.plans) == n)
        bench.scheduler.cancel(request)
        bench.run()
        assert not bench.executor.lanes and bench.scheduler.active == 0


def test_a_finished_candidate_is_stopped_alone() -> None:
    bench = Bench()
    request = bench.submit(*[spec(5, 50, candidate=c) for c in range(2)])
    bench.run(until=lambda: bench.scheduler.counters.output_tokens >= 10)
    bench.scheduler.stop_candidate(request, 0)
    bench.run()
    events = drain(request)
    assert [e.candidate for e in events if isinstance(e, Ended)] == [1]
    assert len(ids(events, 1)) == 50 and len(ids(events, 0)) < 10


@pytest.mark.parametrize("out", [1, 2, 7, 30])
def test_several_tokens_per_step_give_the_same_answer(out: int) -> None:
    bench = Bench()
    bench.executor.burst = 4
    lane = spec(120, out)
    stop = alone(lane)[-1]
    request = bench.submit(lane)
    stopped = bench.submit(replace(lane, stop_ids=(stop,)))
    bench.run()
    assert ids(drain(request)) == alone(lane)
    assert ids(drain(stopped)) == alone(lane)[: alone(lane).index(stop) + 1]
    c = bench.scheduler.counters
    assert c.verified == 3 * c.spec_steps and c.accepted_at.get(0, 0) <= c.verified_at.get(0, 0)


# ---- who runs when -----------------------------------------------------------------------------


def test_idle_coalescing_shares_the_first_plan_and_never_delays_a_busy_server() -> None:
    bench = Bench(settings={"coalesce": 0.02})
    first = bench.submit(spec(5, 30))
    assert bench.scheduler.turn() == pytest.approx(0.02)
    bench.clock.now += 0.015
    second = bench.submit(spec(5, 30))
    assert bench.scheduler.turn() == pytest.approx(0.005)
    assert not bench.executor.plans
    bench.clock.now += 0.005
    bench.run(until=lambda: len(bench.executor.plans) == 4)
    late = bench.submit(spec(5, 3))
    before = bench.clock.now
    bench.run(until=lambda: late.progress.phase is not Phase.QUEUED)
    assert bench.clock.now - before <= 0.02 + 1e-9  # a step or two, no window
    bench.run()
    starts = [drain(r)[0] for r in (first, second, late)]
    assert [round(e.queue_s, 3) for e in starts[:2]] == [0.02, 0.005]


def test_strict_arrival_order_even_if_a_later_one_would_fit() -> None:
    bench = Bench(num_slots=4, num_pages=8, max_ctx=1024)
    running = bench.submit(spec(500, 10))
    bench.run(until=lambda: running.progress.phase is Phase.DECODE)
    long, short = bench.submit(spec(600, 5)), bench.submit(spec(5, 2))
    for _ in range(3):
        bench.scheduler.turn()
    assert long.progress.phase is Phase.QUEUED and long.progress.queue_position == 0
    assert short.progress.phase is Phase.QUEUED and short.progress.queue_position == 1
    bench.run()
    assert drain(long)[0].at <= drain(short)[0].at


def test_prefill_rotates_among_the_oldest_and_interleaves_with_decode() -> None:
    bench = Bench(num_slots=4, settings={"decode_steps_per_chunk": 3, "max_prefill_lanes": 2})
    decoder = bench.submit(spec(5, 60))
    bench.run(until=lambda: decoder.progress.phase is Phase.DECODE)
    mark = len(bench.executor.plans)
    for _ in range(3):
        bench.submit(spec(512, 2))
    bench.run()
    plans = bench.executor.plans[mark:]
    chunks = [(p.chunk.lane.slot, p.chunk.start) for p in plans if p.chunk]
    assert chunks[:6] == [(1, 0), (2, 0), (1, 128), (2, 128), (1, 256), (2, 256)]
    assert {slot for slot, _ in chunks[6:8]} == {1, 2} and chunks[8][0] == 3
    kinds = "".join("c" if p.chunk else "d" for p in plans)
    assert "cddd" in kinds and "cc" not in kinds and "cdddd" not in kinds[: kinds.rindex("c")]


def test_no_chunk_is_dispatched_behind_another() -> None:
    """A cancel waits for one of them at most; a decode step may wait in front of a chunk."""
    bench = Bench()
    pairs = []

    def on_step(plan: StepPlan) -> None:
        count = len(bench.executor.in_flight)
        before = bench.executor.plans[-count:] if count else []
        pairs.extend((p.chunk is not None, plan.chunk is not None) for p in before)

    bench.executor.on_step = on_step
    bench.submit(spec(1000, 5)), bench.submit(spec(1000, 30))
    bench.run()
    assert set(pairs) == {(False, False), (False, True), (True, False)}


def test_every_decoding_lane_is_in_every_decode_step() -> None:
    bench = Bench()
    for n in range(6):
        bench.submit(spec(5 + n, 80))
    bench.run()
    widths = [len(p.decode) for p in bench.executor.plans if p.decode]
    assert max(widths) == 6 and Counter(widths)[6] >= 30


def test_the_grid_is_absolute() -> None:
    bench = Bench(chunk_tokens=64)
    bench.submit(spec(200, 1))
    bench.run()
    spans = [(p.chunk.start, p.chunk.stop) for p in bench.executor.plans]
    assert spans == [(0, 64), (64, 128), (128, 192), (192, 200)]


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("lanes", "code", "reason"), [
    ([spec(4096, 1)], "INVALID_ARGUMENT", "CONTEXT_LENGTH_EXCEEDED"),
    ([spec(4097, 0)], "INVALID_ARGUMENT", "CONTEXT_LENGTH_EXCEEDED"),
    ([spec(1300, 2)], "RESOURCE_EXHAUSTED", "REQUEST_TOO_LARGE_FOR_POOL"),
    ([spec(5, 5, candidate=c) for c in range(7)], "INVALID_ARGUMENT", "TOO_MANY_CANDIDATES"),
])  # fmt: skip
def test_the_impossible_is_refused_at_once(lanes: list, code: str, reason: str) -> None:
    bench = Bench(num_pages=10)
    with pytest.raises(ServiceError) as caught:
        bench.submit(*lanes)
    assert (caught.value.code, caught.value.reason) == (code, reason)
    bench.submit(spec(1200, 81))  # needs exactly the ten pages
    bench.run()
    assert bench.scheduler.active == 0


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    bench = Bench(num_slots=1, settings={"max_waiting": 2})
    running = bench.submit(spec(5, 50))
    bench.run(until=lambda: running.progress.phase is Phase.DECODE)
    waiting = [bench.submit(spec(5, 2)) for _ in range(2)]
    with pytest.raises(ServiceError) as caught:
        bench.submit(spec(5, 2))
    assert (caught.value.code, caught.value.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
    assert caught.value.retry_after and bench.scheduler.waiting == 2
    bench.run()
    assert all(isinstance(drain(r)[-1], Ended) for r in waiting)
    assert bench.scheduler.waiting == 0


def test_an_id_is_taken_while_its_call_runs() -> None:
    bench = Bench()
    bench.submit(spec(5, 3))
    bench.count = 0
    with pytest.raises(ServiceError) as caught:
        bench.submit(spec(5, 3))
    assert (caught.value.code, caught.value.reason) == ("ALREADY_EXISTS", "DUPLICATE_REQUEST_ID")
    bench.run()
    bench.count = 0
    bench.submit(spec(5, 3))
    bench.run()


def test_deadlines_in_every_state() -> None:
    bench = Bench(num_slots=1, step=1.0)
    with pytest.raises(ServiceError) as caught:
        bench.submit(spec(5, 5), deadline=bench.clock.now)
    assert caught.value.code == "DEADLINE_EXCEEDED"
    decoding = bench.submit(spec(5, 100), deadline=bench.clock.now + 20)
    queued = bench.submit(spec(5, 5), deadline=bench.clock.now + 10)
    bench.run()
    for request, after in ((decoding, 20), (queued, 10)):
        last = drain(request)[-1]
        assert isinstance(last, Failed) and last.error.code == "DEADLINE_EXCEEDED"
        assert after <= last.at - request.arrival <= after + 2
    prefilling = bench.submit(spec(4000, 5), deadline=bench.clock.now + 5)
    bench.run()
    assert isinstance(drain(prefilling)[-1], Failed)
    assert sum(p.chunk is not None for p in bench.executor.plans) < 15
    assert bench.executor.pages.free == bench.executor.limits.num_pages


@pytest.mark.parametrize("parked", [False, True])
def test_a_deadline_ends_a_lane_that_is_held_back(parked: bool) -> None:
    bench = Bench(num_slots=1, step=1.0)
    held = bench.submit(spec(5, 100), deadline=bench.clock.now + 20)
    bench.run(until=lambda: bench.scheduler.counters.output_tokens >= 3)
    bench.scheduler.pause(held, True)
    if parked:
        bench.scheduler.park(held)
    bench.run()
    last = drain(held)[-1]
    assert isinstance(last, Failed) and last.error.code == "DEADLINE_EXCEEDED"
    assert 20 <= last.at - held.arrival <= 22
    assert bench.scheduler.counters.preemptions == parked
    assert not bench.executor.lanes and not bench.executor.snapshots


def test_a_deadline_before_the_estimated_start_is_refused_at_once() -> None:
    bench = Bench(num_slots=1, step=1.0)
    bench.submit(spec(5, 20))
    bench.run()  # a lane takes about 20 s, now it is known
    bench.submit(spec(5, 20))
    bench.run(turns=5, until=lambda: bool(bench.executor.lanes))
    bench.submit(spec(5, 20))
    with pytest.raises(ServiceError) as caught:
        bench.submit(spec(5, 20), deadline=bench.clock.now + 15)
    assert caught.value.reason == "DEADLINE_NOT_MET"
    bench.submit(spec(5, 20), deadline=bench.clock.now + 100)


def test_a_request_waits_no_longer_than_the_queue_allows() -> None:
    bench = Bench(num_slots=1, step=1.0, settings={"queue_timeout": 10.0})
    running = bench.submit(spec(5, 40))
    queued = bench.submit(spec(5, 2), deadline=bench.clock.now + 1000)
    bench.run()
    assert len(ids(drain(running))) == 40  # a request that has its lane has all the time
    (last,) = drain(queued)
    assert isinstance(last, Failed)
    assert (last.error.code, last.error.reason) == ("DEADLINE_EXCEEDED", "QUEUE_TIMEOUT")
    assert 10 <= last.at - queued.arrival <= 12
    assert bench.scheduler.counters.cancelled == {"queue_timeout": 1}
    with pytest.raises(config.ConfigError, match="queue_timeout"):
        SchedulerConfig(queue_timeout=0.0)


def test_a_time_limit_is_a_finish_and_keeps_the_tokens() -> None:
    bench = Bench(num_slots=1, step=1.0)
    lane = spec(5, 100)
    running = bench.submit(lane, time_limit=10)
    queued = bench.submit(lane, time_limit=5)
    bench.run()
    events = drain(running)
    assert events[-1].finish is Finish.TIME_LIMIT
    assert ids(events) == alone(lane)[: len(ids(events))] and 8 <= len(ids(events)) <= 11
    events = drain(queued)
    assert isinstance(events[0], Started) and events[-1].finish is Finish.TIME_LIMIT
    assert bench.scheduler.waiting == 0


# ---- cancel, slow clients, pause ---------------------------------------------------------------


def test_cancel_frees_the_slot_within_one_chunk_of_a_long_prefill() -> None:
    bench = Bench(max_ctx=32768, chunk_tokens=2048, step=1.0)
    request = bench.submit(spec(20_000, 5))
    bench.run(until=lambda: len(bench.executor.plans) == 3)
    chunks = len(bench.executor.plans)
    bench.scheduler.cancel(request)
    bench.run()
    assert len(bench.executor.plans) == chunks and not bench.executor.lanes
    assert bench.scheduler.counters.cancelled == {"client": 1}
    assert not any(isinstance(e, (Failed, Ended)) for e in drain(request))


def test_cancel_that_comes_while_a_chunk_runs_costs_that_chunk_only() -> None:
    bench = Bench(max_ctx=32768, chunk_tokens=2048)
    request = bench.submit(spec(20_000, 5))

    def on_result() -> None:
        if len(bench.executor.plans) == 3:
            bench.scheduler.cancel(request)

    bench.executor.on_result = on_result
    bench.run()
    assert len(bench.executor.plans) == 3 and not bench.executor.lanes


@pytest.mark.parametrize("when", ["queued", "decode", "suspended", "parked", "before a turn"])
def test_cancel_in_every_state(when: str) -> None:
    bench = Bench(num_slots=1)
    if when == "queued":
        other = bench.submit(spec(5, 20))
    request = bench.submit(spec(5, 50))
    if when != "before a turn":
        bench.run(until=lambda: bench.scheduler.counters.output_tokens >= 3)
    if when == "suspended":
        bench.scheduler.pause(request, True)
        bench.run()
    if when == "parked":
        bench.scheduler.pause(request, True)
        bench.scheduler.park(request)
        bench.run()
        assert bench.scheduler.snapshot().lanes[0].state is SlotState.PARKED
    bench.scheduler.cancel(request)
    bench.scheduler.cancel(request)
    bench.run()
    assert bench.scheduler.active == 0 and not bench.executor.lanes
    assert not bench.executor.snapshots  # of a lane that will not come back
    assert bench.scheduler.counters.cancelled == {"client": 1}
    if when == "queued":
        assert isinstance(drain(other)[-1], Ended)


def test_a_client_that_does_not_read_is_suspended_then_dropped_and_hurts_nobody() -> None:
    bench = Bench(num_slots=2, settings={"slow_client_grace": 5.0})
    slow_lane, lane = spec(5, 1000, seed=1), spec(7, 800, seed=2)
    slow = bench.submit(slow_lane, stream=Stream(16, 1 << 20))
    good = bench.submit(lane)
    bench.run()
    assert ids(drain(good)) == alone(lane)
    assert bench.scheduler.counters.suspensions == 1
    events = drain(slow)
    assert isinstance(events[-1], Failed) and events[-1].error.reason == "SLOW_CLIENT"
    assert 16 <= len(events) <= 20
    got = ids(events)
    assert got == alone(slow_lane)[: len(got)]


def test_a_slow_reader_gets_the_same_bytes() -> None:
    bench = Bench(num_slots=2)
    lane = spec(5, 300)
    request = bench.submit(lane, stream=Stream(8, 1 << 20))
    got: list[int] = []
    rng = random.Random(1)
    for _ in range(20000):
        bench.scheduler.turn()
        bench.clock.now += 0.001
        if rng.random() < 0.2 and (event := request.stream.pop()) is not None:
            got += ids([event])
            if isinstance(event, Ended):
                break
    assert got == alone(lane) and bench.scheduler.counters.suspensions > 10


def test_bytes_count_against_the_stream_too() -> None:
    stream = Stream(1000, 400)
    for _ in range(10):
        assert not stream.full
        stream.put(Tokens(0.0, 0, ()))
    stream.put(Tokens(0.0, 0, ()))
    stream.put(Tokens(0.0, 0, ()))
    stream.put(Tokens(0.0, 0, ()))
    assert stream.full and not stream.below_half
    drained = []
    stream.on_drained = lambda: drained.append(stream.unread)
    while stream.pop():
        pass
    assert drained == [6]  # once, as soon as less than half is left


# ---- preemption --------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 100])
def test_running_out_of_pages_parks_the_youngest_and_changes_no_bytes(room: int) -> None:
    bench = Bench(num_slots=3, num_pages=7, max_ctx=896, snapshot_room=room)
    lanes = [spec(100 + n, 500, seed=n) for n in range(3)]
    requests = [bench.submit(lane) for lane in lanes]
    bench.run()
    assert bench.scheduler.counters.preemptions >= 1
    ends = []
    for request, lane in zip(requests, lanes, strict=True):
        events = drain(request)
        assert ids(events) == alone(lane)
        ends.append(events[-1].at)
    assert ends == sorted(ends)  # the oldest was never parked


def test_parked_lanes_come_back_before_newcomers() -> None:
    bench = Bench(num_slots=3, num_pages=6, max_ctx=768)
    old, young = bench.submit(spec(100, 500)), bench.submit(spec(100, 500))
    bench.run(until=lambda: bench.scheduler.counters.preemptions == 1)
    newcomer = bench.submit(spec(5, 5))
    bench.run()
    started = drain(newcomer)[0].at
    assert started >= drain(old)[-1].at
    assert isinstance(drain(young)[-1], Ended)


def test_parked_lanes_come_back_oldest_first() -> None:
    bench = Bench(num_slots=2)
    old, young = bench.submit(spec(5, 50)), bench.submit(spec(5, 50))
    bench.run(until=lambda: bench.scheduler.counters.output_tokens >= 12)  # both decode
    for request in (young, old):
        bench.scheduler.pause(request, True)
        bench.scheduler.park(request)
    others = bench.submit(spec(5, 15)), bench.submit(spec(5, 99))  # take the slots; one ends soon
    bench.run(until=lambda: all(x.progress.phase is Phase.DECODE for x in others))
    for request in (young, old):
        bench.scheduler.pause(request, False)
    bench.run()
    ends = [drain(request)[-1].at for request in (old, young)]
    assert ends[0] < ends[1] and bench.scheduler.counters.preemptions == 2


def test_a_lane_that_may_not_run_is_parked_before_one_that_may() -> None:
    bench = Bench(num_slots=2, num_pages=6, max_ctx=768)
    held, lane = bench.submit(spec(100, 500, seed=1)), spec(100, 600, seed=2)
    running = bench.submit(lane)
    bench.run(until=lambda: bench.scheduler.counters.output_tokens >= 12)
    bench.scheduler.pause(held, True)  # the older one
    bench.run(until=lambda: bench.scheduler.counters.preemptions == 1)
    assert bench.scheduler.snapshot().lanes[0].state is SlotState.PARKED
    bench.run()
    assert ids(drain(running)) == alone(lane) and bench.scheduler.counters.preemptions == 1
    bench.scheduler.pause(held, False)
    bench.run()
    assert ids(drain(held)) == alone(spec(100, 500, seed=1))


def test_a_parked_lane_does_not_wait_for_one_that_may_not_run() -> None:
    bench = Bench(num_slots=1)
    lanes = [spec(5, 50, seed=n) for n in range(2)]
    first, second = (bench.submit(lane) for lane in lanes)
    bench.run(until=lambda: bench.scheduler.counters.output_tokens >= 3)
    bench.scheduler.pause(first, True)
    bench.scheduler.park(first)
    bench.run(until=lambda: second.progress.phase is Phase.DECODE)
    bench.scheduler.pause(second, True)  # it has the slot
    bench.scheduler.pause(first, False)
    bench.run()
    assert ids(drain(first)) == alone(lanes[0])
    assert bench.scheduler.counters.preemptions == 2
    bench.scheduler.pause(second, False)
    bench.run()
    assert ids(drain(second)) == alone(lanes[1])


@pytest.mark.parametrize("room", [0, 100])
def test_pause_and_park_at_random_steps_change_no_bytes(room: int) -> None:
    rng = random.Random(room)
    bench = Bench(num_slots=3, snapshot_room=room, chunk_tokens=32)
    reasoning = ReasoningLimit(max_tokens=3, starts_open=True, open_id=998, close_id=999)
    lanes = [
        spec(rng.randint(1, 200), rng.randint(1, 60), seed=n, reasoning=reasoning)
        for n in range(8)
    ]  # fmt: skip
    requests = [bench.submit(lane) for lane in lanes]
    for _ in range(600):
        bench.scheduler.turn()
        bench.clock.now += 0.001
        request = rng.choice(requests)
        if rng.random() < 0.3:
            bench.scheduler.park(request)
        elif rng.random() < 0.2:
            bench.scheduler.pause(request, rng.random() < 0.2)
    for request in requests:
        bench.scheduler.pause(request, False)
    bench.run()
    assert bench.scheduler.counters.preemptions > 5
    for request, lane in zip(requests, lanes, strict=True):
        assert ids(drain(request)) == alone(lane)


def test_a_lane_computed_again_must_give_the_same_token() -> None:
    bench = Bench(num_slots=1, snapshot_room=0)
    request = bench.submit(spec(5, 50))
    bench.run(until=lambda: bench.scheduler.counters.output_tokens >= 5)
    bench.executor.script = lambda lane: [777] * 50  # another model, as it were
    bench.scheduler.park(request)
    bench.run()
    last = drain(request)[-1]
    assert isinstance(last, Failed) and "came out as 777" in last.error.message


# ---- faults ------------------------------------------------------------------------------------


def test_a_lane_with_nan_ends_alone_and_health_comes_back_after_the_self_test() -> None:
    bench = Bench()
    bench.scheduler.self_test()
    bad, lane = spec(5, 50, seed=13), spec(6, 50)
    bench.executor.nan_for = lambda s, position: s.sampling.seed == 13 and position == 20
    sick, well = bench.submit(bad), bench.submit(lane)
    bench.run()
    last = drain(sick)[-1]
    assert isinstance(last, Failed)
    assert (last.error.code, last.error.reason) == ("INTERNAL", "NON_FINITE_LOGITS")
    assert ids(drain(well)) == alone(lane)
    assert [ok for ok, _ in bench.health] == [False, True]
    assert bench.scheduler.counters.self_tests == 1 and bench.scheduler.healthy


def test_a_failed_self_test_refuses_new_requests_until_one_passes() -> None:
    bench = Bench(settings={"self_test_retry": 30.0})
    bench.scheduler.self_test()
    before = bench.clock.now
    bench.executor.nan_for = lambda s, position: True
    sick = bench.submit(spec(5, 5))
    queued = bench.submit(spec(6, 5))
    bench.run(until=lambda: bench.scheduler.counters.self_tests == 1 and not bench.executor.lanes)
    for request in (sick, queued):
        assert isinstance(drain(request)[-1], Failed)
    with pytest.raises(ServiceError) as caught:
        bench.submit(spec(5, 5))
    assert (caught.value.code, caught.value.reason) == ("UNAVAILABLE", "DEVICE_ERROR")
    bench.executor.nan_for = lambda s, position: False
    bench.run()
    assert bench.clock.now - before >= 30 and bench.scheduler.healthy
    bench.submit(spec(5, 5))


def test_nobody_is_let_in_while_the_self_test_runs() -> None:
    bench = Bench(num_slots=3)
    bench.scheduler.self_test()
    bench.executor.nan_for = lambda s, position: s.sampling.seed == 13
    sick = bench.submit(*[spec(5, 5, seed=13, candidate=c) for c in range(2)])
    running, queued = bench.submit(spec(5, 50)), bench.submit(spec(6, 5))
    phases = []

    def on_step(plan: StepPlan) -> None:
        if bench.scheduler._health.testing:
            phases.append(queued.progress.phase)

    bench.executor.on_step = on_step
    bench.run()
    assert phases and set(phases) == {Phase.QUEUED}  # although a slot was free
    assert isinstance(drain(sick)[-1], Failed)
    assert ids(drain(running)) == alone(spec(5, 50)) and ids(drain(queued)) == alone(spec(6, 5))


def test_the_self_test_notices_a_changed_answer() -> None:
    bench = Bench()
    bench.scheduler.self_test()
    bench.executor.nan_for = lambda s, position: s.max_output_tokens == 5
    bench.executor.script = lambda s: [3] if s.max_output_tokens == 1 else None
    bench.submit(spec(5, 5))
    bench.run(until=lambda: bench.scheduler.counters.self_tests == 1 and not bench.executor.lanes)
    assert not bench.scheduler.healthy


def test_a_failed_step_ends_every_live_lane_and_resets_the_cache() -> None:
    bench = Bench(num_slots=3)
    bench.scheduler.self_test()
    lanes = [spec(5, 50, seed=n) for n in range(5)]
    requests = [bench.submit(lane) for lane in lanes]
    parked = bench.submit(spec(9, 30, seed=9))
    armed = [True]

    def fail(plan):
        if armed[0] and len(plan.decode) == 3 and bench.executor.steps > 30:
            armed[0] = False
            return RuntimeError("device lost")
        return None

    bench.executor.fail_step = fail
    bench.run()
    for request in requests[:3]:
        last = drain(request)[-1]
        assert isinstance(last, Failed)
        assert (last.error.code, last.error.reason) == ("INTERNAL", "DEVICE_ERROR")
    for request, lane in zip(requests[3:], lanes[3:], strict=True):
        assert ids(drain(request)) == alone(lane)
    assert isinstance(drain(parked)[-1], Ended)
    assert bench.executor.resets == 1 and [ok for ok, _ in bench.health] == [False, True]


def test_parked_lanes_survive_a_failed_step() -> None:
    bench = Bench(num_slots=2)
    lane = spec(5, 40)
    request, other = bench.submit(lane), bench.submit(spec(6, 40))
    bench.run(until=lambda: bench.scheduler.counters.output_tokens >= 6)
    bench.scheduler.pause(request, True)
    bench.scheduler.park(request)
    bench.scheduler.turn()
    bench.executor.fail_step = lambda plan: RuntimeError("lost")
    bench.scheduler.turn()
    bench.scheduler.turn()
    bench.executor.fail_step = lambda plan: None
    bench.scheduler.pause(request, False)
    bench.run()
    assert isinstance(drain(other)[-1], Failed)
    assert ids(drain(request)) == alone(lane)


def test_a_reset_that_fails_is_tried_again() -> None:
    bench = Bench(settings={"self_test_retry": 1.0})
    bench.executor.fail_step = lambda plan: RuntimeError("lost")
    bench.executor.fail_reset = RuntimeError("still lost")
    bench.submit(spec(5, 5))
    bench.run(until=lambda: bench.scheduler.counters.self_tests == 3)
    assert not bench.scheduler.healthy and bench.executor.resets == 0
    bench.executor.fail_step = lambda plan: None
    bench.executor.fail_reset = None
    bench.run()
    assert bench.scheduler.healthy and bench.executor.resets == 1


def test_an_overdue_step_ends_its_lanes_only() -> None:
    bench = Bench(num_slots=2, settings={"watchdog": 60.0})
    lane = spec(6, 30)
    victim = bench.submit(spec(5, 30))
    bench.run(until=lambda: bench.scheduler.counters.output_tokens >= 3)
    well = bench.submit(lane)
    bench.step = 61.0
    bench.scheduler.turn()
    bench.step = 0.01
    bench.run()
    last = drain(victim)[-1]
    assert isinstance(last, Failed) and last.error.reason == "DEVICE_ERROR"
    assert ids(drain(well)) == alone(lane)
    assert [ok for ok, _ in bench.health] == [False, True]


def test_a_hanging_dispatch_is_reported_too() -> None:
    bench = Bench(settings={"watchdog": 60.0})
    request = bench.submit(spec(5, 30))

    def hang(plan) -> None:
        assert not bench.scheduler.fail_hung_step()
        bench.clock.now += 61
        assert bench.scheduler.fail_hung_step()
        bench.executor.on_step = lambda plan: None

    bench.executor.on_step = hang
    bench.run()
    assert isinstance(drain(request)[-1], Failed)
    assert bench.scheduler.healthy and bench.scheduler.counters.watchdog == 1


def test_a_hanging_step_is_reported_without_waiting_for_it() -> None:
    bench = Bench(settings={"watchdog": 60.0})
    request = bench.submit(spec(5, 30))
    bench.run(until=lambda: bench.scheduler.counters.output_tokens >= 3)
    seen = []

    def hang() -> None:  # runs inside the wait for a result
        assert not bench.scheduler.fail_hung_step()
        bench.clock.now += 61
        thread = threading.Thread(target=lambda: seen.append(bench.scheduler.fail_hung_step()))
        thread.start()
        thread.join()
        assert request.stream.failure is not None and not bench.scheduler.healthy
        bench.executor.on_result = bench._pass

    bench.executor.on_result = hang
    bench.run()
    assert seen == [True] and isinstance(drain(request)[-1], Failed)
    assert bench.scheduler.healthy and not bench.executor.lanes


def test_a_self_test_that_hangs_is_judged_when_it_returns() -> None:
    bench = Bench(settings={"watchdog": 60.0, "self_test_retry": 5.0})
    bench.executor.nan_for = lambda s, position: s.sampling.seed == 13
    sick = bench.submit(spec(5, 5, seed=13))
    queued = bench.submit(spec(6, 5))
    bench.run(until=lambda: bench.scheduler.counters.non_finite == 1)
    calls: list[bool] = []

    def hang() -> None:
        if not bench.scheduler._in_flight[0].lanes[0].test:
            bench._pass()
            return
        bench.clock.now += 61
        assert bench.scheduler.fail_hung_step() and bench.scheduler._health.testing
        calls.append(queued.stream.failure is None)
        bench.executor.on_result = bench._pass

    bench.executor.on_result = hang
    bench.run()
    assert calls == [True] and bench.scheduler.counters.self_tests == 2
    assert bench.scheduler.healthy and isinstance(drain(sick)[-1], Failed)
    last = drain(queued)[-1]  # refused by the test that failed, or served after the one that passed
    assert isinstance(last, Ended) or last.error.code == "UNAVAILABLE"


def test_a_refused_plan_fails_its_lanes_and_nothing_else() -> None:
    bench = Bench(num_slots=2)
    request = bench.submit(spec(5, 30))
    bench.run(until=lambda: bench.scheduler.counters.output_tokens >= 3)
    original = bench.executor.step

    def refuse(plan):
        bench.executor.step = original
        raise PlanError("no such thing")

    bench.executor.step = refuse
    bench.run()
    assert isinstance(drain(request)[-1], Failed)
    assert bench.executor.resets == 0 and not bench.executor.lanes


def test_an_executor_that_fails_between_steps_is_a_device_failure() -> None:
    bench = Bench(settings={"check_invariants": False})
    admit = bench.executor.admit

    def broken(lane):
        bench.executor.admit = admit
        raise RuntimeError("copy failed")

    bench.executor.admit = broken
    request = bench.submit(spec(5, 5))
    bench.run()
    assert bench.executor.resets == 1 and isinstance(drain(request)[-1], Ended)


# ---- drain -------------------------------------------------------------------------------------


def test_drain_lets_live_lanes_finish_and_refuses_the_rest() -> None:
    bench = Bench(num_slots=1)
    live, queued = bench.submit(spec(5, 20)), bench.submit(spec(5, 20))
    bench.run(until=lambda: live.progress.phase is Phase.DECODE)
    bench.scheduler.drain()
    with pytest.raises(ServiceError) as caught:
        bench.submit(spec(5, 5))
    assert (caught.value.code, caught.value.reason) == ("UNAVAILABLE", "DRAINING")
    bench.run()
    assert isinstance(drain(live)[-1], Ended)
    assert drain(queued)[-1].error.reason == "DRAINING"
    assert bench.scheduler.active == 0 and bench.scheduler.waiting == 0


def test_shutting_down_ends_live_lanes_with_a_status() -> None:
    from ds4jax import refusals

    bench = Bench(num_slots=1)
    requests = [bench.submit(spec(5, 2000)) for _ in range(3)]
    bench.run(until=lambda: bench.scheduler.counters.output_tokens > 3)
    bench.scheduler.shut_down(refusals.shutting_down)
    bench.run()
    reasons = [drain(r)[-1].error.reason for r in requests]
    assert reasons == ["SHUTTING_DOWN"] * 3 and bench.scheduler.active == 0


# ---- the randomised run ------------------------------------------------------------------------


class Client:
    """A reader with a temper: prompt, slow, deaf, or one that leaves."""

    def __init__(self, rng: random.Random, request: Request, lane: LaneSpec) -> None:
        self.request, self.lane = request, lane
        self.kind = rng.choices(["good", "slow", "deaf", "leaves"], [70, 12, 3, 15])[0]
        self.rng = rng
        self.leave_after = rng.randint(0, 40)
        self.events: list = []
        self.cancelled = False
        self.turns = 0
        self.ends = 0

    def act(self, scheduler: Scheduler) -> None:
        self.turns += 1
        if self.kind == "leaves" and not self.cancelled and self.turns > self.leave_after:
            self.cancelled = True
            scheduler.cancel(self.request)
        chance = {"good": 1.0, "slow": 0.3, "deaf": 0.0, "leaves": 1.0}[self.kind]
        while self.rng.random() < chance and (event := self.request.stream.pop()) is not None:
            self.events.append(event)
            self.ends += isinstance(event, Ended)
            if self.kind == "slow":
                break

    @property
    def over(self) -> bool:
        if self.cancelled or self.ends == len(self.request.lanes):
            return True
        return bool(self.events) and isinstance(self.events[-1], Failed)


def random_lane(rng: random.Random, n: int) -> LaneSpec:
    prompt = rng.choice([1, 3, 127, 128, 129, 300, rng.randint(1, 900)])
    out = rng.choice([0, 1, 5, 20, 60, rng.randint(1, 300)])
    return spec(prompt, min(out, 1024 - prompt), seed=n, min_output_tokens=0)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_thousand_random_requests(seed: int) -> None:
    """500 requests each; invariants are checked after every turn (`check_invariants`)."""
    rng = random.Random(seed)
    bench = Bench(
        step=0.01, num_slots=6, max_ctx=1024, num_pages=26, chunk_tokens=128,
        snapshot_room=2, settings={"max_waiting": 40, "slow_client_grace": 1.0, "coalesce": 0.02},
    )  # fmt: skip
    bench.executor.keep_plans = False
    clients: list[Client] = []
    refused = Counter()
    made = 0
    live: list[Client] = []
    while made < 500 or live:
        if made < 500 and rng.random() < 0.05:
            made += 1
            lane = random_lane(rng, made)
            lanes = [replace(lane, candidate=c) for c in range(rng.choice([1, 1, 1, 2, 3]))]
            limits = rng.choice([{}, {}, {}, {"deadline": bench.clock.now + rng.random() * 5},
                                 {"time_limit": rng.random() * 5 + 0.01}])  # fmt: skip
            try:
                request = bench.submit(*lanes, stream=Stream(32, 1 << 14), **limits)
                clients.append(Client(rng, request, lane))
                live.append(clients[-1])
            except ServiceError as error:
                refused[error.reason] += 1
        if rng.random() < 0.01 and live:
            bench.scheduler.park(rng.choice(live).request)
        bench.scheduler.turn()
        bench.clock.now += 0.001
        live = [c for c in live if not c.over]
        for client in live:
            client.act(bench.scheduler)
            if client.kind == "deaf" and not bench.scheduler.is_active(client.request):
                client.kind = "good"  # it is over: look at what came
    bench.run()
    check_ends(clients)
    counts = bench.executor.page_counts()
    assert counts.free == counts.total and not bench.executor.lanes
    scheduler = bench.scheduler
    assert scheduler.active == scheduler.waiting == 0 and not scheduler._open
    assert not scheduler._waiting and not scheduler._parked and not scheduler._in_flight
    assert scheduler.counters.preemptions > 5 and scheduler.counters.suspensions > 5
    assert set(refused) <= {"QUEUE_FULL", "DEADLINE_NOT_MET"}
    assert len(clients) > 300


def check_ends(clients: list[Client]) -> None:
    kinds = Counter()
    starts = [c.events[0].at for c in clients if any(isinstance(e, Tokens) for e in c.events)]
    assert starts == sorted(starts)  # strict order of arrival: nobody starves
    reference = FakeExecutor(num_slots=1, max_ctx=1024)
    for client in clients:
        failed = [e for e in client.events if isinstance(e, Failed)]
        for candidate in range(len(client.request.lanes)):
            lane = replace(client.lane, candidate=candidate)
            got = ids(client.events, candidate)
            full = [t.token for t in generate(reference, lane)] if lane.max_output_tokens else []
            assert got == full[: len(got)]  # whatever happened, never a wrong token
            ended = [e for e in client.events if isinstance(e, Ended) and e.candidate == candidate]
            assert len(ended) <= 1
            if ended and ended[0].finish is Finish.LENGTH:
                assert len(got) == lane.max_output_tokens
            kinds[ended[0].finish if ended else None] += 1
        if failed:
            assert failed == client.events[-1:]
            assert failed[0].error.reason in {"DEADLINE_EXCEEDED", "SLOW_CLIENT"}
            if failed[0].error.reason == "SLOW_CLIENT":
                assert client.kind != "leaves"
            kinds[failed[0].error.reason] += 1
    assert kinds[Finish.LENGTH] > 150 and kinds["SLOW_CLIENT"] and kinds["DEADLINE_EXCEEDED"]
    assert kinds[Finish.TIME_LIMIT]


def test_sixty_four_slots() -> None:
    settings = {"max_waiting": 200, "decode_steps_per_chunk": 1}
    bench = Bench(num_slots=64, max_ctx=512, settings=settings)
    lanes = [spec(3 + n % 40, 100, seed=n) for n in range(70)]
    requests = [bench.submit(lane) for lane in lanes]
    bench.run()
    assert max(len(p.decode) for p in bench.executor.plans) == 64
    for request, lane in zip(requests, lanes, strict=True):
        assert ids(drain(request)) == alone(lane, max_ctx=512)


def test_physical_pages_do_not_matter() -> None:
    order = list(range(48))
    random.Random(5).shuffle(order)
    outputs = []
    for page_order in (None, order):
        bench = Bench(num_slots=6, max_ctx=1024, page_order=page_order)
        requests = [bench.submit(spec(200, 100, seed=n)) for n in range(6)]
        bench.run()
        outputs.append([ids(drain(r)) for r in requests])
    assert outputs[0] == outputs[1]


def test_the_fake_notices_a_chunk_left_out() -> None:
    """The instrument itself: a scheduler that skipped a chunk could not go unseen."""
    executor = FakeExecutor(chunk_tokens=16)
    lane = spec(40, 3)
    whole = generate(executor, lane)
    other = spec(40, 3)
    other.prompt[20] += 1
    assert generate(executor, other) != whole
    assert isinstance(executor.limits, ExecutorLimits)


def test_the_snapshot_shows_lanes_pages_and_queue() -> None:
    bench = Bench(num_slots=2)
    requests = [bench.submit(spec(200, 50)) for _ in range(3)]
    bench.run(until=lambda: bench.scheduler.counters.output_tokens > 3)
    view = bench.scheduler.snapshot()
    assert [x.request_id for x in view.lanes] == [r.id for r in requests]
    assert view.lanes[2].state is SlotState.WAITING and view.waiting == 1
    assert view.pages.owned > 0 and view.healthy and not view.draining
    assert bench.scheduler.latest() is not None


def test_step_records_and_counters_add_up() -> None:
    records = []
    bench = Bench()
    bench.scheduler._observer = records.append
    for n in range(3):
        bench.submit(spec(150, 10, seed=n))
    bench.run()
    c = bench.scheduler.counters
    assert c.steps == len(records) == c.prefill_steps + c.decode_steps
    assert c.prefill_tokens == 450 and c.output_tokens == 30
    assert c.rows_real == sum(r.rows for r in records)
    assert c.prefill_seconds + c.decode_seconds == pytest.approx(sum(r.seconds for r in records))


def test_the_turn_itself_is_cheap() -> None:
    """Host time per step outside the executor stays far below a millisecond at six lanes."""
    executor = FakeExecutor()
    scheduler = Scheduler(executor, SchedulerConfig(coalesce=0.0), clock=time.thread_time)
    for n in range(6):
        request = Request(id=str(n), lanes=(spec(5, 300, seed=n),), stream=Stream(10**6, 10**9))
        scheduler.submit(request)
    while scheduler.turn() is not None:
        pass
    c = scheduler.counters
    assert c.decode_steps >= 299
    assert c.host_seconds / c.steps < 0.001
