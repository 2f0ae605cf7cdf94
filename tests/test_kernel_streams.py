"""Residual streams between sublayers: kernels against their reference and against `hyper`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hyper, norm, streams
from tests import little_effort

T, N, D, L, P = 19, 2, 192, 2, 3
OUT = (2 + N) * N
SIZES = streams.Sizes(n=N, iters=3, hc_eps=1e-6, rms_eps=1e-6)


def normal(seed: int, *shape: int) -> jax.Array:
    """Random numbers, float32."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def pending(at: Any) -> streams.Pending:
    """Streams with the output of routed experts and a shared one to be written; some rows of it."""
    ids = jnp.asarray(np.random.default_rng(9).integers(-1, 2, (T, P)), jnp.int32)
    routed = jnp.where((ids.T >= 0)[:, :, None], normal(1, P, T, D), jnp.nan)  # never written
    return streams.Pending(
        normal(0, T, N * D).astype(jnp.bfloat16)[at], (routed[:, at], normal(2, 2, T, D)[:, at]),
        ids[at], jax.nn.sigmoid(normal(3, T, N))[at], jax.nn.softmax(normal(4, T, N, N))[at],
    )  # fmt: skip


FN, SCALE, BASE, NORM = (
    normal(5, L, OUT, N * D) / 4, normal(6, L, 3), normal(7, L, OUT), normal(8, L, D),
)  # fmt: skip


@functools.partial(little_effort.jit, static_argnames="backend")
def both(p: streams.Pending, fn: Any, backend: Any) -> tuple[Any, ...]:
    """Everything that the two kernels make."""
    x, mixed = streams.mix(p, fn, layer=1, backend=backend)
    got = streams.read(x, mixed, SCALE, BASE, NORM, layer=1, sizes=SIZES, backend=backend)
    head = streams.read_head(x, mixed, SCALE[0], BASE[0, :N], NORM[0], sizes=SIZES, backend=backend)
    return x, *got, head.astype(jnp.float32).sum(0)


def test_reference_is_hyper() -> None:
    p = pending(np.arange(T))
    x, h, post, comb, head = both(p, FN, backend="reference")
    assert p.ids_TP is not None
    routed = jnp.where((p.ids_TP.T >= 0)[:, :, None], p.parts[0], 0)
    y = (routed.sum(0) + p.parts[1].sum(0)).astype(jnp.bfloat16)
    old = p.streams_TC.reshape(T, N, D)
    new = hyper.write(old, y, p.post_TN, p.comb_TNN)
    np.testing.assert_array_equal(np.asarray(x), np.asarray(new.reshape(T, -1)))
    kwargs = {"hc_eps": SIZES.hc_eps, "rms_eps": SIZES.rms_eps}
    want, *maps = hyper.read(new, FN[1], SCALE[1], BASE[1], iters=3, **kwargs)
    for got, right in zip((post, comb), maps, strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(right), rtol=1e-5, atol=1e-6)
    want = norm.rms_norm(want, NORM[1], eps=SIZES.rms_eps)
    np.testing.assert_allclose(np.float32(h), np.float32(want), rtol=2e-2, atol=1e-3)
    hidden = hyper.collapse_head(new, FN[1, :N], SCALE[0], BASE[0, :N], **kwargs)
    want = norm.rms_norm(hidden, NORM[0], eps=SIZES.rms_eps)
    np.testing.assert_allclose(np.asarray(head), np.asarray(want), rtol=1e-4, atol=1e-4)


def test_kernels_agree_with_the_reference_and_rows_keep_their_bits() -> None:
    want = both(pending(np.arange(T)), FN, backend="reference")
    whole = both(pending(np.arange(T)), FN, backend="interpret")
    for a, b, tolerance in zip(whole, want, (1e-2, 2e-2, 1e-6, 1e-6, 1e-4), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=tolerance, atol=tolerance)
    at = np.random.default_rng(1).permutation(T)[:3]
    for a, b in zip(whole, both(pending(at), FN, backend="interpret"), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[at], np.asarray(b))


def test_kernels_miss_nothing() -> None:
    """Any map weight, and any stream of the row, shows in the maps."""
    p = pending(np.arange(3))
    before = both(p, FN, backend="interpret")
    for entry in ((1, 0, 0), (1, OUT - 1, N * D - 1)):
        after = both(p, FN.at[entry].add(1.0), backend="interpret")
        changed = [
            not np.array_equal(np.asarray(a), np.asarray(b))
            for a, b in zip(before, after, strict=True)
        ]
        assert changed[1] == (entry[1] == 0) and changed[3] == (entry[1] == OUT - 1)


def test_nothing_pending_leaves_the_streams_alone() -> None:
    x = normal(0, 5, N, D).astype(jnp.bfloat16)
    for backend in ("reference", "interpret"):
        p = streams.none(x, ((P, 1), (2, 0)))
        got, _ = streams.mix(p, FN, layer=0, backend=backend)  # type: ignore[arg-type]
        np.testing.assert_array_equal(np.asarray(got), np.asarray(x.reshape(5, -1)))


def test_what_has_no_kernel_says_so() -> None:
    p = pending(np.arange(3))
    with pytest.raises(ValueError, match="streams: shapes do not fit"):
        streams.mix(p, FN[:, :, :-1], layer=0, backend="interpret")
    wide = p._replace(streams_TC=p.streams_TC.astype(jnp.float32))
    with pytest.raises(NotImplementedError, match="streams: the kernel takes bfloat16 streams"):
        streams.mix(wide, FN, layer=0, backend="interpret")
