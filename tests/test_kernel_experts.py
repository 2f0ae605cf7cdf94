"""Routed experts: against NumPy in float64; rows are independent, dead slots cost nothing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from pallas_kernels import experts, packing
from tests import little_effort
from tests.test_kernel_dense import close, rows, weights
from tests.test_kernel_packing import unpack

LIMIT = 10.0


def oracle(
    x: npt.NDArray[Any],
    ids: npt.NDArray[np.int32],
    route: npt.NDArray[np.float32],
    w1: npt.NDArray[Any],
    w3: npt.NDArray[Any],
    w2: npt.NDArray[Any],
    first: int = 0,
) -> npt.NDArray[np.float64]:
    """The formula, pair by pair, in float64."""
    y = np.zeros(x.shape, np.float64)
    for t in range(x.shape[0]):
        for s in range(ids.shape[1]):
            e = ids[t, s] - first
            if not 0 <= e < w1.shape[0]:
                continue
            gate = np.minimum(w1[e].astype(np.float64) @ x[t], LIMIT)
            up = np.clip(w3[e].astype(np.float64) @ x[t], -LIMIT, LIMIT)
            h = gate / (1 + np.exp(-gate)) * up * route[t, s]
            y[t] += w2[e].astype(np.float64) @ h
    return y


def batch(t: int, experts_: int, slots: int, seed: int = 0) -> tuple[Any, Any]:
    """Distinct expert numbers per row, and weights."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(experts_)[:slots] for _ in range(t)]).astype(np.int32)
    return ids, rng.uniform(0.1, 1.5, ids.shape).astype(np.float32)


def packed(
    kind: tuple[str, str], e: int, f: int, m: int, seed: int = 0
) -> tuple[tuple[packing.QuantArray, packing.QuantArray], list[npt.NDArray[np.float32]]]:
    """Gate-and-up and down of `e` experts, and the three plain matrices."""
    w1, w3 = (weights(kind[0], (e, f, m), seed + i) for i in (1, 2))
    w2 = weights(kind[1], (e, m, f), seed + 3)
    plain = [np.asarray(packing.unpack(a)) for a in (w1, w3, w2)]
    return (packing.interleave(w1, w3), w2), plain


@pytest.mark.parametrize("first", [0, 3])
def test_reference_against_numpy(first: int) -> None:
    q, plain = packed(("rocmfp2_s40", "rocmfp3"), 5, 32, 64)
    x = rows(13, 64) * 0.02
    ids, route = batch(13, 9, 3)
    ids[4] = -1
    got = little_effort.jit(
        lambda x, ids, route: experts.experts(
            x, ids, route, *q, first_expert=first, limit=LIMIT, backend="reference"
        )
    )(x, ids, route)
    close(got, oracle(x, ids, route, *plain, first=first), 1e-5)
    assert not np.asarray(got)[4].any()


def test_reference_rows_do_not_depend_on_their_neighbours() -> None:
    q, _ = packed(("mxfp4", "mxfp4"), 6, 64, 32)
    x = rows(40, 32) * 0.02
    ids, route = batch(40, 6, 2)
    run = jax.jit(
        lambda x, ids, route: experts.experts(x, ids, route, *q, limit=LIMIT, backend="reference")
    )
    whole = np.asarray(run(x, ids, route))
    for t in (1, 24):
        at = np.random.default_rng(t).permutation(40)[:t]
        np.testing.assert_array_equal(np.asarray(run(x[at], ids[at], route[at])), whole[at])


def test_layers_of_a_stack() -> None:
    parts = [packed(("rocmfp4", "rocmfp4"), 3, 32, 32, seed)[0] for seed in (0, 10)]
    stacked = [packing.stack(p) for p in zip(*parts, strict=True)]
    x = rows(8, 32) * 0.02
    ids, route = batch(8, 3, 2)
    args = (jnp.asarray(x), jnp.asarray(ids), jnp.asarray(route))
    for i in (0, 1):
        one = experts.experts(*args, *parts[i], limit=LIMIT, backend="reference")
        many = experts.experts(*args, *stacked, layer=i, limit=LIMIT, backend="reference")
        np.testing.assert_array_equal(np.asarray(one), np.asarray(many))


def test_shapes_that_disagree_are_named() -> None:
    q, _ = packed(("rocmfp4", "rocmfp4"), 3, 32, 64)
    ids, route = batch(8, 3, 2)
    with pytest.raises(ValueError, match="shapes do not fit: x \\[8, 32\\]"):
        experts.experts(jnp.zeros((8, 32)), ids, route, *q, limit=LIMIT, backend="reference")
    with pytest.raises(ValueError, match="need \\[L, E, N, K\\]"):
        experts.experts(
            jnp.zeros((8, 64)), ids, route, *q, layer=0, limit=LIMIT, backend="reference"
        )


