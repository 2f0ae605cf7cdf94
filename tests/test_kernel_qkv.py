"""Between projections and attention: kernels against their reference, rows on their own."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import qkv, rope
from tests import little_effort
from tests.test_kernel_streams import normal

T, L, Q, D, R, RING = 18, 2, 32, 32, 16, 24
rng = np.random.default_rng(0)
RAW = normal(0, 3, 4, RING, D).astype(jnp.bfloat16)
POS = jnp.asarray(rng.permutation(T) + 100, jnp.int32)
SLOT = jnp.asarray(rng.integers(0, 3, T), jnp.int32)
CS = rope.cos_sin(jnp.asarray(rope.angle_tables(rope.inverse_frequencies(R, 1e4), 1024)), POS)
PROJECTED = qkv.Projected(
    normal(1, 3, T, Q), normal(2, 2, T, D),
    (qkv.Compress(normal(3, 2, T, 64), normal(4, 2, T, 64), normal(5, L, 4, 64)),
     qkv.Compress(normal(6, 1, T, 32), normal(7, 1, T, 32), normal(8, L, 4, 32))),
    normal(9, 2, T, 16),
)  # fmt: skip
HEADS = (normal(10, 1, T, 2 * 64), normal(11, 1, T, 3 * 32))


def rows(p: qkv.Projected, at: Any) -> qkv.Projected:
    """The projections of some rows."""
    compress = tuple(c._replace(values=c.values[:, at], gates=c.gates[:, at]) for c in p.compress)
    assert p.weight is not None
    return qkv.Projected(p.q[:, at], p.kv[:, at], compress, p.weight[:, at])


@functools.partial(little_effort.jit, static_argnames=("keep", "backend"))
def run(at: Any, keep: bool, backend: Any) -> tuple[Any, ...]:
    """All results, row by row but for the ring."""
    got = qkv.inputs(
        rows(PROJECTED, at), normal(12, L, Q), normal(13, L, D), RAW, SLOT[at], POS[at], CS[at],
        layer=1, ring_layer=2, keep=keep, weight_scale=0.3, eps=1e-6, backend=backend,
    )  # fmt: skip
    heads = qkv.heads(
        tuple(h[:, at] for h in HEADS), CS[at], ((64, True), (32, False)), eps=1e-6,
        backend=backend,
    )  # fmt: skip
    kv = got.ring[2, SLOT[at], POS[at] % RING] if keep else got.step_TD
    return got.ring, (got.q_TQ, kv, *got.states, got.weight_TI, *heads)


def test_kernels_agree_with_the_reference_and_rows_keep_their_bits() -> None:
    everything = jnp.arange(T)
    ring, want = run(everything, True, "reference")
    got_ring, whole = run(everything, True, "interpret")
    np.testing.assert_allclose(np.float32(got_ring), np.float32(ring), rtol=1e-2, atol=1e-2)
    for a, b in zip(whole, want, strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-2, atol=1e-2)
    # The rest of the ring, other layers included, is what it was.
    left = np.array(got_ring)
    left[2, SLOT, POS % RING] = np.asarray(RAW)[2, SLOT, POS % RING]
    np.testing.assert_array_equal(left, np.asarray(RAW))
    at = np.random.default_rng(1).permutation(T)[:3]
    same_ring, some = run(jnp.asarray(at), False, "interpret")
    np.testing.assert_array_equal(np.asarray(same_ring), np.asarray(RAW))
    for a, b in zip(whole, some, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[at], np.asarray(b))


def test_what_has_no_kernel_says_so() -> None:
    with pytest.raises(NotImplementedError, match="qkv: the kernel takes heads of a power of two"):
        qkv.heads((normal(0, 1, T, 48),), CS, ((24, True),), eps=1e-6, backend="interpret")
    with pytest.raises(NotImplementedError, match="qkv: the kernel takes bfloat16 rows"):
        qkv.inputs(
            PROJECTED, normal(12, L, Q), normal(13, L, D), RAW.astype(jnp.float32), SLOT, POS, CS,
            layer=0, ring_layer=0, keep=True, weight_scale=1.0, eps=1e-6, backend="interpret",
        )  # fmt: skip
