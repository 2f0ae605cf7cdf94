"""Compressors of a batch of rows: kernels against NumPy, and bits that depend on the row alone."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from pallas_kernels import compressed_rows as op
from pallas_kernels import compressor
from tests import little_effort

DIMS = {4: (48, 32), 128: (48,)}
"""Widths of the compressors of a layer."""
ROPE, SLOTS, PAGES, ROWS, EPS = 16, 4, 20, 12, 1e-6
RING = {4: 32, 128: 144}
TOLERANCE = 1e-2
"""Rows are rounded to bfloat16 before the norm, after it and after the rotation."""


class Case(NamedTuple):
    """Operands of one call."""

    states: tuple[op.State, ...]
    rows: op.Rows
    table: Any
    cs: Any


def layout(runs: list[tuple[int, int, int]]) -> op.Rows:
    """Rows of runs (slot, first position, count), padded to `ROWS`."""
    out: list[tuple[int, int, int, int]] = []
    for slot, first, count in runs:
        out += [(slot, first + i, i, count - 1 - i) for i in range(count)]
    out += [(SLOTS, 0, 0, 0)] * (ROWS - len(out))
    return op.Rows(*(jnp.asarray(a, jnp.int32) for a in zip(*out, strict=True)))


RUNS = {
    # From the start over two ends; one end alone; in the middle of a page; no end.
    4: [(1, 0, 8), (0, 127, 1), (3, 514, 2), (2, 4, 1)],
    128: [(1, 124, 5), (0, 383, 1), (3, 638, 3), (2, 0, 1)],
}


def case(ratio: int, runs: list[tuple[int, int, int]] | None = None, fill: float = 0.0) -> Case:
    """Histories of every slot; ring entries that no window may read hold `fill`."""
    rng = np.random.default_rng(ratio)
    rows = layout(runs or RUNS[ratio])
    states = []
    for dim in DIMS[ratio]:
        c = dim * compressor.overlap(ratio)
        ring = np.full((2, SLOTS + 1, RING[ratio], 2, c), fill, np.float32)
        values = rng.standard_normal((SLOTS + 1, 1024, 2, c)).astype(np.float32)
        values[:, :, 1] *= 3
        count = compressor.overlap(ratio) * ratio
        for s, p, r in zip(*(np.asarray(a) for a in (rows.slot, rows.pos, rows.run)), strict=True):
            past = np.arange(max(0, p - r - count + 1), p - r)
            ring[1, s, past % RING[ratio]] = values[s, past]
        step = values[np.asarray(rows.slot), np.asarray(rows.pos)]
        pool = np.zeros((2, (PAGES + 1) * 128 // ratio, dim), np.float32)
        norm = rng.uniform(0.5, 2, (3, dim)).astype(np.float32)
        states.append(
            op.State(
                jnp.asarray(ring), jnp.asarray(pool, jnp.bfloat16), jnp.asarray(step),
                jnp.asarray(norm),
            )
        )  # fmt: skip
    table = np.stack([rng.permutation(PAGES)[:8] for _ in range(SLOTS + 1)]).astype(np.int32)
    first = np.asarray(rows.pos) // ratio * ratio
    angle = first[:, None] * np.asarray([0.3, 1.1, 0.7, 0.01, 2.0, 0.5, 0.9, 1.7])
    cs = jnp.asarray(np.stack([np.cos(angle), np.sin(angle)], 1), jnp.float32)
    return Case(tuple(states), rows, jnp.asarray(table), cs)


def oracle(c: Case, ratio: int, which: int) -> dict[tuple[int, int], npt.NDArray[np.float64]]:
    """Finished rows in float64 by slot and number."""
    s, overlap = c.states[which], compressor.overlap(ratio)
    dim, out = DIMS[ratio][which], {}
    # NumPy from here on: JAX would compile every single index.
    ring, step, norm, cs = (
        np.asarray(a, np.float64) for a in (s.ring, s.step_T2C, s.norm_ND, c.cs)
    )
    slots, poss, runs = (np.asarray(a) for a in (c.rows.slot, c.rows.pos, c.rows.run))
    for t, (slot, pos, run) in enumerate(zip(slots, poss, runs, strict=True)):
        if slot == SLOTS or (pos + 1) % ratio:
            continue
        window = []
        for back in range(overlap * ratio - 1, -1, -1):
            if back > pos:
                continue
            src = step[t - back] if back <= run else ring[1, slot, (pos - back) % RING[ratio]]
            half = dim if overlap == 2 and back < ratio else 0
            window.append(src[:, half : half + dim])
        value, gate = np.stack(window, 1)
        weight = np.exp(gate - gate.max(0))
        row = (weight * value).sum(0) / weight.sum(0)
        row = row / np.sqrt((row * row).mean() + EPS) * norm[2]
        a, b = row[dim - ROPE :: 2], row[dim - ROPE + 1 :: 2]
        cos, sin = cs[t]
        turned = np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(-1)
        out[int(slot), int(pos) // ratio] = np.concatenate([row[: dim - ROPE], turned])
    return out


@functools.cache
def _program(ratio: int, chunk: bool, backend: Any) -> Any:
    def run(c: Case) -> Any:
        return op.update(
            c.states, c.rows, c.table, c.cs, layer=2, index=1, ratio=ratio, eps=EPS, chunk=chunk,
            backend=backend,
        )  # fmt: skip

    return little_effort.jit(run)


def update(c: Case, ratio: int, *, chunk: bool = False, backend: str = "interpret") -> Any:
    """Rings and pools as NumPy arrays, trash left out (the reference writes there)."""
    got = _program(ratio, chunk, backend)(c)
    pages = PAGES * 128 // ratio
    return [(np.asarray(r)[:, :SLOTS], np.asarray(p, np.float32)[:, :pages]) for r, p in got]


def row_at(c: Case, pool: Any, slot: int, number: int, ratio: int) -> Any:
    """A row of a pool."""
    per_page = 128 // ratio
    return pool[1, np.asarray(c.table)[slot, number // per_page] * per_page + number % per_page]


RATIOS = [4, pytest.param(128, marks=pytest.mark.slow)]


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_rows_and_states(ratio: int, backend: str) -> None:
    c = case(ratio)
    for which, (ring, pool) in enumerate(update(c, ratio, backend=backend)):
        want, dim = oracle(c, ratio, which), DIMS[ratio][which]
        assert len(want) == {4: 4, 128: 3}[ratio]
        for (slot, number), row in want.items():
            got = row_at(c, pool, slot, number, ratio)
            assert np.linalg.norm(got - row) < TOLERANCE * np.linalg.norm(row)
        # Nothing else was written: neither other rows nor another layer.
        assert np.count_nonzero(np.abs(pool).sum(-1)) == len(want)
        expected = np.array(c.states[which].ring)[:, :SLOTS]
        step = np.asarray(c.states[which].step_T2C)
        for t, (slot, pos) in enumerate(
            zip(np.asarray(c.rows.slot), np.asarray(c.rows.pos), strict=True)
        ):
            if slot < SLOTS:
                expected[1, slot, pos % RING[ratio]] = step[t]
        np.testing.assert_array_equal(ring, expected)
        assert ring.shape[-1] == dim * compressor.overlap(ratio)


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_row_depends_on_itself_alone(ratio: int) -> None:
    """One row a step or all at once, first or last, ring before or after the step."""
    whole = case(ratio, [(2, 0, 5), (1, 124, 4)])
    want = update(whole, ratio)
    states, rows = whole.states, whole.rows
    for t in (5, 0, 6, 1, 2, 7, 8, 3, 4):
        # Row t of the batch alone, in another place, the others padding.
        place = (7 * t) % ROWS
        one = op.Rows(*(jnp.full(ROWS, pad, jnp.int32) for pad in (SLOTS, 0, 0, 0)))
        one = one._replace(
            slot=one.slot.at[place].set(rows.slot[t]), pos=one.pos.at[place].set(rows.pos[t])
        )
        move = jnp.zeros(ROWS, jnp.int32).at[place].set(t)
        c = Case(
            tuple(s._replace(step_T2C=b.step_T2C[move])
                  for s, b in zip(states, whole.states, strict=True)),
            one, whole.table, whole.cs[move],
        )  # fmt: skip
        got = _program(ratio, False, "interpret")(c)
        states = tuple(s._replace(ring=r, pool=p) for s, (r, p) in zip(states, got, strict=True))
    pages = PAGES * 128 // ratio
    for s, (ring, pool) in zip(states, want, strict=True):
        np.testing.assert_array_equal(np.asarray(s.ring)[:, :SLOTS], ring)
        np.testing.assert_array_equal(np.asarray(s.pool, np.float32)[:, :pages], pool)


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [4, 128])
def test_chunks_and_stale_entries(ratio: int) -> None:
    c = case(ratio)
    want = update(c, ratio)
    for got in (update(c, ratio, chunk=True), update(case(ratio, fill=np.nan), ratio)):
        for (ring, pool), (_, want_pool) in zip(got, want, strict=True):
            np.testing.assert_array_equal(pool, want_pool)
            assert np.isfinite(ring[1, 2, int(c.rows.pos[-1]) % RING[ratio]]).any()
    for (ring, _), (want_ring, _) in zip(update(c, ratio, chunk=True), want, strict=True):
        np.testing.assert_array_equal(ring, want_ring)


@pytest.mark.slow
def test_a_chunk_longer_than_the_ring() -> None:
    """The ring keeps the last rows; every window is pooled before they overwrite it."""
    runs = [(1, 2, ROWS)]
    c = case(4, runs)
    short = Case(tuple(s._replace(ring=s.ring[:, :, :8]) for s in c.states), c.rows, c.table, c.cs)
    # A ring of eight entries, filled as one of 32 is.
    past = tuple(
        s._replace(ring=s.ring.at[:, 1, 0:2].set(b.ring[:, 1, 0:2]))
        for s, b in zip(short.states, c.states, strict=True)
    )
    got = update(short._replace(states=past), 4, chunk=True)
    want = update(c, 4, chunk=True)
    for (ring, pool), (_, want_pool), s in zip(got, want, c.states, strict=True):
        np.testing.assert_array_equal(pool, want_pool)
        for t in range(ROWS - 8, ROWS):
            np.testing.assert_array_equal(ring[1, 1, (2 + t) % 8], s.step_T2C[t])


def test_what_there_is_no_kernel_for() -> None:
    c = case(4)
    wide = tuple(s._replace(pool=s.pool.astype(jnp.float32)) for s in c.states)
    with pytest.raises(NotImplementedError, match="float32 states and bfloat16 rows, not float32"):
        update(c._replace(states=wide), 4)
    with pytest.raises(ValueError, match="shapes do not fit ratio 128: ring \\[2, 5, 32, 2, 96\\]"):
        update(c, 128)
