"""The device executor: contract, exactness over lanes and time, memory, compilation."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds4jax import cache as cache_lib
from ds4jax import engine as engine_lib
from ds4jax import qualify, step
from ds4jax.config import RuntimeConfig, SamplingParams
from ds4jax.engine import RESERVE_BYTES, DeviceExecutor
from ds4jax.plan import (
    Chunk,
    DecodeRow,
    LaneRef,
    LaneSpec,
    ReasoningLimit,
    StepPlan,
    TokenResult,
    forced_token,
)
from tests import little_effort, tiny
from tests.executor_contract import ExecutorContract, decode, generate, prefill


@pytest.fixture(scope="module")
def engine() -> DeviceExecutor:
    """Of two layers, with all that a cache holds; `test_serving_exact` has every kind of layer."""
    cfg, run = tiny.config((4, 128)), tiny.run_config()
    order = np.random.default_rng(1).permutation(run.pages).tolist()
    made = DeviceExecutor(cfg, tiny.params(cfg), run, page_order=order)
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


def test_the_bytes_are_those_of_the_specification() -> None:
    """Sizes of the published model: 6,880 bytes a token, index state at twice the index width."""
    flash = tiny.config(
        (0, 0, *(4, 128) * 20, 4), hidden_size=4096, num_heads=64, head_dim=512, rope_head_dim=64,
        index_head_dim=128, index_topk=512, sliding_window=128,
    )  # fmt: skip
    slots, pages, k = 6, 192, 2
    run = RuntimeConfig(dtype="bfloat16", num_slots=slots, num_pages=pages, max_ctx=24576)
    plan = cache_lib.plan_bytes(flash, run)
    per_page = {"comp4": 21 * 32 * 512 * k, "comp128": 20 * 512 * k, "index4": 21 * 32 * 128 * k}
    per_slot = {
        "raw": 43 * 128 * 512 * k, "state4": 21 * 16 * (2 * 512) * 2 * 4,
        "istate4": 21 * 16 * (2 * 128) * 2 * 4, "state128": 20 * 128 * 512 * 2 * 4,
    }  # fmt: skip
    for name, size in per_page.items():
        assert plan[name] == (pages + 1) * size
    for name, size in per_slot.items():
        assert plan[name] == (slots + 1) * size
    assert sum(per_page.values()) / 128 == 6880
    mib = {"raw": 32.25, "comp4": 126.0, "comp128": 3.75, "index4": 31.5, "state128": 60.0}
    for name, size in mib.items():  # without slot and page of the trash
        count = plan[name] * (pages / (pages + 1) if name in per_page else slots / (slots + 1))
        assert count / 2**20 == pytest.approx(size)


def test_rings_hold_what_a_rejected_step_needs() -> None:
    for drafts, sizes in ((0, (128, 16, 128)), (7, (144, 16, 144)), (15, (144, 32, 144))):
        run = RuntimeConfig(max_drafts=drafts)
        shapes = cache_lib.shapes(tiny.config((4, 128), sliding_window=128), run)
        rings = tuple(shapes[k].shape[2] for k in ("raw", "state4", "state128"))
        assert rings == sizes
        for ring, least in zip(rings, (127, 7, 127), strict=True):
            assert ring >= least + drafts + 1 and ring % 16 == 0


def test_what_does_not_fit_the_device_is_refused_with_the_plan(
    engine: DeviceExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceExecutor, "_free_bytes", lambda self: 1000)
    cfg, params = tiny.model()
    with pytest.raises(MemoryError, match=r"cache and lane state(.|\n)*istate4"):
        DeviceExecutor(cfg, params, tiny.run_config())
    with pytest.raises(MemoryError, match=r"work space(.|\n)*program_temporaries(.|\n)*reserve"):
        engine._check_work_space()
    temporaries = engine.memory_plan()["program_temporaries"]
    monkeypatch.setattr(DeviceExecutor, "_free_bytes", lambda self: temporaries + RESERVE_BYTES)
    engine._check_work_space()


def test_a_step_is_one_transfer_each_way(engine: DeviceExecutor) -> None:
    """One packed vector goes in beside what is on the device, one array comes out."""
    seen: list[tuple[int, int]] = []
    programs = dict(engine._programs)

    def spy(program: Any) -> Any:
        def run(*args: Any) -> Any:
            host = [x for x in jax.tree.leaves(args) if not isinstance(x, jax.Array)]
            assert all(x.dtype == np.int32 and x.ndim == 1 for x in host)
            cache, results = program(*args)
            seen.append((len(host), len(jax.tree.leaves(results))))
            return cache, results

        return run

    spec = make(20, 5)
    ref = engine.admit(spec)
    assert ref is not None
    engine._programs = {k: spy(v) if isinstance(k, step.Bucket) else v for k, v in programs.items()}
    try:
        syncs = engine.counters()["host_syncs"]
        prefill(engine, ref, spec)
        for _ in range(4):
            decode(engine, [ref])
        assert engine.counters()["host_syncs"] - syncs == len(seen) == 5
    finally:
        engine._programs = programs
        engine.retire(ref)
    assert set(seen) == {(1, 1)}


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
    counters = engine.counters()
    assert (counters["compiles_after_ready"], counters["traces_after_ready"]) == (0, 0)
    assert sum(v for k, v in counters.items() if k.startswith("compiles:")) > 0


def beside(engine: DeviceExecutor, spec: LaneSpec, others: list[LaneSpec]) -> list[TokenResult]:
    """Tokens of a lane that moves among others, all or some of which are in every step."""
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
    while len(got) < spec.max_output_tokens:
        place = len(got) % (len(refs) + 1)
        group = [*refs[:place], mine, *refs[place:]]
        if place == len(refs) > 1:
            group = group[-2:]
        got.append(decode(engine, group)[group.index(mine)])
    for ref in [*refs, mine]:
        engine.retire(ref)
    return got


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", [3, 126, 131])  # output crosses both kinds of boundary
def test_neighbours_change_nothing(engine: DeviceExecutor, temperature: float, length: int) -> None:
    sampling = SamplingParams(temperature=temperature, seed=0, top_logprobs=4)
    spec = make(length, 20, sampling=sampling)
    greedy = SamplingParams(temperature=0.0, seed=6)
    others = [make(7, 60, seed=5), make(250, 60, sampling=greedy)]
    assert beside(engine, spec, others) == generate(engine, spec)


def one_by_one(engine: DeviceExecutor, spec: LaneSpec) -> tuple[LaneRef, TokenResult]:
    """Feed a prompt token by token through decode steps: what was sampled is overwritten."""
    short = replace(spec, prompt=spec.prompt[:1], max_output_tokens=len(spec.prompt) + 1)
    ref = engine.admit(short)
    assert ref is not None
    (token,) = prefill(engine, ref, short).tokens
    for at in range(1, len(spec.prompt)):
        tokens = engine._cache.tokens.at[ref.slot, at].set(int(spec.prompt[at]))
        engine._cache = engine._cache.replace(tokens=tokens)  # type: ignore[attr-defined]
        (token,) = decode(engine, [ref])
    return ref, token


def contents(engine: DeviceExecutor, ref: LaneRef, length: int) -> dict[str, Any]:
    """Everything of the cache that a lane of this length may still see, by position."""
    slot = engine._snapshot_program("take_slot")(engine._cache, np.int32(ref.slot))
    out = {}
    for name in step.SLOTTED:
        ring = np.asarray(slot[name])
        size = ring.shape[1]
        out[name] = ring[:, np.arange(max(0, length - size), length) % size]
    for name, per_page in step.PAGED.items():
        blocks = engine._page_blocks(engine._pages.owned(ref.slot))
        parts = [engine._snapshot_program("take_pages")(engine._cache, b)[name] for _, b in blocks]
        rows = np.concatenate(parts, 1).reshape(parts[0].shape[0], -1, parts[0].shape[-1])
        out[name] = rows[:, : length * per_page // 128]
    return out


def check_chunks(engine: DeviceExecutor, length: int) -> None:
    spec = make(length, 2)
    chunked = engine.admit(spec)
    assert chunked is not None
    (whole,) = prefill(engine, chunked, spec).tokens
    single, token = one_by_one(engine, spec)
    assert token == whole
    want, got = (contents(engine, ref, length) for ref in (single, chunked))
    for name, rows in want.items():
        assert np.array_equal(rows, got[name]), name
        assert rows.shape[1] or length < 128
    for ref in (chunked, single):
        engine.retire(ref)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 127, 128, 129, 300])
def test_chunks_and_single_tokens_leave_the_same_cache(engine: DeviceExecutor, length: int) -> None:
    check_chunks(engine, length)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk", [128, 512, 2048])
def test_long_prompts_in_chunks_of_every_size(chunk: int) -> None:
    cfg = tiny.config()
    run = tiny.run_config(max_ctx=2304, num_slots=2, prefill_buckets=(chunk,))
    made = DeviceExecutor(cfg, tiny.params(cfg, max_ctx=2304), run)
    made.warm_up()
    for length in (511, 512, 513, 1195, 2049):
        check_chunks(made, length)
    made.close()


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


def test_memory_for_parked_lanes_is_bounded_and_comes_back(
    engine: DeviceExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make(20, 6)

    def parked() -> Any:
        ref = engine.admit(spec)
        assert ref is not None
        prefill(engine, ref, spec)
        return engine.park(ref)

    size = engine._slot_bytes() + engine._page_bytes()
    monkeypatch.setattr(engine, "run", replace(engine.run, snapshot_bytes=2 * size - 1))
    one = parked()
    arrays = jax.tree.leaves((one.slot_data, one.pages))
    assert sum(x.nbytes for x in arrays) == one.nbytes == size
    assert parked() is None
    ref = engine.restore(spec, one)
    assert ref is not None
    engine.retire(ref)
    other = parked()
    assert other is not None and parked() is None
    del other  # its request was cancelled
    assert parked() is not None


def test_too_many_rows_are_refused(engine: DeviceExecutor) -> None:
    with pytest.raises(ValueError, match="max_ctx"):
        engine.admit(make(630, 200))


def test_the_switch_that_breaks_row_independence_is_seen(
    engine: DeviceExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparisons above can fail: rows computed together, in programs of two sizes."""
    monkeypatch.setattr(jax, "jit", little_effort.jit)
    cfg = tiny.config((4,))
    params = tiny.params(cfg)
    right = DeviceExecutor(cfg, params, tiny.run_config(prefill_buckets=(8,)))
    run = tiny.run_config(num_slots=9, row_buckets=(8, 16), prefill_buckets=(16,))
    broken = DeviceExecutor(cfg, params, run, batched=True)
    spec = make(21, 20)
    alone, exact = generate(broken, spec), generate(right, spec)
    assert [t.logprob for t in alone] != [t.logprob for t in exact]
    error = max(abs(a.logprob - b.logprob) for a, b in zip(alone[:4], exact[:4], strict=True))  # type: ignore[operator]
    assert error < 1e-3
    others = [make(5 + n, 60, seed=n) for n in range(8)]
    assert beside(broken, spec, others) != alone, "the number of lanes is not seen"
    assert qualify.difference(broken) is not None and qualify.difference(engine) is None
    right.close()
    broken.close()


def test_programs_that_compile_at_once_are_counted_apart() -> None:
    counter = engine_lib.CompileCounter.shared()
    before, mine = counter.count, counter.of_thread()
    apart = {}

    def make(size: int) -> None:
        first = counter.of_thread()[0]
        jax.jit(lambda x: jnp.cos(x) * size).lower(jnp.zeros(size + 900)).compile()
        apart[size] = counter.of_thread()[0] - first

    def run(job: Any) -> float:
        job()
        return 0.0

    jobs = [(str(i), functools.partial(make, i)) for i in range(5)]
    assert sorted(name for name, _ in engine_lib.at_once(jobs, run, 3)) == list("01234")
    assert counter.count - before == sum(apart.values()) and min(apart.values()) >= 1
    assert counter.of_thread() == mine

    def fail() -> None:
        raise MemoryError("the plan")

    made: list[int] = []
    jobs = [("bad", fail), *[(str(i), functools.partial(made.append, i)) for i in range(3)]]
    for workers in (1, 2):
        with pytest.raises(MemoryError, match="the plan"):
            list(engine_lib.at_once(jobs, run, workers))