EXPERT_TILE = experts.Tile(up_rows=32, up_warps=1, down_rows=32, down_warps=1)


@pytest.mark.parametrize(
    ("kind", "f", "tolerance"),
    [
        (("rocmfp2_s40", "rocmfp3"), 64, 1e-5),
        pytest.param(("mxfp4", "mxfp4"), 64, 1e-5, marks=pytest.mark.slow),
        pytest.param(("nvfp4", "nvfp4"), 64, 1e-5, marks=pytest.mark.slow),
        # Kernels round these weights to bfloat16.
        pytest.param(("iq2_xxs", "q2_k"), 256, 1e-2, marks=pytest.mark.slow),
    ],
)
def test_emulated_kernels_against_the_reference(
    kind: tuple[str, str], f: int, tolerance: float
) -> None:
    q, _ = packed(kind, 4, f, 256)
    x = jnp.asarray(rows(20, 256) * 0.02, jnp.bfloat16)
    ids, route = batch(20, 6, 3)
    ids[5] = -1
    ids, route = jnp.asarray(ids), jnp.asarray(route)

    def run(t: int, backend: str) -> Any:
        call = little_effort.jit(
            lambda x, ids, route: experts.experts(
                x, ids, route, *q, first_expert=1, limit=LIMIT, backend=backend, tile=EXPERT_TILE
            )
        )
        return np.asarray(call(x[:t], ids[:t], route[:t]))

    want = run(20, "reference")
    whole = run(20, "interpret")
    close(whole, want.astype(np.float64), tolerance)
    # Few rows find their groups another way; the bits are the same.
    np.testing.assert_array_equal(run(7, "interpret"), whole[:7])


def test_groups_hold_every_live_pair_once() -> None:
    ids, _ = batch(16, 9, 6, seed=4)
    ids[3] = -1
    num, first = 5, 2
    groups = experts.group(jnp.asarray(ids), first, num, 16)
    held = (ids >= first) & (ids < first + num)
    live = np.flatnonzero(held.reshape(-1))
    used = int(groups.used)
    pairs = np.asarray(groups.pair)[:used]
    taken = [(int(e), int(p)) for e, row in zip(groups.expert, pairs, strict=False) for p in row]
    taken = [(e, p) for e, p in taken if p < ids.size]
    assert sorted(p for _, p in taken) == live.tolist()
    assert all(ids.reshape(-1)[p] - first == e for e, p in taken)
    assert (np.asarray(groups.pair)[used:] >= ids.size).all()
    assert used == len(np.unique(ids.reshape(-1)[live]))


@pytest.mark.parametrize("t", [1, 7, 20])
def test_slots_held_elsewhere_are_marked(t: int) -> None:
    q, _ = packed(("rocmfp4", "rocmfp4"), 4, 64, 256)
    ids, route = batch(t, 6, 3, seed=4)
    ids[t - 1, 0] = -1
    x = jnp.asarray(rows(t, 256) * 0.02, jnp.bfloat16)
    _, local = little_effort.jit(
        lambda x, ids, route: experts.by_slot(
            x, ids, route, *q, first_expert=1, limit=LIMIT, backend="interpret", tile=EXPERT_TILE
        )
    )(x, jnp.asarray(ids), jnp.asarray(route))
    held = (ids >= 1) & (ids < 5)
    np.testing.assert_array_equal(local, np.where(held, ids - 1, -1))


def test_interleave_keeps_every_weight() -> None:
    for name in ("rocmfp4", "q4_k", "nvfp4", "hf_fp8_e4m3_block128"):
        if name.startswith("hf"):
            data = np.random.default_rng(0).integers(0, 0x70, (2, 128, 128), dtype=np.uint8)
            scale = np.full((2, 1, 1), 0.5, np.float32)
            scale[1] = 2.0
            a, b = (packing.pack(name, d, scale_f32=s) for d, s in zip(data, scale, strict=True))
        elif name == "nvfp4":
            data = np.random.default_rng(0).integers(0x30, 0x48, (2, 16, 36), dtype=np.uint8)
            a, b = (
                packing.pack(name, d, factor=f)
                for d, f in zip(data, np.float32([2.0, 0.5]), strict=True)
            )
        else:
            a, b = (weights(name, (16, 256), seed) for seed in (1, 2))
        both = np.asarray(unpack(packing.interleave(a, b)))
        split = both.reshape(-1, 2, 8, both.shape[-1])
        for i, part in enumerate((a, b)):
            want = np.asarray(unpack(part))
            np.testing.assert_array_equal(split[:, i].reshape(want.shape), want)
