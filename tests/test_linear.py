"""Products of the reference backend: right, and the same bits for a row whatever comes with it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from ds4jax import linear
from pallas_kernels import packing

ROWS, TOP, EXPERTS, WIDE, INNER, LIMIT = 7, 3, 6, 64, 32, 2.0


@functools.cache
def weights() -> tuple[npt.NDArray[np.float32], ...]:
    rng = np.random.default_rng(0)
    shapes = ((EXPERTS, INNER, WIDE), (EXPERTS, INNER, WIDE), (EXPERTS, WIDE, INNER))
    return tuple(rng.integers(-127, 128, s).astype(np.float32) / np.float32(512) for s in shapes)


@functools.cache
def stacks(form: str) -> tuple[Any, ...]:
    """The same weights as the model keeps them; the packed ones lose nothing."""
    if form == "plain":
        return weights()
    packed = []
    for w in weights():
        blocks = w.reshape(*w.shape[:-1], -1, 32)
        scale = np.full((*blocks.shape[:-1], 1), 1 / 512, np.float16).view(np.uint8)
        codes = np.round(blocks * 512).astype(np.int8).view(np.uint8)
        rows_ = np.concatenate([scale, codes], axis=-1).reshape(*w.shape[:-1], -1)
        packed.append(packing.pack("q8_0", jnp.asarray(rows_)))
    return tuple(packed)


@functools.cache
def rows() -> tuple[npt.NDArray[Any], ...]:
    """Inputs, experts (no two of a row are equal) and routing weights."""
    rng = np.random.default_rng(1)
    x = 2 * rng.standard_normal((ROWS, WIDE)).astype(np.float32)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP] for _ in range(ROWS)]).astype(np.int32)
    return x, ids, rng.random((ROWS, TOP), np.float32)


@functools.partial(jax.jit, static_argnames="first")
def experts(x: Any, ids: Any, share: Any, weights: Any, first: int = 0) -> jax.Array:
    return linear.routed_experts(x, ids, share, *weights, first_expert=first, limit=LIMIT)


def expected(first: int = 0, last: int = EXPERTS) -> npt.NDArray[np.float64]:
    """By the definition, in float64, experts first .. last - 1 only."""
    x, ids, share = rows()
    w1, w3, w2 = (w.astype(np.float64) for w in weights())
    out = np.zeros((ROWS, WIDE))
    for t in range(ROWS):
        for e, weight in zip(ids[t], share[t], strict=True):
            if first <= e < last:
                g, u = np.minimum(w1[e] @ x[t], LIMIT), np.clip(w3[e] @ x[t], -LIMIT, LIMIT)
                out[t] += w2[e] @ (g / (1 + np.exp(-g)) * u * weight)
    return out


@pytest.mark.parametrize("form", ["plain", "packed"])
def test_routed_experts_follow_the_definition(form: str) -> None:
    got = np.asarray(experts(*rows(), stacks(form)))
    np.testing.assert_allclose(got, expected(), atol=2e-6)


def test_a_device_adds_the_experts_that_it_owns() -> None:
    for first, last in ((0, 2), (2, EXPERTS)):
        got = experts(*rows(), tuple(w[first:last] for w in weights()), first=first)
        np.testing.assert_allclose(np.asarray(got), expected(first, last), atol=2e-6)


@pytest.mark.parametrize("form", ["plain", "packed"])
@pytest.mark.parametrize("seed", range(3))
def test_a_row_keeps_its_bits_among_any_others(seed: int, form: str) -> None:
    """Rows in another order, and each alone among rows that are not live or full of NaN."""
    x, ids, share = rows()
    whole = np.asarray(experts(x, ids, share, stacks(form)))
    order = np.random.default_rng(seed).permutation(ROWS)
    mixed = np.asarray(experts(x[order], ids[order], share[order], stacks(form)))
    assert np.array_equal(mixed, whole[order])
    t, place = order[:2]
    alone = np.full_like(ids, -1), np.full_like(x, np.nan)
    alone[0][place], alone[1][place] = ids[t], x[t]
    weight = np.broadcast_to(share[t], share.shape)
    got = np.asarray(experts(alone[1], alone[0], weight, stacks(form)))
    assert np.array_equal(got[place], whole[t])
    assert not np.delete(got, place, axis=0).any()
