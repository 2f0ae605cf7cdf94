"""Models in this process: device and memory choices, and requests driven by the caller's thread."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from ds4jax import local, model_file, parser
from ds4jax.answer import PromptIds
from ds4jax.commands import interrupts
from ds4jax.config import RuntimeConfig, SamplingParams, StoppingCriteria
from ds4jax.local import Loaded, LocalModel, MemoryPlan, Options
from ds4jax.request import ServiceError
from tests import little_effort, tiny
from tests.text_tools import toy_tokenizer

TOY = toy_tokenizer()
PROMPT = PromptIds(ids=tuple(b"hello world"))


@pytest.fixture(scope="module")
def model() -> Iterator[LocalModel]:
    """Compiled with little effort: its bits are compared with each other alone."""
    cfg = tiny.config((4, 128), vocab_size=274)
    run = local.runtime_config(Options(max_ctx=384, num_slots=3), "cpu")
    plan = MemoryPlan(stored=1, weights=1, cache=1, form="decoded", free=None)
    loaded = Loaded(
        cfg=cfg, params=tiny.params(cfg, max_ctx=384), run=run, plan=plan, platform="cpu", seconds=0
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", little_effort.jit)
        made = LocalModel.open(loaded, TOY)
    yield made
    made.close()


def ids(model: LocalModel, seed: int = 0, prompt: PromptIds = PROMPT, **kwargs: object):  # type: ignore[no-untyped-def]
    """Ids and the generation of one request that runs to its end."""
    stopping = {"max_output_tokens": 20, "ignore_eos": True} | kwargs
    g = model.generate(prompt, SamplingParams(seed=seed), StoppingCriteria(**stopping))  # type: ignore[arg-type]
    seen = [t.token for out in g for t in out.tokens]
    assert tuple(seen) == g.results[0].ids
    return seen, g


# -- requests --------------------------------------------------------------------------------------


def test_one_program_serves_prompt_and_output(model: LocalModel) -> None:
    before = model.executor.counters()["compiles_after_ready"]
    long_prompt = PromptIds(ids=tuple(np.arange(300) % 256))
    out, g = ids(model, prompt=long_prompt)
    assert len(out) == 20 and g.results[0].finish_reason == "length"
    assert model.executor.counters()["compiles_after_ready"] == before == 0
    # one step program, one that opens a lane, one that makes the empty state
    assert model.executor.num_programs == 3


def test_the_seed_decides(model: LocalModel) -> None:
    assert ids(model, 0)[0] == ids(model, 0)[0] != ids(model, 1)[0]
    g = model.generate(PROMPT, SamplingParams(), StoppingCriteria(max_output_tokens=5))
    first = [t.token for out in g for t in out.tokens]
    again = ids(model, g.seed, max_output_tokens=5, ignore_eos=False)[0]
    assert again == first, "the reported seed repeats the answer"


def test_candidates_run_together_and_are_those_that_run_alone(model: LocalModel) -> None:
    stopping = StoppingCriteria(max_output_tokens=12, ignore_eos=True)
    g = model.generate(PROMPT, SamplingParams(seed=5), stopping, candidates=3)
    for _ in g:
        pass
    texts = [g.results[c].ids for c in range(3)]
    assert len(set(texts)) == 3 and list(texts[0]) == ids(model, 5, max_output_tokens=12)[0]


def test_a_stop_string_ends_one_candidate_and_leaves_the_others(model: LocalModel) -> None:
    free = model.generate(
        PROMPT, SamplingParams(seed=5), StoppingCriteria(max_output_tokens=30, ignore_eos=True),
        candidates=2,
    )  # fmt: skip
    for _ in free:
        pass
    parsed = free.results[0].parsed
    assert parsed is not None
    stop = next(c for c in parsed.content if c.isascii() and c.isprintable())
    stopping = StoppingCriteria(max_output_tokens=30, ignore_eos=True, stop_strings=(stop,))
    g = model.generate(PROMPT, SamplingParams(seed=5), stopping, candidates=2)
    shown = ["", ""]
    for out in g:
        shown[out.candidate] += "".join(
            e.text for e in out.events if isinstance(e, parser.Content)
        )  # fmt: skip
    for c in range(2):
        whole = free.results[c].parsed
        assert whole is not None
        cut, found, _ = whole.content.partition(stop)
        assert shown[c] == cut
        assert g.results[c].stop_string == (stop if found else None)
    assert g.results[0].finish_reason == "stop"
    assert model.executor.page_counts().owned == 0


def test_prefill_only(model: LocalModel) -> None:
    out, g = ids(model, max_output_tokens=0)
    assert out == [] and g.results[0].finish_reason == "length"


def test_the_time_limit_ends_it_with_what_there_is(model: LocalModel) -> None:
    out, g = ids(model, max_output_tokens=370, time_limit=0.02)
    assert g.results[0].finish_reason == "time_limit" and len(out) < 370
    assert model.executor.page_counts().owned == 0


def test_cancelling_keeps_what_was_said(model: LocalModel) -> None:
    stopping = StoppingCriteria(max_output_tokens=300, ignore_eos=True)
    g = model.generate(PROMPT, SamplingParams(seed=0), stopping)
    seen = []
    with pytest.raises(ServiceError) as caught:
        for out in g:
            seen += [t.token for t in out.tokens]
            if len(seen) == 4:
                g.cancel()
    assert caught.value.code == "CANCELLED" and 4 <= len(seen) < 10
    assert g.partial().ids[:4] == tuple(seen[:4])
    assert model.executor.page_counts().owned == 0
    assert ids(model, 0)[0][:4] == seen[:4], "the next request is not disturbed"


def test_cancelling_before_it_runs_is_not_lost(model: LocalModel) -> None:
    g = model.generate(PROMPT, SamplingParams(seed=0), StoppingCriteria(max_output_tokens=10))
    g.cancel()
    with pytest.raises(ServiceError) as caught:
        list(g)
    assert caught.value.code == "CANCELLED" and g.partial().ids == ()
    assert model.executor.page_counts().owned == 0


def test_interrupt_ends_the_answer_only(model: LocalModel) -> None:
    before = signal.getsignal(signal.SIGINT)
    g = model.generate(
        PROMPT, SamplingParams(seed=0), StoppingCriteria(max_output_tokens=300, ignore_eos=True)
    )
    count = 0
    with interrupts.interruptible(g) as was_interrupted:
        for out in g:
            count += len(out.tokens)
            if count == 3:
                signal.raise_signal(signal.SIGINT)
    assert was_interrupted() and 3 <= count < 10
    assert signal.getsignal(signal.SIGINT) is before


def test_leaving_the_loop_frees_the_lane(model: LocalModel) -> None:
    g = model.generate(PROMPT, SamplingParams(seed=0), StoppingCriteria(max_output_tokens=50))
    iterator = iter(g)
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    assert model.executor.page_counts().owned == 0


def test_too_long_is_an_error_before_anything_runs(model: LocalModel) -> None:
    with pytest.raises(ServiceError, match="over the context of 384 tokens"):
        model.generate(PROMPT, SamplingParams(), StoppingCriteria(max_output_tokens=374))


def test_timings_add_up(model: LocalModel) -> None:
    _, g = ids(model)
    t = g.timings
    assert 0 < t.prefill <= t.total and 0 < t.decode <= t.total and t.decode_tokens == 19
    assert t.tokens_per_second == pytest.approx(19 / t.decode)
    assert ids(model, max_output_tokens=1)[1].timings.tokens_per_second is None


def test_another_context_length_keeps_the_weights(model: LocalModel) -> None:
    file = model_file.open_model("nano")  # only its sizes are used, for the memory plan
    longer = local.with_context(model.loaded, file, 512)
    assert longer.run.max_ctx == 512 and model.loaded.run.max_ctx == 384
    made = tiny.params(model.loaded.cfg, max_ctx=512)
    np.testing.assert_array_equal(longer.params.rope_compress, made.rope_compress)
    np.testing.assert_array_equal(longer.params.rope_main, made.rope_main)


# -- choices ---------------------------------------------------------------------------------------


def test_runs_of_platforms() -> None:
    cpu = local.runtime_config(Options(), "cpu")
    assert (cpu.dtype, cpu.backend) == ("float32", "reference")
    assert cpu.row_buckets == cpu.prefill_buckets, "one program is enough"
    for platform in ("cuda", "rocm"):
        gpu = local.runtime_config(Options(num_slots=2, max_ctx=999), platform)
        assert (gpu.dtype, gpu.backend, gpu.num_slots, gpu.max_ctx) == (
            "bfloat16", "triton", 2, 999,
        )  # fmt: skip
        assert (gpu.row_buckets, gpu.prefill_buckets) == ((1, 8), (128, 512, 2048))
        one = local.runtime_config(Options(num_slots=1, max_ctx=512), platform)
        assert (one.row_buckets, one.prefill_buckets) == ((1,), (128, 512))
    assert local.runtime_config(Options(dtype="bfloat16"), "cpu").dtype == "bfloat16"


def test_the_form_of_weights_follows_the_free_memory() -> None:
    file = model_file.open_model("nano")
    run = local.runtime_config(Options(), "cpu")
    unknown = local.plan_memory(file, run, None, None)
    packed = local.plan_memory(file, run, "packed", None)
    decoded = local.plan_memory(file, run, "decoded", None)
    assert unknown == packed and packed.weights < decoded.weights / 3
    parameters = file.describe()["totals"]["parameters"]
    assert 4 * parameters <= decoded.weights < 4.1 * parameters
    enough = 2 * decoded.weights
    assert local.plan_memory(file, run, None, enough).form == "decoded"
    assert local.plan_memory(file, run, None, enough - 2).form == "packed"
    gpu = local.runtime_config(Options(), "cuda")
    assert local.plan_memory(file, gpu, "decoded", None).weights < decoded.weights / 3


@pytest.mark.parametrize(("options", "form", "fix"), [
    (Options(), "decoded", "give --cpu-weights packed"),
    (Options(), "packed", "use a smaller file"),
    (Options(max_ctx=60000, num_slots=4), "packed", "lower --ctx or --lanes"),
])  # fmt: skip
def test_what_does_not_fit_is_said_before_loading(options: Options, form: str, fix: str) -> None:
    file = model_file.open_model("nano")
    run = local.runtime_config(options, "cpu")
    with pytest.raises(local.DoesNotFit, match=fix) as caught:
        local.plan_memory(file, run, form, 1_000_000)  # type: ignore[arg-type]
    assert "1 MB are free" in str(caught.value)


def test_planned_weights_are_loaded_weights() -> None:
    file = model_file.open_model("nano")
    for form in ("packed", "decoded"):
        loaded = local.load(file, Options(cpu_weights=form, max_ctx=256))  # type: ignore[arg-type]
        params = dataclasses.replace(loaded.params, rope_main=None, rope_compress=None)
        held = sum(x.nbytes for x in jax.tree.leaves(params))
        assert held == loaded.plan.weights
        assert loaded.plan.form == form and loaded.platform == "cpu"


def test_memory_that_a_container_leaves(tmp_path: Path) -> None:
    assert local._group_limit(tmp_path) is None
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert local._group_limit(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert local._group_limit(tmp_path) == 700
    free = local.free_memory()
    assert free is None or free > 1 << 20


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    before = jax.config.jax_platforms
    try:
        with pytest.raises(local.DeviceError, match=r"--device cuda: .*(cpu|doctor)"):
            local.start_device("cuda")
    finally:
        jax.config.update("jax_platforms", before)
    assert local.start_device("auto") == "cpu"


def test_compiled_programs_are_kept_apart_by_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to = {}
    monkeypatch.setattr(jax.config, "update", lambda k, v: set_to.__setitem__(k, v))
    local.use_compile_cache(tmp_path, "cpu")
    place = Path(str(set_to["jax_compilation_cache_dir"]))
    assert place.parent == tmp_path and place.name.startswith("cpu-")
    assert set_to["jax_persistent_cache_min_compile_time_secs"] == 0  # a restart compiles nothing
    monkeypatch.setattr(jax, "__version__", "0.0.1")
    local.use_compile_cache(tmp_path, "cpu")
    assert set_to["jax_compilation_cache_dir"] != str(place)


def test_a_run_config_is_what_the_options_say() -> None:
    run = local.runtime_config(Options(numerics="official"), "cpu")
    assert isinstance(run, RuntimeConfig) and run.numerics == "official"
