"""What every executor must do, whatever is behind it. Subclass and give it an executor to test.

Not a test module itself: `ExecutorContract` is inherited by the tests of the fake executor and of
the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from ds4jax.config import SamplingParams
from ds4jax.plan import (
    Chunk,
    DecodeRow,
    Executor,
    LaneRef,
    LaneResult,
    LaneSpec,
    PlanError,
    ReasoningLimit,
    StepPlan,
    TokenResult,
    forced_token,
)


def prefill(executor: Executor, ref: LaneRef, spec: LaneSpec) -> LaneResult:
    """Run all chunks of a lane; returns the last one's result."""
    known, grid = len(spec.known_tokens), executor.limits.chunk_tokens
    for start in range(0, known, grid):
        stop = min(start + grid, known)
        plan = StepPlan(chunk=Chunk(ref, start, stop, stop == known))
        result = executor.step(plan).result()
        assert len(result.lanes) == 1 and result.lanes[0].lane == ref
        assert len(result.lanes[0].tokens) == (1 if stop == known else 0)
        assert result.rows == stop - start and result.bucket >= result.rows
    return result.lanes[0]


def decode(executor: Executor, refs: Sequence[LaneRef]) -> list[TokenResult]:
    """One decode step of these lanes."""
    assert executor.plan_limits(refs).lacking == 0
    result = executor.step(StepPlan(decode=tuple(DecodeRow(r) for r in refs))).result()
    assert [x.lane for x in result.lanes] == list(refs)
    assert all(x.finite and len(x.tokens) == 1 for x in result.lanes)
    return [x.tokens[0] for x in result.lanes]


def generate(executor: Executor, spec: LaneSpec) -> list[TokenResult]:
    """All tokens of a lane, alone, reading every step before the next."""
    ref = executor.admit(spec)
    assert ref is not None
    out = list(prefill(executor, ref, spec).tokens)
    while len(out) < spec.max_output_tokens:
        out += decode(executor, [ref])
    executor.retire(ref)
    return out


