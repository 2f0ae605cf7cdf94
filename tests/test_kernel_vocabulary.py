"""Sampling of several rows by kernels: the definitions' tokens, and the same bits in any batch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds4jax import sampling
from ds4jax.config import RuntimeConfig, SamplingParams
from ds4jax.plan import LaneSpec
from pallas_kernels import vocabulary
from tests import little_effort

V = 300
LIMITS = [
    (0, 1.0), (5, 1.0), (0, 0.9), (0, 0.3), (40, 0.5), (1, 1e-6), (V, 0.999), (7, 1e-9), (2, 0.999),
]  # fmt: skip


def rows(seed: int = 0) -> Any:
    """Logits of a row for each of `LIMITS`: some banned, many of them equal in every second row."""
    z = 3 * np.random.default_rng(seed).standard_normal((len(LIMITS), V)).astype(np.float32)
    z[1::2] = np.round(z[1::2])
    z[:, 7:20] = -np.inf
    return jnp.asarray(z)


@functools.partial(little_effort.jit, static_argnames="backend")
def nucleus(z: Any, k: Any, p: Any, backend: Any) -> Any:
    return vocabulary.nucleus(z, k, p, backend=backend)


@functools.partial(little_effort.jit, static_argnames="backend")
def logprobs(z: Any, token: Any, wanted: Any, backend: Any) -> Any:
    return vocabulary.logprobs(z, token, wanted, 8, backend=backend)


@pytest.fixture(autouse=True)
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks a row."""
    monkeypatch.setattr(vocabulary, "BLOCK", 64)


@pytest.mark.parametrize("seed", range(3))
def test_nucleus(seed: int) -> None:
    z = rows(seed)
    k, p = (jnp.asarray(x) for x in zip(*LIMITS, strict=True))
    k, p = k.astype(jnp.int32), p.astype(jnp.float32)
    got, want = (np.asarray(nucleus(z, k, p, backend=b)) for b in ("interpret", "reference"))
    np.testing.assert_array_equal(got[0], z[0])  # nothing asked for
    for i in range(1, len(LIMITS)):
        kept, right = np.isfinite(got[i]), np.isfinite(want[i])
        np.testing.assert_array_equal(got[i][kept], np.asarray(z[i])[kept])
        if not np.array_equal(kept, right):  # only where the mass is top_p within rounding
            x = np.asarray(z[i], np.float64)
            order = sorted(range(V), key=lambda t: (-x[t], t))
            if LIMITS[i][0]:
                x[x < x[order[min(LIMITS[i][0], V) - 1]]] = -np.inf
            mass = np.cumsum(np.exp(x[order] - x.max()))
            assert np.min(np.abs(mass / mass[-1] - LIMITS[i][1])) < 1e-6
            assert np.sum(kept != right) == 1
    some = jnp.asarray([6, 1, 4])
    alone = nucleus(z[some], k[some], p[some], backend="interpret")
    np.testing.assert_array_equal(np.asarray(alone), got[np.asarray(some)])


def test_nucleus_leaves_equal_ones_by_id() -> None:
    z = jnp.zeros((3, V)).at[1, 100].set(1.0).at[2, 50:].set(-jnp.inf)
    got = nucleus(
        z, jnp.asarray([0, 3, 0], jnp.int32), jnp.asarray([0.02, 1.0, 0.5], jnp.float32),
        backend="interpret",
    )  # fmt: skip
    kept = [np.flatnonzero(np.isfinite(row)).tolist() for row in np.asarray(got)]
    assert kept == [list(range(6)), list(range(V)), list(range(25))]


def test_logprobs() -> None:
    z = rows()
    token = jnp.asarray(np.random.default_rng(5).integers(20, V, len(z)), jnp.int32)
    wanted = jnp.arange(len(z)) % 3 != 1
    got, want = (logprobs(z, token, wanted, backend=b) for b in ("interpret", "reference"))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[1], want[1])
    np.testing.assert_allclose(got[2], want[2], rtol=1e-5, atol=1e-6)
    assert np.all(np.asarray(got[1])[1::3] == -1)
    some = jnp.asarray([8, 3])
    alone = logprobs(z[some], token[some], wanted[some], backend="interpret")
    for a, b in zip(alone, got, strict=True):
        np.testing.assert_array_equal(a, np.asarray(b)[np.asarray(some)])


def test_few_logits() -> None:
    got = logprobs(
        jnp.asarray([[1.0, 3.0, -jnp.inf]]), jnp.asarray([1], jnp.int32), jnp.asarray([True]),
        backend="interpret",
    )  # fmt: skip
    assert np.asarray(got[1]).tolist() == [[1, 0, 2, -1, -1, -1, -1, -1]]


def test_rows_are_sampled_as_each_alone() -> None:
    """By kernels, all at once: what `sampling.sample` draws from each."""
    run = RuntimeConfig(max_ctx=40, num_slots=len(LIMITS))
    lanes, history = sampling.init_lanes(run), np.full((len(LIMITS) + 1, 40), 7, np.int32)
    for slot, (k, p) in enumerate(LIMITS):
        params = SamplingParams(
            seed=slot, top_k=k, top_p=p, temperature=0.0 if slot == 5 else 0.8,
            repetition_penalty=1.3 if slot == 3 else 1.0,
            top_logprobs=6 if slot % 2 else None, logprobs_after_sampling=slot == 3,
        )  # fmt: skip
        prompt = np.arange(30, 34, dtype=np.int32)
        spec = LaneSpec(prompt=prompt, sampling=params, max_output_tokens=20)
        lanes = sampling.set_lane(lanes, jnp.int32(slot), jnp.asarray(sampling.pack_lane(spec)))
        history[slot, :4] = spec.prompt
    slots = jnp.asarray([4, 0, 3, 8, 1, 5, 2, 7, 6], jnp.int32)
    z, pos = rows(9)[slots], jnp.full(slots.shape, 4, jnp.int32)
    got = little_effort.jit(
        functools.partial(sampling.sample_rows, greedy=False, backend="interpret")
    )(z, lanes, jnp.asarray(history), slots, pos)
    one = jax.jit(functools.partial(sampling.sample, greedy=False))
    for e in range(len(slots)):
        token, words = one(z[e], lanes, jnp.asarray(history), slots[e], pos[e])
        assert token == got[0][e], f"slot {slots[e]}"
        ids = slice(0, 2), slice(3, 3 + sampling.TOP)
        for part in ids:
            np.testing.assert_array_equal(words[part], got[1][e][part])
        floats = [2, *range(3 + sampling.TOP, sampling.RESULT_WORDS)]
        a, b = (np.asarray(w)[floats].view(np.float32) for w in (words, got[1][e]))
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
