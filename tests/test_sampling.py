"""Sampling on the device against a NumPy definition written from the order of operations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax import sampling
from ds4jax.config import RuntimeConfig, SamplingParams
from ds4jax.plan import LaneSpec, ReasoningLimit, forced_token
from ds4jax.step import read_results

V, C = 50, 40
RUN = RuntimeConfig(max_ctx=C - 1, num_slots=1)
F = np.float32


@jax.jit
def _run(logits: Any, words: Any, history: Any, pos: Any) -> Any:
    lanes = sampling.set_lane(sampling.init_lanes(RUN), jnp.int32(0), words)
    token, out = sampling.sample(logits, lanes, history, jnp.int32(0), pos, greedy=False)
    return token, out, sampling.gumbel(lanes.ints[0], pos, V)


def draw(logits: Any, spec: LaneSpec, output: Any) -> tuple[int, Any, Any]:
    """Token, result words and noise for the token after prompt + output."""
    known = np.concatenate([spec.prompt, np.asarray(output, np.int32)])
    history = np.full((2, C), 7, np.int32)  # what lies beyond the length must not matter
    history[0, : len(known)] = known
    token, words, noise = _run(logits, sampling.pack_lane(spec), history, np.int32(len(known)))
    return int(token), np.asarray(words), np.asarray(noise)


def expected(logits: Any, spec: LaneSpec, output: list[int], noise: Any) -> tuple[int, Any]:
    s = spec.sampling
    z = logits.astype(np.float64).copy()
    for token, bias in s.logit_bias:
        z[token] += -np.inf if bias <= -100 else bias
    known = [*spec.prompt.tolist(), *output]
    first = 0 if s.penalty_window is None else max(0, len(known) - s.penalty_window)
    seen = set(known[first:])
    own = [t for i, t in enumerate(known) if i >= max(first, len(spec.prompt))]
    for t in range(V):
        if t in seen:
            z[t] = z[t] / s.repetition_penalty if z[t] > 0 else z[t] * s.repetition_penalty
        z[t] -= s.frequency_penalty * own.count(t) + s.presence_penalty * (t in own)
    if len(output) < spec.min_output_tokens:
        z[list(spec.stop_ids)] = -np.inf
    if s.temperature == 0:
        return int(np.argmax(z)), z
    z = z / s.temperature
    order = sorted(range(V), key=lambda t: (-z[t], t))
    if s.top_k:
        z[z < z[order[min(s.top_k, V) - 1]]] = -np.inf
    p = np.exp(z - z.max())
    p /= p.sum()
    mass, keep = 0.0, np.zeros(V, bool)
    for t in order:
        keep[t] = mass < s.top_p or s.top_p >= 1
        mass += p[t]
    z[~keep] = -np.inf
    z[np.exp(z - z.max()) < s.min_p * (1 - 1e-6)] = -np.inf
    return int(np.argmax(z + noise)), z


def lane(**kwargs: Any) -> LaneSpec:
    names = LaneSpec.__dataclass_fields__
    extra = {k: kwargs.pop(k) for k in list(kwargs) if k in names}
    prompt = extra.pop("prompt", np.array([3, 5, 5, 9], np.int32))
    sampling_ = SamplingParams(**({"seed": 0} | kwargs))
    return LaneSpec(prompt=prompt, sampling=sampling_, max_output_tokens=30, **extra)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 49, 1000]),
    top_p=st.sampled_from([1.0, 0.9, 0.3, 1e-6]),
    min_p=st.sampled_from([0.0, 0.05, 0.9]),
    repetition=st.sampled_from([1.0, 1.3, 0.5]),
    frequency=st.sampled_from([0.0, 0.5, -1.0]),
    presence=st.sampled_from([0.0, 1.5]),
    window=st.sampled_from([None, 1, 6]),
    bias=st.sampled_from([(), ((4, 3.0),), ((0, -100.0), (11, 20.0))]),
    output=st.lists(st.integers(0, V - 1), max_size=12),
    minimum=st.sampled_from([0, 5]),
)
def test_against_the_definition(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, repetition: float,
    frequency: float, presence: float, window: int | None, bias: Any, output: list[int],
    minimum: int,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed % 1000)
    logits = (3 * rng.standard_normal(V)).astype(F)
    spec = lane(
        seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence,
        penalty_window=window, logit_bias=bias, stop_ids=(1, 2), min_output_tokens=minimum,
    )  # fmt: skip
    token, _, noise = draw(logits, spec, output)
    want, z = expected(logits, spec, output, noise)
    if token != want:  # a mass that equals top_p within rounding may fall on either side
        keys = z + (noise if temperature else 0)
        p = np.sort(np.exp(z - z.max()))[::-1]
        near = np.min(np.abs(np.cumsum(p / p.sum()) - top_p)) < 1e-5
        assert near or abs(keys[token] - keys[want]) < 1e-4


def test_noise_depends_on_seed_candidate_position_and_index_only() -> None:
    logits = np.zeros(V, F)
    base = draw(logits, lane(seed=0), [])
    assert draw(logits, lane(seed=0, top_k=40, presence_penalty=0.1), [])[2].tolist() == (
        base[2].tolist()
    )
    others = [lane(seed=1), lane(seed=1 << 32), lane(seed=0, candidate=1)]
    for spec in others:
        assert not np.array_equal(draw(logits, spec, [])[2], base[2])
    assert not np.array_equal(draw(logits, lane(seed=0), [1])[2], base[2])
    # Same absolute position, other split into prompt and output: same noise.
    longer = lane(seed=0, prompt=np.array([3, 5, 5, 9, 1], np.int32))
    assert np.array_equal(draw(logits, longer, [])[2], draw(logits, lane(seed=0), [1])[2])


def test_the_noise_is_gumbel() -> None:
    words = np.stack([sampling.pack_lane(lane(seed=s))[: sampling.NUM_INTS] for s in range(400)])
    noise = np.asarray(jax.vmap(lambda w: sampling.gumbel(w, jnp.int32(9), V))(jnp.asarray(words)))
    x = np.sort(noise.ravel())
    empirical = (np.arange(x.size) + 0.5) / x.size
    assert np.max(np.abs(np.exp(-np.exp(-x)) - empirical)) < 0.02


def test_ties_go_to_the_lower_id_and_a_tied_kth_stays() -> None:
    logits = np.zeros(V, F)
    assert draw(logits, lane(temperature=0.0), [])[0] == 0
    logits[[7, 9, 11]] = 5
    seen = {draw(logits, lane(seed=s, top_k=1), [])[0] for s in range(60)}
    assert seen == {7, 9, 11}


@pytest.mark.parametrize("after", [False, True])
def test_logprobs(after: bool) -> None:
    rng = np.random.default_rng(3)
    logits = rng.standard_normal(V).astype(F)
    spec = lane(
        temperature=0.5, top_k=6, top_logprobs=8, logprobs_after_sampling=after,
        logit_bias=((4, 3.0),),
    )  # fmt: skip
    token, words, noise = draw(logits, spec, [])
    result, finite = read_results(words, 8)
    z = expected(logits, spec, [], noise)[1] if after else logits.astype(np.float64)
    logp = z - z.max() - np.log(np.sum(np.exp(z - z.max())))
    order = sorted(range(V), key=lambda t: (-logp[t], t))[: 6 if after else 8]
    assert finite and result.token == token
    assert result.logprob == pytest.approx(logp[token], abs=1e-5)
    assert [t for t, _ in result.top] == order
    assert [x for _, x in result.top] == pytest.approx(logp[order].tolist(), abs=1e-5)


@pytest.mark.parametrize("extreme", [
    {"temperature": 1e-40}, {"temperature": 1e-38}, {"temperature": 1e-30, "top_p": 0.5},
    {"repetition_penalty": 1e-38}, {"repetition_penalty": 1e6, "temperature": 1e-38},
    {"repetition_penalty": 1e-38, "logit_bias": ((3, -100.0), (5, 100.0)), "top_k": 3},
    {"min_p": 1.0}, {"top_p": 1e-40}, {"frequency_penalty": 2.0, "temperature": 1e-20},
])  # fmt: skip
def test_extremes_that_are_allowed_give_numbers(extreme: dict[str, Any]) -> None:
    logits = (3 * np.random.default_rng(5).standard_normal(V)).astype(F)
    for scale in (1.0, 1e30):
        spec = lane(top_logprobs=5, logprobs_after_sampling=True, **extreme)
        result, finite = read_results(draw(logits * F(scale), spec, [5, 5])[1], 5)
        assert finite and np.isfinite(result.logprob) and result.top[0][1] <= 0
        if extreme.get("logit_bias"):
            assert result.token != 3


def test_a_forced_token_is_certain() -> None:
    """Its logprob after sampling is that of a distribution which holds nothing else."""
    limit = ReasoningLimit(max_tokens=0, starts_open=True, open_id=20, close_id=21)
    logits = np.zeros(V, F)
    logits[3] = 9
    spec = lane(top_k=1, reasoning=limit, top_logprobs=3, logprobs_after_sampling=True)
    result, finite = read_results(draw(logits, spec, [])[1], 3)
    assert (result.token, result.logprob, result.top) == (21, 0.0, ((21, 0.0),)) and finite


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_reported(bad: float) -> None:
    logits = np.zeros(V, F)
    logits[13] = bad
    assert not read_results(draw(logits, lane(), [])[1], None)[1]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([10, 11, 12, 20, 21, 22]), max_size=15),
    st.integers(0, 5), st.booleans(), st.booleans(),
)  # fmt: skip
def test_reasoning_limit(output: list[int], most: int, opened: bool, tool: bool) -> None:
    limit = ReasoningLimit(
        max_tokens=most, starts_open=opened, open_id=20, close_id=21,
        also_close_ids=(22,) if tool else (),
    )  # fmt: skip
    token = draw(np.zeros(V, F), lane(temperature=0.0, reasoning=limit), output)[0]
    forced = forced_token(limit, output)
    assert token == (0 if forced is None else forced)


def test_greedy_program_gives_the_same_token() -> None:
    logits = np.random.default_rng(1).standard_normal(V).astype(F)
    lanes = sampling.init_lanes(RUN)
    history = jnp.zeros((2, C), jnp.int32)
    token, words = sampling.sample(
        jnp.asarray(logits), lanes, history, jnp.int32(0), jnp.int32(3), greedy=True
    )
    assert int(token) == int(np.argmax(logits)) and np.asarray(words)[:2].tolist() == [token, 1]
