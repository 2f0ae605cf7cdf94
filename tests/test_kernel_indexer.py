"""Selection of compressed rows: kernels against NumPy, exact to the last tie."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from pallas_kernels import indexer
from pallas_kernels import row_selection as op
from tests import little_effort

HEADS, DIM, SLOTS, PAGES, TOP_K = 20, 48, 4, 90, 24
TILE = op.Tile(part=256)
VISIBLE = [0, 24, 25, 64, 300, 384]
"""Nothing, as many as are selected, one more, one block, several, the whole table."""


class Case(NamedTuple):
    """Operands of one call."""

    q: Any
    weight: Any
    keys: Any
    table: Any
    slot: Any
    visible: Any


def case(*, whole: bool, fill: float = 0.0) -> Case:
    """Six rows. whole: small whole numbers, so that every sum is exact and ties are many."""
    rng = np.random.default_rng(3)

    def draw(*shape: int) -> npt.NDArray[Any]:
        return rng.integers(-2, 3, shape) if whole else rng.standard_normal(shape)

    visible, slot = np.asarray(VISIBLE, np.int32), np.asarray([0, 3, 1, 2, 1, 0], np.int32)
    table = np.stack([rng.permutation(PAGES)[:12] for _ in range(SLOTS + 1)]).astype(np.int32)
    keys = draw(2, (PAGES + 1) * 32, DIM).astype(np.float32)
    used = np.zeros(keys.shape[:2], bool)
    for s, v in zip(slot, visible, strict=True):
        row = np.arange(v)
        used[1, table[s, row // 32] * 32 + row % 32] = True
    keys[~used] = fill
    return Case(
        jnp.asarray(draw(6, HEADS, DIM), jnp.bfloat16), jnp.asarray(draw(6, HEADS), jnp.float32),
        jnp.asarray(keys, jnp.bfloat16), jnp.asarray(table), jnp.asarray(slot),
        jnp.asarray(visible),
    )  # fmt: skip


def scores(c: Case, t: int) -> npt.NDArray[np.float64]:
    """Scores of all that row t sees, in float64."""
    row = np.arange(np.asarray(c.visible)[t])
    at = np.asarray(c.table)[np.asarray(c.slot)[t], row // 32] * 32 + row % 32
    k = np.asarray(c.keys, np.float64)[1, at]
    dots = np.maximum(np.asarray(c.q, np.float64)[t] @ k.T, 0)
    got: npt.NDArray[np.float64] = np.asarray(c.weight, np.float64)[t] @ dots
    return got


def best(score: npt.NDArray[Any], top_k: int) -> npt.NDArray[np.int32]:
    """Numbers of the largest, ties to the lower, ascending, NONE at the end."""
    order = np.argsort(-score.astype(np.float64), kind="stable")[:top_k]
    out = np.full(top_k, indexer.NONE, np.int32)
    out[: len(order)] = np.sort(order)
    return out


@functools.cache
def _program(backend: Any, tile: op.Tile | None) -> Any:
    return little_effort.jit(
        lambda c: op.select(
            c.q, c.weight, c.keys, 1, c.table, c.slot, c.visible, top_k=TOP_K, backend=backend,
            tile=tile,
        )
    )  # fmt: skip


def select(c: Case, tile: op.Tile | None = TILE, backend: str = "interpret") -> Any:
    """Result of the emulated kernels."""
    return np.asarray(_program(backend, tile)(c))


def rows_of(c: Case, at: Any) -> Case:
    """The rows `at`, in that order."""
    return c._replace(q=c.q[at], weight=c.weight[at], slot=c.slot[at], visible=c.visible[at])


def test_exact_scores_are_selected_exactly() -> None:
    c = case(whole=True)
    want = np.stack([best(scores(c, t), TOP_K) for t in range(6)])
    assert all(len(np.unique(scores(c, t))) < v for t, v in enumerate(VISIBLE) if v > TOP_K)
    np.testing.assert_array_equal(select(c, None, "reference"), want)
    np.testing.assert_array_equal(select(c), want)


def test_rounded_scores_are_selected_within_their_rounding() -> None:
    c = case(whole=False)
    got = select(c)
    for t, visible in enumerate(VISIBLE):
        kept = got[t][got[t] != indexer.NONE]
        assert len(kept) == min(visible, TOP_K)
        assert (np.diff(kept) > 0).all()
        if visible > TOP_K:
            score = scores(c, t)
            left = np.delete(score, kept)
            assert score[kept].min() > left.max() - 1e-4 * np.abs(score).max()


def test_a_row_depends_on_itself_alone() -> None:
    c = case(whole=False)
    got = select(c)
    order = np.random.default_rng(1).permutation(6)
    np.testing.assert_array_equal(select(rows_of(c, order)), got[order])
    alone = jnp.arange(6) == 4
    masked = c._replace(
        slot=jnp.where(alone, c.slot, SLOTS), visible=jnp.where(alone, c.visible, 0)
    )
    np.testing.assert_array_equal(select(masked)[4], got[4])
    # What nobody may read is not read.
    np.testing.assert_array_equal(select(case(whole=False, fill=np.nan)), got)


@pytest.mark.slow
def test_few_rows_and_groups_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    c = case(whole=False)
    got = select(c)
    np.testing.assert_array_equal(select(rows_of(c, np.asarray([5, 2]))), got[[5, 2]])
    monkeypatch.setattr(op, "SCORE_BYTES", 4 * 512 * 2)
    tile = op.Tile(part=256, warps=8)
    np.testing.assert_array_equal(select(c, tile), got)


@functools.cache
def _pick(part: int, top_k: int) -> Any:
    return little_effort.jit(lambda s, v: op.pick(s, v, top_k, part, 4, interpret=True))


SPECIAL = np.asarray([0.0, 1.0, -1.0, np.inf, -np.inf, 1e-45, -1e-45, 3e38, -3e38], np.float32)


@pytest.mark.parametrize("part", [512, pytest.param(64, marks=pytest.mark.slow)])
def test_picking(part: int) -> None:
    """Any floats in any order, in one round and in several."""
    rng = np.random.default_rng(part)
    s = rng.standard_normal((8, 512)).astype(np.float32)
    s[0] = 0.5
    s[1] = -np.inf
    s[2] = rng.choice(SPECIAL, 512)
    s[3] = -np.sort(-s[3])
    s[4, ::2] = -np.inf
    s[5] = rng.integers(0, 3, 512)
    visible = np.asarray([512, 512, 512, 500, 512, 211, 29, 3], np.int32)
    beyond = np.arange(512)[None, :] >= visible[:, None]
    want = np.stack([best(row[:v], 30) for row, v in zip(s, visible, strict=True)])
    for fill in (np.nan, np.inf):
        got = _pick(part, 30)(jnp.asarray(np.where(beyond, fill, s)), jnp.asarray(visible))
        np.testing.assert_array_equal(np.asarray(got), want)
    hidden = jnp.asarray(np.where(beyond, -np.inf, s))
    plain = indexer.select(hidden, jnp.asarray(visible), top_k=30)
    np.testing.assert_array_equal(np.asarray(plain), want)


@pytest.mark.slow
def test_picking_from_a_million_tokens() -> None:
    """262,144 rows, the best 512, with the default tile: three rounds."""
    rng = np.random.default_rng(0)
    s = rng.standard_normal((2, 1 << 18)).astype(np.float32)
    s[1] = np.round(s[1], 1)
    visible = np.asarray([1 << 18, 200_001], np.int32)
    got = _pick(op.Tile.part, 512)(jnp.asarray(s), jnp.asarray(visible))
    want = np.stack([best(row[:v], 512) for row, v in zip(s, visible, strict=True)])
    np.testing.assert_array_equal(np.asarray(got), want)


def test_what_there_is_no_kernel_for() -> None:
    c = case(whole=True)
    with pytest.raises(NotImplementedError, match="takes bfloat16 queries and keys, not float32"):
        select(c._replace(q=c.q.astype(jnp.float32)))
    with pytest.raises(NotImplementedError, match="the best 24 \\(at most 16\\)"):
        select(c, op.Tile(part=32))
    with pytest.raises(ValueError, match="shapes do not fit: q \\[6, 20, 48\\], weight \\[6, 5\\]"):
        select(c._replace(weight=c.weight[:, :5]))
