"""Attention over the cache: kernels against NumPy, and bits that depend on the row alone."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from pallas_kernels import cached_attention as op
from pallas_kernels import indexer
from tests import little_effort

HEADS, DIM, ROPE, WINDOW, RING, SLOTS, PAGES = 20, 48, 16, 100, 112, 4, 90
TOP_K = 70
TILE = op.Tile(width=16)
WHOLE = op.Tile(width=16, channels=16, grid_rows=0)
TOLERANCE = 1e-2
"""Weights and results are rounded to bfloat16: 2^-8 each of a row's norm, at most."""

POSITIONS = {
    0: [0, 5, 63, 64, 99, 500],
    # Rows seen: 0, 1, 32 (one page), 64 (one split), 65, and more than are selected.
    4: [0, 4, 127, 256, 262, 1000],
    # Rows seen: 0, 1, 64 (one split), 65, 70, 3.
    128: [3, 130, 64 * 128 + 5, 65 * 128, 70 * 128 + 127, 400],
}
SLOT = [2, 0, 1, 3, 2, 0]


class Case(NamedTuple):
    """Operands of one call."""

    q: Any
    sink: Any
    window: op.Window
    comp: op.Compressed | None
    cs: Any


def case(ratio: int, fill: float = 0.0) -> Case:
    """Six rows at the places above; what no row may read holds `fill`."""
    rng = np.random.default_rng(ratio)
    pos, slot = np.asarray(POSITIONS[ratio], np.int32), np.asarray(SLOT, np.int32)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    q, raw = normal(len(pos), HEADS, DIM), np.array(normal(2, SLOTS + 1, RING, DIM))
    used = np.zeros(raw.shape[:3], bool)
    for s, p in zip(slot, pos, strict=True):
        used[1, s, np.arange(max(0, p - WINDOW + 1), p + 1) % RING] = True
    raw[~used] = fill
    sink = jnp.asarray(rng.standard_normal((3, HEADS)), jnp.float32)
    comp = None
    if ratio:
        page_rows = 128 // ratio
        visible = (pos + 1) // ratio
        table = np.stack([rng.permutation(PAGES)[:72] for _ in range(SLOTS + 1)]).astype(np.int32)
        pool = np.array(normal(2, (PAGES + 1) * page_rows, DIM))
        used = np.zeros(pool.shape[:2], bool)
        ids = np.full((len(pos), TOP_K), indexer.NONE, np.int32)
        for t, (s, v) in enumerate(zip(slot, visible, strict=True)):
            seen = np.arange(v)
            if ratio == 4 and v > TOP_K:
                seen = np.sort(rng.permutation(v)[:TOP_K])
            ids[t, : min(v, TOP_K)] = seen[:TOP_K]
            used[1, table[s, seen // page_rows] * page_rows + seen % page_rows] = True
        pool[~used] = fill
        comp = op.Compressed(
            jnp.asarray(pool), 1, jnp.asarray(table), jnp.asarray(visible, jnp.int32),
            jnp.asarray(ids) if ratio == 4 else None,
        )  # fmt: skip
    angle = rng.uniform(0, 6, (len(pos), ROPE // 2))
    cs = jnp.asarray(np.stack([np.cos(angle), np.sin(angle)], 1), jnp.float32)
    window = op.Window(jnp.asarray(raw), 1, jnp.asarray(slot), jnp.asarray(pos))
    return Case(q, sink, window, comp, cs)


def oracle(c: Case, *, without: int | None = None) -> npt.NDArray[np.float64]:
    """The formula in float64, row by row; `without` leaves out one key of every row."""
    q, ring, pos = (np.asarray(a, np.float64) for a in (c.q, c.window.ring, c.window.pos_T))
    slot, out = np.asarray(c.window.slot_T), np.zeros(q.shape)
    for t, p in enumerate(pos.astype(int)):
        keys = [ring[1, slot[t], j % RING] for j in range(max(0, p - WINDOW + 1), p + 1)]
        if c.comp is not None:
            pool, table = np.asarray(c.comp.pool, np.float64), np.asarray(c.comp.table)
            rows = np.arange(np.asarray(c.comp.visible_T)[t])
            per_page = 1
            if c.comp.selected_TK is not None:
                rows, per_page = np.asarray(c.comp.selected_TK)[t], 32
                rows = rows[rows != indexer.NONE]
            at = table[slot[t], rows // per_page] * per_page + rows % per_page
            keys = [*pool[1, at], *keys]
        if without is not None:
            del keys[without]
        k = np.asarray(keys).reshape(-1, DIM)
        scores = np.concatenate([q[t] @ k.T * DIM**-0.5, np.asarray(c.sink)[2][:, None]], axis=1)
        weight = np.exp(scores - scores.max(axis=1, keepdims=True))
        weight = weight / weight.sum(axis=1, keepdims=True)
        o = weight[:, :-1] @ k
        pair = o[:, DIM - ROPE :].reshape(HEADS, -1, 2)
        cos, sin = np.asarray(c.cs, np.float64)[t]
        turned = [pair[..., 0] * cos + pair[..., 1] * sin, pair[..., 1] * cos - pair[..., 0] * sin]
        out[t] = np.concatenate([o[:, : DIM - ROPE], np.stack(turned, -1).reshape(HEADS, -1)], 1)
    return out


def error(got: Any, want: npt.NDArray[np.float64]) -> float:
    """Largest error of a row and head over its norm."""
    got = np.asarray(got, np.float64)
    return float(np.max(np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)))


@functools.cache
def _program(backend: Any, tile: op.Tile | None) -> Any:
    def run(c: Case) -> Any:
        return op.attend(
            c.q, c.sink, c.window, c.comp, layer=2, size=WINDOW, cs_TR=c.cs, backend=backend,
            tile=tile,
        )[0]  # fmt: skip

    return little_effort.jit(run)


def attend(c: Case, tile: op.Tile | None = TILE, backend: str = "interpret") -> Any:
    """Result of the emulated kernel."""
    return np.asarray(_program(backend, tile)(c))


def rows_of(c: Case, at: Any) -> Case:
    """The rows `at`, in that order."""
    comp = c.comp
    if comp is not None:
        ids = None if comp.selected_TK is None else comp.selected_TK[at]
        comp = comp._replace(visible_T=comp.visible_T[at], selected_TK=ids)
    window = c.window._replace(slot_T=c.window.slot_T[at], pos_T=c.window.pos_T[at])
    return Case(c.q[at], c.sink, window, comp, c.cs[at])


RATIOS = [4, pytest.param(128, marks=pytest.mark.slow), pytest.param(0, marks=pytest.mark.slow)]


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_reference(ratio: int) -> None:
    c = case(ratio)
    want = oracle(c)
    assert error(attend(c, None, "reference"), want) < TOLERANCE
    # The tolerance sees one key that is left out, in every row, be it the first or the last.
    for key in (0, -1):
        fewer = oracle(c, without=key)
        assert min(error(a[None], b[None]) for a, b in zip(fewer, want, strict=True)) > TOLERANCE


@pytest.mark.parametrize("ratio", RATIOS)
def test_kernel(ratio: int) -> None:
    c = case(ratio)
    got = attend(c)
    assert error(got, oracle(c)) < TOLERANCE
    # All splits in one program: the same bits.
    np.testing.assert_array_equal(attend(c, WHOLE), got)


@pytest.mark.slow
def test_more_heads_and_channels_of_a_program() -> None:
    c = case(4)
    for tile in (op.Tile(heads=32, width=16), op.Tile(width=16, grid_rows=0)):
        np.testing.assert_array_equal(attend(c, tile), attend(c))


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_row_depends_on_itself_alone(ratio: int) -> None:
    c = case(ratio)
    got = attend(c)
    order = np.random.default_rng(1).permutation(6)
    np.testing.assert_array_equal(attend(rows_of(c, order)), got[order])
    # The others as padding, which sees nothing.
    trash = jnp.where(jnp.arange(6) == 3, c.window.slot_T, SLOTS)
    masked = c._replace(window=c.window._replace(slot_T=trash))
    if c.comp is not None:
        visible = jnp.where(jnp.arange(6) == 3, c.comp.visible_T, 0)
        masked = masked._replace(comp=c.comp._replace(visible_T=visible))
    np.testing.assert_array_equal(attend(masked)[3], got[3])
    few = np.asarray([4, 2])
    np.testing.assert_array_equal(attend(rows_of(c, few)), got[few])


@pytest.mark.parametrize("ratio", RATIOS)
def test_nothing_else_is_read(ratio: int) -> None:
    """Stale rows, free pages and the trash may hold anything."""
    for tile in (TILE, WHOLE):
        want = attend(case(ratio), tile)
        assert np.isfinite(np.asarray(want, np.float32)).all()
        np.testing.assert_array_equal(attend(case(ratio, fill=np.nan), tile), want)


def step_cases() -> tuple[Case, Case]:
    """Five rows of slot 0 and one of slot 3: written to the ring, and in the step only."""
    c = rows_of(case(0), np.asarray([5] * 6))
    rng = np.random.default_rng(7)
    run = jnp.asarray([0, 1, 2, 3, 4, 0], jnp.int32)
    slot, pos = (
        jnp.asarray([0] * 5 + [3], jnp.int32),
        jnp.asarray([*range(498, 503), 30], jnp.int32),
    )
    step = jnp.asarray(rng.standard_normal((6, DIM)), jnp.bfloat16)
    ring = jnp.asarray(rng.standard_normal(c.window.ring.shape), jnp.bfloat16)
    written = ring.at[1, slot, pos % RING].set(step)
    return (
        c._replace(window=op.Window(written, 1, slot, pos)),
        c._replace(window=op.Window(ring, 1, slot, pos, step, run)),
    )


def test_rows_of_the_step_that_the_ring_does_not_hold_yet() -> None:
    written, chunk = step_cases()
    want = attend(written, WHOLE)
    assert error(want, oracle(written)) < TOLERANCE
    np.testing.assert_array_equal(attend(chunk, WHOLE), want)
    np.testing.assert_array_equal(attend(chunk, TILE), want)


def test_what_there_is_no_kernel_for() -> None:
    c = case(0)
    with pytest.raises(NotImplementedError, match="takes bfloat16 queries and rows, not float32"):
        attend(c._replace(q=c.q.astype(jnp.float32)))
    with pytest.raises(NotImplementedError, match="no kernel for 48 channels"):
        attend(c, op.Tile(width=32))
    with pytest.raises(ValueError, match="shapes do not fit: q \\[6, 20, 48\\], sink \\[3, 1\\]"):
        attend(c._replace(sink=c.sink[:, :1]))
    with pytest.raises(ValueError, match="ring \\[2, 5, 50, 48\\] for 100 positions"):
        attend(c._replace(window=c.window._replace(ring=c.window.ring[:, :, :50])))
