"""Expert selection in one kernel: exact, ties to the lower number, rows on their own."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import router
from tests import little_effort
from tests.test_kernel_streams import normal

T, E, F, K = 18, 16, 64, 5
GATE = normal(0, 2, T, E).at[:, 3].set(0.25)  # a row of ties
SHARED = router.Shared(normal(1, 2, T, F), normal(2, 2, T, F), 1.5)
BIAS = normal(3, 2, E).at[1].set(jnp.tile(normal(4, 4), 4))
rng = np.random.default_rng(0)
TABLE = jnp.asarray(np.stack([rng.permutation(E)[:6] for _ in range(100)]).reshape(2, 50, 6))
TOKEN = jnp.asarray(rng.integers(0, 50, T), jnp.int32)
LIVE = jnp.asarray(rng.random(T) < 0.8).at[3].set(True)


@functools.partial(little_effort.jit, static_argnames=("hashed", "backend"))
def run(at: Any, hashed: bool, backend: Any) -> tuple[Any, ...]:
    """Numbers, weights, activation."""
    shared = SHARED._replace(gate=SHARED.gate[:, at], up=SHARED.up[:, at])
    return router.select(
        GATE[:, at], shared, bias_LE=None if hashed else BIAS,
        table_LVK=TABLE.astype(jnp.int32) if hashed else None, token_T=TOKEN[at], live_T=LIVE[at],
        layer=1, top_k=K, scaling=1.5, normalise=True, backend=backend,
    )  # fmt: skip


@pytest.mark.parametrize("hashed", [False, True])
def test_kernel(hashed: bool) -> None:
    every = jnp.arange(T)
    ids, weights, h = (np.asarray(a) for a in run(every, hashed, "interpret"))
    z = np.asarray(GATE, np.float64).sum(0)
    s = np.sqrt(np.log1p(np.exp(z)))
    if hashed:
        right = np.asarray(TABLE)[1, np.asarray(TOKEN), :K]
    else:
        # Stable: of equal scores the lower number comes first.
        biased = np.float32(s) + np.asarray(BIAS)[1]
        right = np.argsort(-biased, axis=1, kind="stable")[:, :K]
        np.testing.assert_array_equal(ids[3], right[3])
    np.testing.assert_array_equal(ids, np.where(np.asarray(LIVE)[:, None], right, -1))
    chosen = np.take_along_axis(s, right, 1)
    np.testing.assert_allclose(weights, 1.5 * chosen / chosen.sum(1, keepdims=True), rtol=1e-5)
    reference = run(every, hashed, "reference")
    np.testing.assert_array_equal(ids, np.asarray(reference[0]))
    np.testing.assert_allclose(np.float32(h), np.float32(reference[2]), rtol=1e-2)
    at = np.random.default_rng(1).permutation(T)[:3]
    for a, b in zip((ids, weights, h), run(jnp.asarray(at), hashed, "interpret"), strict=True):
        np.testing.assert_array_equal(a[at], np.asarray(b))


def test_what_has_no_kernel_says_so() -> None:
    with pytest.raises(NotImplementedError, match="router: the kernel takes a power of two"):
        router.select(
            GATE[:, :, :9], SHARED, bias_LE=None, table_LVK=None, token_T=TOKEN, live_T=LIVE,
            layer=0, top_k=K, scaling=1.0, normalise=True, backend="interpret",
        )  # fmt: skip
