"""An executor without a model: its "language model" is a hash of everything a token may depend on.

The hash runs over the tokens that were really fed, at the positions they were fed at, so a chunk
left out, fed twice or fed to the wrong slot changes every later token. Pages come from the real
allocator. Faults and delays can be injected. Used by scheduler, server and client tests.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ds4jax import plan as plan_lib
from ds4jax.pages import PageAllocator
from ds4jax.plan import (
    Chunk,
    LaneRef,
    LaneResult,
    LaneSpec,
    PageCounts,
    PlanError,
    PlanLimits,
    StepPlan,
    StepResult,
    TokenResult,
)

MASK = (1 << 61) - 1


def mix(state: int, *values: int) -> int:
    """One step of a multiplicative hash over 61 bits."""
    for value in values:
        state = ((state ^ (value + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & MASK
        state ^= state >> 29
    return state


@dataclass(eq=False)
class _Lane:
    spec: LaneSpec
    hash: int = 1
    length: int = 0
    output: list[int] = field(default_factory=list)
    decoding: bool = False
    suspended: bool = False


class FakeHandle:
    """A step whose result is known at dispatch and handed out when asked for."""

    def __init__(self, executor: FakeExecutor, result: StepResult, error: Exception | None) -> None:
        self._executor = executor
        self._result = result
        self._error = error
        self._ready = max(executor.clock(), executor.busy_until) + executor.step_seconds
        executor.busy_until = self._ready
        self._read = False

    def done(self) -> bool:
        return self._executor.clock() >= self._ready

    def result(self) -> StepResult:
        if self._read:
            raise PlanError("a result was read twice")
        self._read = True
        self._executor.in_flight.remove(self)
        self._executor.on_result()
        left = self._ready - self._executor.clock()
        if left > 0:
            time.sleep(left)
        if self._error is not None:
            raise self._error
        return self._result

    def names(self, slot: int) -> bool:
        return any(x.lane.slot == slot for x in self._result.lanes)


class FakeExecutor:
    """See the module. `script(spec)` gives the output ids of a lane, if it is to be fixed."""

    def __init__(
        self,
        *,
        num_slots: int = 6,
        max_ctx: int = 4096,
        num_pages: int | None = None,
        chunk_tokens: int = 128,
        vocab_size: int = 1000,
        draw_below: int | None = None,
        snapshot_room: int = 1 << 30,
        step_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        script: Callable[[LaneSpec], Sequence[int] | None] = lambda spec: None,
        page_order: Sequence[int] | None = None,
    ) -> None:
        per_slot = -(-max_ctx // 128)
        self.limits = plan_lib.ExecutorLimits(
            num_slots=num_slots, max_ctx=max_ctx, chunk_tokens=chunk_tokens, vocab_size=vocab_size,
            num_pages=num_slots * per_slot if num_pages is None else num_pages,
        )  # fmt: skip
        self.pages = PageAllocator(self.limits.num_pages, num_slots, per_slot, page_order)
        self.draw_below = draw_below or vocab_size  # ids that it says unless told what to say
        self.step_seconds = step_seconds
        self.busy_until = 0.0
        self.clock = clock
        self.script = script
        self.snapshot_room = snapshot_room
        self.snapshots: weakref.WeakSet[_Lane] = weakref.WeakSet()
        self.generations = [0] * num_slots
        self.lanes: dict[int, _Lane] = {}
        self.in_flight: list[FakeHandle] = []
        self.plans: list[StepPlan] = []
        self.keep_plans = False
        self.burst = 1  # tokens per decode row, as if drafts were accepted
        self.steps = 0
        self.resets = 0
        self.on_step: Callable[[StepPlan], None] = lambda plan: None
        self.on_result: Callable[[], None] = lambda: None
        self.nan_for: Callable[[LaneSpec, int], bool] = lambda spec, position: False
        self.fail_step: Callable[[StepPlan], Exception | None] = lambda plan: None
        self.fail_reset: Exception | None = None
        self.can_fork = True
        self.forks = 0

    # ---- lanes ---------------------------------------------------------------------------------

    def _lane(self, ref: LaneRef) -> _Lane:
        lane = self.lanes.get(ref.slot)
        if lane is None or self.generations[ref.slot] != ref.generation:
            raise PlanError(f"{ref} is not a live lane")
        return lane

    def _at_rest(self, ref: LaneRef) -> _Lane:
        lane = self._lane(ref)
        if any(h.names(ref.slot) for h in self.in_flight):
            raise PlanError(f"a step in flight names {ref}")
        return lane

    def admit(self, spec: LaneSpec) -> LaneRef | None:
        if spec.max_rows > self.limits.max_ctx or not self.pages.fits_ever(spec.max_rows):
            raise PlanError(f"{spec.max_rows} rows can never fit")
        free = [s for s in range(self.limits.num_slots) if s not in self.lanes]
        if not free or not self.pages.open(free[0], len(spec.known_tokens), spec.max_rows):
            return None
        self.lanes[free[0]] = _Lane(spec, output=[int(t) for t in spec.replay[:-1]])
        return LaneRef(free[0], self.generations[free[0]])

    def suspend(self, lane: LaneRef) -> None:
        self._lane(lane).suspended = True
        self.pages.suspend(lane.slot, True)

    def resume(self, lane: LaneRef) -> None:
        self._lane(lane).suspended = False
        self.pages.suspend(lane.slot, False)

    def park(self, lane: LaneRef) -> Any | None:
        state = self._at_rest(lane)
        if not state.decoding:
            raise PlanError(f"{lane} does not decode")
        self.retire(lane)
        if len(self.snapshots) >= self.snapshot_room:
            return None
        self.snapshots.add(state)
        return state

    def fork(self, source: LaneRef, targets: Sequence[LaneRef], length: int) -> bool:
        given = self._lane(source)
        known = given.spec.known_tokens
        plan_lib.check_fork(length, self.limits.chunk_tokens, len(known))
        for ref in targets:
            lane = self._lane(ref)
            same = np.array_equal(lane.spec.known_tokens, known)
            if given.decoding or given.length != length or lane.length or not same:
                raise PlanError(f"{ref} cannot go on from {source} at position {length}")
        if not self.can_fork:
            return False
        for ref in targets:
            lane = self._lane(ref)
            lane.hash, lane.length = given.hash, length
            self.pages.advance(ref.slot, length, decoding=False)
            self.forks += 1
        return True

    def restore(self, spec: LaneSpec, snapshot: Any) -> LaneRef | None:
        free = [s for s in range(self.limits.num_slots) if s not in self.lanes]
        assert isinstance(snapshot, _Lane) and snapshot.spec is spec
        if not free or not self.pages.open(
            free[0], snapshot.length, spec.max_rows, length=snapshot.length, decoding=True
        ):
            return None
        snapshot.suspended = False
        self.snapshots.discard(snapshot)
        self.lanes[free[0]] = snapshot
        return LaneRef(free[0], self.generations[free[0]])

    def retire(self, lane: LaneRef) -> None:
        self._at_rest(lane)
        del self.lanes[lane.slot]
        self.pages.close(lane.slot)
        self.generations[lane.slot] += 1

    def reset(self) -> None:
        if self.fail_reset is not None:
            raise self.fail_reset
        self.resets += 1
        self.in_flight.clear()
        self.lanes.clear()
        self.pages.reset()
        self.generations = [g + 1 for g in self.generations]

    # ---- steps ---------------------------------------------------------------------------------

    def plan_limits(self, decode: Sequence[LaneRef]) -> PlanLimits:
        for ref in decode:
            self._lane(ref)
        return PlanLimits(lacking=self.pages.top_up([ref.slot for ref in decode]))

    def step(self, plan: StepPlan) -> FakeHandle:
        plan_lib.validate_plan(plan, self.limits)
        for ref in plan.lanes:
            if self._lane(ref).suspended:
                raise PlanError(f"{ref} is suspended")
        for row in plan.decode:
            lane = self._lane(row.lane)
            full = lane.length >= lane.spec.max_rows
            if not lane.decoding or (full and self.burst == 1):
                raise PlanError(f"{row.lane} cannot decode at {lane.length}")
            if not full and len(self.pages.owned(row.lane.slot)) * 128 <= lane.length:
                raise PlanError(f"{row.lane} has no page for position {lane.length}")
        if plan.chunk is not None:
            self._check_chunk(plan.chunk)
        error = self.fail_step(plan)
        self.on_step(plan)
        self.steps += 1
        if self.keep_plans:
            self.plans.append(plan)
        results = [self._decode(row.lane) for row in plan.decode]
        rows = len(results)
        if plan.chunk is not None:
            results.append(self._prefill(plan.chunk))
            rows = plan.chunk.stop - plan.chunk.start
        bucket = -(-rows // 8) * 8
        handle = FakeHandle(
            self, StepResult(lanes=tuple(results), rows=rows, bucket=bucket), error
        )  # fmt: skip
        self.in_flight.append(handle)
        return handle

    def _check_chunk(self, chunk: Chunk) -> None:
        lane = self._lane(chunk.lane)
        known = len(lane.spec.known_tokens)
        if lane.decoding or chunk.start != lane.length or chunk.last != (chunk.stop == known):
            raise PlanError(f"{chunk} does not continue a lane at {lane.length} of {known}")

    def _prefill(self, chunk: Chunk) -> LaneResult:
        lane = self._lane(chunk.lane)
        for token in lane.spec.known_tokens[chunk.start : chunk.stop]:
            lane.hash = mix(lane.hash, lane.length, int(token))
            lane.length += 1
        lane.decoding = chunk.last
        self.pages.advance(chunk.lane.slot, lane.length, decoding=chunk.last)
        return self._result(chunk.lane, lane, sample=chunk.last)

    def _decode(self, ref: LaneRef) -> LaneResult:
        lane = self._lane(ref)
        out = LaneResult(lane=ref, verified=self.burst - 1)
        room = min(lane.spec.max_rows, 128 * len(self.pages.owned(ref.slot))) - lane.length
        for _ in range(min(self.burst, room)):
            lane.hash = mix(lane.hash, lane.length, lane.output[-1])
            lane.length += 1
            self.pages.advance(ref.slot, lane.length, decoding=True)
            one = self._result(ref, lane, sample=True)
            out = replace(out, tokens=out.tokens + one.tokens, finite=out.finite and one.finite)
        return replace(out, accepted=max(0, len(out.tokens) - 1))

    def _result(self, ref: LaneRef, lane: _Lane, sample: bool) -> LaneResult:
        if self.nan_for(lane.spec, lane.length):
            if sample:
                lane.output.append(0)
            return LaneResult(lane=ref, finite=False)
        if not sample:
            return LaneResult(lane=ref)
        result = self._sample(lane)
        lane.output.append(result.token)
        return LaneResult(lane=ref, tokens=(result,))

    def _sample(self, lane: _Lane) -> TokenResult:
        spec, count, vocab = lane.spec, len(lane.output), self.draw_below
        banned = spec.stop_ids if count < spec.min_output_tokens else ()
        forced = plan_lib.forced_token(spec.reasoning, lane.output)
        script = self.script(spec)
        key = lane.hash
        if spec.sampling.temperature > 0:
            seed = int(spec.sampling.seed or 0)
            key = mix(key, seed & 0xFFFFFFFF, seed >> 32, spec.candidate, lane.length)
        if forced is not None:
            token = forced
        elif script is not None:
            token = script[count] if count < len(script) else spec.stop_ids[0]
        else:
            token = next(
                t % vocab for t in range(key % vocab, 3 * vocab) if t % vocab not in banned
            )
        wanted = spec.sampling.top_logprobs
        if wanted is None:
            return TokenResult(token)
        top = tuple(((token + i) % vocab, -0.25 - i - (key % 1000) / 1e4) for i in range(wanted))
        return TokenResult(token, -0.25 - (key % 1000) / 1e4, top)

    # ---- views ---------------------------------------------------------------------------------

    def page_counts(self) -> PageCounts:
        self.pages.check()
        return PageCounts(
            total=self.limits.num_pages, free=self.pages.free,
            owned=sum(len(self.pages.owned(s)) for s in range(self.limits.num_slots)),
        )  # fmt: skip

    def counters(self) -> Mapping[str, float]:
        return {
            "compiles": 3, "compile_seconds": 0.5, "compiles_after_ready": 0,
            "host_syncs": self.steps,
        }  # fmt: skip

    def memory_plan(self) -> Mapping[str, int]:
        return {"raw": 4096}

    def close(self) -> None:
        self.lanes.clear()


def spec(
    prompt: int | Sequence[int] = 5, out: int = 8, *, seed: int = 0, **kwargs: Any
) -> LaneSpec:
    """A lane of a prompt (its length, or its ids) with a budget; keywords as in LaneSpec."""
    from ds4jax.config import SamplingParams

    sampling = kwargs.pop("sampling", None) or SamplingParams(seed=seed)
    ids = np.arange(prompt) % 50 if isinstance(prompt, int) else np.array(prompt)
    return LaneSpec(
        prompt=ids.astype(np.int32), sampling=sampling, max_output_tokens=out, **kwargs
    )  # fmt: skip