class ExecutorContract:
    """Needs a fixture `executor`: all free, 3 slots or more, a vocabulary of 16 ids or more."""

    def spec(self, n: int = 5, out: int = 6, *, seed: int = 1, **kwargs: object) -> LaneSpec:
        """A lane with a prompt of n ids below 16."""
        prompt = ((np.arange(n) * 7 + n) % 16).astype(np.int32)
        sampling = kwargs.pop("sampling", None) or SamplingParams(seed=seed)
        return LaneSpec(prompt=prompt, sampling=sampling, max_output_tokens=out, **kwargs)  # type: ignore[arg-type]

    @pytest.fixture(autouse=True)
    def _left_clean(self, executor: Executor) -> object:
        yield
        counts = executor.page_counts()
        assert counts.free == counts.total and counts.owned == 0

    def test_slots_run_out_and_come_back_with_a_new_generation(self, executor: Executor) -> None:
        refs = [executor.admit(self.spec(3, 2)) for _ in range(executor.limits.num_slots)]
        assert len({r.slot for r in refs if r}) == executor.limits.num_slots
        assert executor.admit(self.spec()) is None
        executor.retire(refs[0])  # type: ignore[arg-type]
        again = executor.admit(self.spec(3, 2))
        assert again is not None and again.slot == refs[0].slot  # type: ignore[union-attr]
        assert again.generation == refs[0].generation + 1  # type: ignore[union-attr]
        for ref in [again, *refs[1:]]:
            executor.retire(ref)  # type: ignore[arg-type]

    def test_a_stale_reference_is_refused_everywhere(self, executor: Executor) -> None:
        ref = executor.admit(self.spec())
        assert ref is not None
        executor.retire(ref)
        for call in (executor.retire, executor.suspend, executor.resume, executor.park):
            with pytest.raises(PlanError):
                call(ref)
        with pytest.raises(PlanError):
            executor.plan_limits([ref])
        with pytest.raises(PlanError):
            executor.step(StepPlan(chunk=Chunk(ref, 0, 5, True)))

    def test_a_refused_plan_changes_nothing(self, executor: Executor) -> None:
        spec = self.spec(5, 4)
        expected = generate(executor, spec)
        ref = executor.admit(spec)
        assert ref is not None
        row, chunk = DecodeRow(ref), Chunk(ref, 0, 5, True)
        grid = executor.limits.chunk_tokens
        for bad in (
            StepPlan(),
            StepPlan(decode=(row,), chunk=chunk),
            StepPlan(decode=(row,)),  # not prefilled yet
            StepPlan(decode=(row, row)),
            StepPlan(chunk=Chunk(ref, grid, grid + 1, True)),
            StepPlan(chunk=Chunk(ref, 0, 4, False)),
            StepPlan(chunk=Chunk(ref, 0, 4, True)),
            StepPlan(chunk=chunk, drafts=1),
        ):
            with pytest.raises(PlanError):
                executor.step(bad)
        out = list(prefill(executor, ref, spec).tokens)
        with pytest.raises(PlanError):
            executor.step(StepPlan(chunk=chunk))  # again
        executor.suspend(ref)
        with pytest.raises(PlanError):
            executor.step(StepPlan(decode=(row,)))
        executor.resume(ref)
        while len(out) < 4:
            out += decode(executor, [ref])
        with pytest.raises(PlanError):
            executor.step(StepPlan(decode=(row,)))  # over its budget
        executor.retire(ref)
        assert out == expected

    def test_a_lane_that_can_never_fit_is_an_error(self, executor: Executor) -> None:
        with pytest.raises(PlanError):
            executor.admit(self.spec(executor.limits.max_ctx, 2))

    def test_tokens_do_not_depend_on_reading_late(self, executor: Executor) -> None:
        spec = self.spec(7, 5)
        expected = generate(executor, spec)
        ref = executor.admit(spec)
        assert ref is not None
        handles = [executor.step(StepPlan(chunk=Chunk(ref, 0, 7, True)))]
        out: list[TokenResult] = []
        for _ in range(4):
            assert executor.plan_limits([ref]).lacking == 0
            handles.append(executor.step(StepPlan(decode=(DecodeRow(ref),))))
            out += handles.pop(0).result().lanes[0].tokens
        with pytest.raises(PlanError):
            executor.retire(ref)  # a step that names it is in flight
        out += handles[0].result().lanes[0].tokens
        assert handles[0].done()
        executor.retire(ref)
        assert out == expected

    def test_tokens_do_not_depend_on_neighbours_or_slots(self, executor: Executor) -> None:
        specs = [self.spec(n, 5, seed=n) for n in (3, 9, executor.limits.chunk_tokens + 2)]
        expected = [generate(executor, s) for s in specs]
        refs = [executor.admit(s) for s in reversed(specs)][::-1]
        out = [list(prefill(executor, r, s).tokens) for r, s in zip(refs, specs, strict=True)]  # type: ignore[arg-type]
        while len(out[0]) < 5:
            for tokens, token in zip(out, decode(executor, refs), strict=True):  # type: ignore[arg-type]
                tokens.append(token)
        for ref in refs:
            executor.retire(ref)  # type: ignore[arg-type]
        assert out == expected

    def test_park_and_restore_change_nothing(self, executor: Executor) -> None:
        spec = self.spec(6, 6)
        other = self.spec(4, 2)
        expected = generate(executor, spec)
        ref = executor.admit(spec)
        assert ref is not None
        out = list(prefill(executor, ref, spec).tokens) + decode(executor, [ref])
        free = executor.page_counts().free
        snapshot = executor.park(ref)
        assert executor.page_counts().free > free
        assert generate(executor, other)  # somebody else uses slot and pages meanwhile
        if snapshot is None:
            spec2 = replace(spec, replay=np.array([t.token for t in out], np.int32))
            back = executor.admit(spec2)
            assert back is not None
            assert prefill(executor, back, spec2).tokens[0] == out[-1]
        else:
            back = executor.restore(spec, snapshot)
        assert back is not None
        while len(out) < 6:
            out += decode(executor, [back])
        executor.retire(back)
        assert out == expected

    def test_a_fork_goes_on_like_a_lane_that_computed_all_itself(self, executor: Executor) -> None:
        grid = executor.limits.chunk_tokens
        spec = self.spec(grid + 3, 5, seed=4)
        others = [replace(spec, candidate=c) for c in (1, 2)]
        expected = [generate(executor, s) for s in (spec, *others)]
        source = executor.admit(spec)
        targets = [executor.admit(s) for s in others]
        assert source is not None and None not in targets
        executor.step(StepPlan(chunk=Chunk(source, 0, grid, False))).result()
        if not executor.fork(source, targets, grid):  # type: ignore[arg-type]
            for ref in [source, *targets]:
                executor.retire(ref)  # type: ignore[arg-type]
            return
        refs = [source, *targets]
        out = []
        for ref in reversed(refs):
            plan = StepPlan(chunk=Chunk(ref, grid, grid + 3, True))  # type: ignore[arg-type]
            out.insert(0, list(executor.step(plan).result().lanes[0].tokens))
        while len(out[0]) < 5:
            for tokens, token in zip(out, decode(executor, refs), strict=True):  # type: ignore[arg-type]
                tokens.append(token)
        assert out == expected and out[0] != out[1] != out[2]
        for ref in refs:
            executor.retire(ref)  # type: ignore[arg-type]

    def test_a_fork_of_lanes_that_do_not_fit_together_is_refused(self, executor: Executor) -> None:
        grid = executor.limits.chunk_tokens
        spec = self.spec(grid + 3, 5)
        source, same = executor.admit(spec), executor.admit(replace(spec, candidate=1))
        other = executor.admit(self.spec(grid + 4, 5))
        assert source is not None and same is not None and other is not None
        with pytest.raises(PlanError):
            executor.fork(source, [same], grid)  # nothing computed yet
        executor.step(StepPlan(chunk=Chunk(source, 0, grid, False))).result()
        for targets, length in (([other], grid), ([same], grid - 1), ([same], 0), ([source], grid)):
            with pytest.raises(PlanError):
                executor.fork(source, targets, length)
        executor.step(StepPlan(chunk=Chunk(source, grid, grid + 3, True))).result()
        with pytest.raises(PlanError):
            executor.fork(source, [same], grid)  # it decodes: its rings have gone on
        for ref in (source, same, other):
            executor.retire(ref)

    def test_replay_repeats_the_last_known_token_and_goes_on(self, executor: Executor) -> None:
        sampling = SamplingParams(
            seed=3, frequency_penalty=0.5, repetition_penalty=1.2, penalty_window=3, top_logprobs=2
        )
        spec = self.spec(6, 7, sampling=sampling)
        expected = generate(executor, spec)
        for known in (1, 4):
            replay = np.array([t.token for t in expected[:known]], np.int32)
            again = replace(spec, replay=replay)
            ref = executor.admit(again)
            assert ref is not None
            out = expected[: known - 1] + list(prefill(executor, ref, again).tokens)
            while len(out) < 7:
                out += decode(executor, [ref])
            executor.retire(ref)
            assert out == expected

    def test_seeds_and_candidates_matter_unless_greedy(self, executor: Executor) -> None:
        def ids(**kwargs: object) -> list[int]:
            return [t.token for t in generate(executor, self.spec(5, 8, **kwargs))]  # type: ignore[arg-type]

        assert ids(seed=0) == ids(seed=0)
        assert ids(seed=0) != ids(seed=1)
        assert ids(seed=0) != ids(seed=0, candidate=1)
        high = (1 << 63) + 5  # both words of the seed count
        assert ids(seed=high) != ids(seed=5)
        greedy = [SamplingParams(temperature=0.0, seed=s) for s in (0, 1)]
        assert ids(sampling=greedy[0]) == ids(sampling=greedy[1], candidate=1)

    def test_stop_ids_are_banned_before_the_minimum(self, executor: Executor) -> None:
        spec = self.spec(5, 6)
        free = [t.token for t in generate(executor, spec)]
        stops = tuple(dict.fromkeys(free[:3]))
        held = replace(spec, stop_ids=stops, min_output_tokens=3)
        out = [t.token for t in generate(executor, held)]
        assert not set(out[:3]) & set(stops)
        unheld = replace(spec, stop_ids=stops)
        assert [t.token for t in generate(executor, unheld)] == free  # the device does not stop

    def test_reasoning_is_closed_at_its_limit(self, executor: Executor) -> None:
        for starts_open, most in ((True, 2), (True, 0), (False, 1)):
            limit = ReasoningLimit(
                max_tokens=most, starts_open=starts_open, open_id=14, close_id=15,
                also_close_ids=(13,),
            )  # fmt: skip
            spec = replace(self.spec(4, 8, seed=9), reasoning=limit)
            out = [t.token for t in generate(executor, spec)]
            forced = [forced_token(limit, out[:i]) for i in range(len(out))]
            assert all(f is None or f == t for f, t in zip(forced, out, strict=True))
            if starts_open:
                assert 15 in out or 13 in out

    @pytest.mark.parametrize("wanted", [None, 0, 1, 5])
    def test_logprobs_have_the_form_that_was_asked_for(
        self, executor: Executor, wanted: int | None
    ) -> None:
        plain = generate(executor, self.spec(5, 3))
        out = generate(
            executor, self.spec(5, 3, sampling=SamplingParams(seed=1, top_logprobs=wanted))
        )
        assert [t.token for t in out] == [t.token for t in plain]
        for token in out:
            assert (token.logprob is None) == (wanted is None)
            assert len(token.top) == (wanted or 0)
            values = [v for _, v in token.top]
            assert values == sorted(values, reverse=True) and all(v <= 0 for v in values)

    def test_prefill_only_and_a_budget_of_one(self, executor: Executor) -> None:
        for out in (0, 1):
            spec = self.spec(5, out)
            ref = executor.admit(spec)
            assert ref is not None
            prefill(executor, ref, spec)
            with pytest.raises(PlanError):
                executor.step(StepPlan(decode=(DecodeRow(ref),)))
            executor.retire(ref)

    def test_reset_forgets_lanes_and_keeps_snapshots(self, executor: Executor) -> None:
        spec = self.spec(6, 5)
        expected = generate(executor, spec)
        parked, lost = executor.admit(spec), executor.admit(self.spec())
        assert parked is not None and lost is not None
        out = list(prefill(executor, parked, spec).tokens)
        snapshot = executor.park(parked)
        executor.reset()
        with pytest.raises(PlanError):
            executor.retire(lost)
        if snapshot is not None:
            back = executor.restore(spec, snapshot)
            assert back is not None and back != parked
            while len(out) < 5:
                out += decode(executor, [back])
            executor.retire(back)
            assert out == expected

    def test_views(self, executor: Executor) -> None:
        names = {"compiles", "compile_seconds", "compiles_after_ready", "host_syncs"}
        assert names <= set(executor.counters())
        plan = executor.memory_plan()
        assert plan and all(isinstance(v, int) and v >= 0 for v in plan.values())
