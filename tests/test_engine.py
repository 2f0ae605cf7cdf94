"""The device executor: contract, exactness over lanes and time, memory, compilation."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import pytest

from ds4jax import cache as cache_lib
from ds4jax import step
from ds4jax.config import SamplingParams
from ds4jax.engine import DeviceExecutor
from ds4jax.plan import Chunk, DecodeRow, LaneSpec, ReasoningLimit, StepPlan, forced_token
from tests import tiny
from tests.executor_contract import ExecutorContract, decode, generate, prefill


@pytest.fixture(scope="module")
def engine() -> DeviceExecutor:
    cfg, params = tiny.model()
    run = tiny.run_config()
    order = np.random.default_rng(1).permutation(run.pages).tolist()
    made = DeviceExecutor(cfg, params, run, page_order=order)
    made.warm_up()
    return made


class TestContract(ExecutorContract):
    @pytest.fixture
    def executor(self, engine: DeviceExecutor) -> Iterator[DeviceExecutor]:
        yield engine


def make(n: int, out: int, seed: int = 0, **kwargs: object) -> LaneSpec:
    prompt = np.random.default_rng(n).integers(0, 64, n).astype(np.int32)
    sampling = kwargs.pop("sampling", SamplingParams(seed=seed, top_logprobs=3))
    return LaneSpec(prompt=prompt, sampling=sampling, max_output_tokens=out, **kwargs)  # type: ignore[arg-type]


def test_planned_bytes_are_allocated_bytes(engine: DeviceExecutor) -> None:
    plan = dict(engine.memory_plan())
    assert plan.pop("program_temporaries") > 0
    assert engine.allocated_bytes() == plan


def test_cache_is_updated_in_place(engine: DeviceExecutor) -> None:
    spec = make(5, 3)
    ref = engine.admit(spec)
    assert ref is not None
    before = engine._cache.raw
    where = before.unsafe_buffer_pointer()
    prefill(engine, ref, spec)
    assert before.is_deleted()
    assert engine._cache.raw.unsafe_buffer_pointer() == where
    engine.retire(ref)


def test_nothing_compiles_while_a_lane_grows_to_600(engine: DeviceExecutor) -> None:
    with_chunks = make(600, 1)
    spec = LaneSpec(
        prompt=with_chunks.prompt[:1], sampling=SamplingParams(temperature=0, seed=0),
        max_output_tokens=600,
    )  # fmt: skip
    before = engine.counters()["compiles_after_ready"]
    assert before == 0
    one_by_one = generate(engine, spec)
    assert len(one_by_one) == 600
    generate(engine, with_chunks)
    assert engine.counters()["compiles_after_ready"] == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_neighbours_change_nothing(engine: DeviceExecutor, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=0, top_logprobs=4)
    spec = make(131, 20, sampling=sampling)
    alone = generate(engine, spec)
    others = [make(7, 60, seed=5), make(250, 60, seed=6)]
    refs = []
    for other in others:
        ref = engine.admit(other)
        assert ref is not None
        prefill(engine, ref, other)
        refs.append(ref)
        decode(engine, refs)
    mine = engine.admit(spec)
    assert mine is not None
    got = list(prefill(engine, mine, spec).tokens)
    for i in range(19):
        group = [refs[0], mine, refs[1]] if i % 2 else [mine, *refs[: i % 3]]
        got.append(decode(engine, group)[group.index(mine)])
    assert got == alone
    for ref in [*refs, mine]:
        engine.retire(ref)


def test_a_nan_lane_harms_nobody(engine: DeviceExecutor) -> None:
    spec = make(40, 12)
    alone = generate(engine, spec)
    sick, well = engine.admit(make(30, 12)), engine.admit(spec)
    assert sick is not None and well is not None
    prefill(engine, sick, make(30, 12))
    got = list(prefill(engine, well, spec).tokens)
    bad = engine._cache.raw.at[:, sick.slot].set(np.nan)
    engine._cache = engine._cache.replace(raw=bad)  # type: ignore[attr-defined]
    for _ in range(11):
        engine.plan_limits([sick, well])
        result = engine.step(StepPlan(decode=(DecodeRow(sick), DecodeRow(well)))).result()
        assert not result.lanes[0].finite and result.lanes[1].finite
        got += result.lanes[1].tokens
    assert got == alone
    engine.retire(sick)
    engine.retire(well)
    # The pages and the slot that NaN went through are used again.
    assert generate(engine, spec) == alone


def test_steps_are_dispatched_before_results_are_read(engine: DeviceExecutor) -> None:
    spec = make(9, 8)
    alone = generate(engine, spec)
    ref = engine.admit(spec)
    assert ref is not None
    handles = [engine.step(StepPlan(chunk=Chunk(ref, 0, 9, True)))]
    for _ in range(7):
        engine.plan_limits([ref])
        handles.append(engine.step(StepPlan(decode=(DecodeRow(ref),))))
    assert [h.result().lanes[0].tokens[0] for h in handles] == alone
    engine.retire(ref)


def test_reasoning_budget_forces_the_close(engine: DeviceExecutor) -> None:
    limit = ReasoningLimit(max_tokens=5, starts_open=True, open_id=3, close_id=4)
    spec = make(6, 20, reasoning=limit, stop_ids=(1,), min_output_tokens=20)
    tokens = [t.token for t in generate(engine, spec)]
    assert 4 in tokens and 1 not in tokens
    for i, token in enumerate(tokens):
        forced = forced_token(limit, tokens[:i])
        assert forced is None or token == forced


@pytest.mark.parametrize("ratios", [(0,), (4,), (128, 128)])
def test_snapshots_of_models_that_lack_a_kind_of_layer(ratios: tuple[int, ...]) -> None:
    """Shapes only: nothing is compiled."""
    cfg, run = tiny.config(ratios), tiny.run_config()
    cache = jax.eval_shape(lambda: cache_lib.init(cfg, run))
    pages, zero = np.zeros(2, np.int32), np.int32(0)
    slot = jax.eval_shape(step.take_slot, cache, zero)
    part = jax.eval_shape(step.take_pages, cache, pages)
    assert jax.eval_shape(step.put_slot, cache, zero, slot) == cache
    assert jax.eval_shape(step.put_pages, cache, zero, zero, pages, part) == cache


def test_too_many_rows_are_refused(engine: DeviceExecutor) -> None:
    with pytest.raises(ValueError, match="max_ctx"):
        engine.admit(make(630, 200))


def test_the_switch_that_breaks_row_independence_is_seen(engine: DeviceExecutor) -> None:
    """The comparison above can fail: rows computed together give other bits."""
    cfg, params = tiny.model()
    broken = DeviceExecutor(cfg, params, tiny.run_config(), batched=True)
    spec = make(131, 20)
    got, exact = generate(broken, spec), generate(engine, spec)
    assert [t.logprob for t in got] != [t.logprob for t in exact]
    error = max(abs(a.logprob - b.logprob) for a, b in zip(got[:4], exact[:4], strict=True))  # type: ignore[operator]
    assert error < 1e-3
    broken.close()
    jax.clear_caches()
