"""What sampling needs of logits that is a sum, or an order, over the whole vocabulary.

A row is one program. It reads its row again and again from the cache of the device: thresholds are
found bit by bit, by counting and by adding up what lies above, so nothing is sorted. Sums run in
one order that depends on the size of the vocabulary alone. Rows that ask for nothing cost nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import backend as backend_lib
from pallas_kernels import row_selection
from pallas_kernels.backend import Backend
from pallas_kernels.indexer import NONE

BLOCK = 8192
"""Logits that a program reads at a time, at most."""

LEAST, MOST = -(2**31), 2**31 - 1


def nucleus(z_TV: Array, top_k_T: Array, top_p_T: Array, *, backend: Backend) -> Array:
    """-inf where top_k or top_p drops a token of a row.

    A token stays if fewer than top_k are greater than it (ties with the k-th stay), and if those of
    the kept ones that come before it (by value, ties by id) have less than top_p of their mass; the
    first stays always.

    Args:
        z_TV: float32. top_k_T: int32, 0 or less: off. top_p_T: float32, 1 or more: off.

    Returns: float32 [T, V].
    Raises: NotImplementedError if `backend` has no kernel.
    Source: sampling order of the service: temperature, top_k, top_p.
    """
    backend = backend_lib.require("sampling", backend)
    if backend == "reference":
        return jax.vmap(nucleus_row)(z_TV, top_k_T, top_p_T)
    return launch_nucleus(z_TV, top_k_T, top_p_T, interpret=backend == "interpret")


def nucleus_row(z_V: Array, top_k: Array, top_p: Array) -> Array:
    """`nucleus` of one row: the definition."""
    vocab = z_V.shape[0]
    order = jnp.argsort(-z_V, stable=True)
    ranked = z_V[order]
    kth = ranked[jnp.clip(top_k - 1, 0, vocab - 1)]
    ranked = jnp.where((top_k > 0) & (ranked < kth), -jnp.inf, ranked)
    p = jax.nn.softmax(ranked)
    before = jnp.cumsum(p) - p
    keep = (ranked > -jnp.inf) & ((before < top_p) | (top_p >= 1.0))
    keep = keep.at[0].set(True)
    kept = jnp.zeros((vocab,), bool).at[order].set(keep)
    return jnp.where(kept, z_V, -jnp.inf)


def logprobs(
    z_TV: Array, token_T: Array, wanted_T: Array, count: int, *, backend: Backend
) -> tuple[Array, Array, Array]:
    """Log-probability of a token, and of the `count` likeliest ones.

    Args: z_TV: float32 logits. token_T: int32. wanted_T: bool; of other rows nothing is computed.

    Returns: float32 [T]; int32 ids [T, count] by falling logit, ties by id, -1 where there are no
        more; their float32 log-probabilities. Zeros (ids -1) of rows that are not wanted.
    Raises: NotImplementedError if `backend` has no kernel.
    """
    backend = backend_lib.require("sampling", backend)
    t, size = z_TV.shape
    if backend == "reference":
        largest = jnp.max(z_TV, axis=1)
        total = jnp.log(jnp.sum(jnp.exp(z_TV - largest[:, None]), axis=1))
        _, ids = lax.top_k(z_TV, min(count, size))
        ids = jnp.pad(ids, ((0, 0), (0, count - ids.shape[1])), constant_values=-1)
        ids = jnp.where(wanted_T[:, None], ids, -1)
    else:
        interpret = backend == "interpret"
        largest, total = launch_sums(z_TV, wanted_T, interpret=interpret)
        ids = _best(z_TV, jnp.where(wanted_T, size, 0), count, interpret=interpret)

    def log_p(z: Array) -> Array:
        wide = (t, *(1,) * (z.ndim - 1))
        logp = (z - largest.reshape(wide)) - total.reshape(wide)
        return jnp.where(wanted_T.reshape(wide), logp, 0.0)

    every = jnp.arange(t, dtype=jnp.int32)
    top = log_p(z_TV[every[:, None], jnp.maximum(ids, 0)])
    return log_p(z_TV[every, token_T]), ids, jnp.where(ids >= 0, top, 0.0)


# --- The kernels ---


def _best(z_TV: Array, visible_T: Array, count: int, *, interpret: bool) -> Array:
    """Ids of the largest, largest first, ties by id; -1 where there are no more."""
    t, size = z_TV.shape
    part = min(BLOCK, pl.next_power_of_2(max(size, 2 * count)))
    padded = jnp.pad(z_TV, ((0, 0), (0, -size % part)))
    ids = row_selection.pick(padded, visible_T, count, part, 8, interpret=interpret)
    real = ids != NONE
    every = jnp.arange(t, dtype=jnp.int32)[:, None]
    key = jnp.where(real, ordered(z_TV[every, jnp.where(real, ids, 0)]), LEAST)
    # How many come before each: a sort of so few would be launches of its own.
    after, first = key[:, :, None], key[:, None, :]
    place = jnp.arange(count, dtype=jnp.int32)
    earlier = (first > after) | ((first == after) & (place[None, None, :] < place[None, :, None]))
    rank = jnp.sum(earlier.astype(jnp.int32), axis=2)
    at = rank[:, :, None] == place[None, None, :]
    return jnp.max(jnp.where(at & real[:, :, None], ids[:, :, None], -1), axis=1)


def ordered(z: Array) -> Array:
    """Integers in the order of the floats; both zeros are one."""
    bits = lax.bitcast_convert_type(z + jnp.float32(0), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(MOST), bits)


def launch_nucleus(z_TV: Array, top_k_T: Array, top_p_T: Array, *, interpret: bool) -> Array:
    """`nucleus` by its kernel."""
    t, size = z_TV.shape
    out: Array = backend_lib.pallas(
        functools.partial(_nucleus_kernel, size=size, block=_block(size)),
        name="nucleus",
        grid=(t,),
        out_shape=jax.ShapeDtypeStruct(z_TV.shape, jnp.float32),
        num_warps=16,
        num_stages=1,
        interpret=interpret,
        aliases={2: 0},
    )(top_k_T, top_p_T, z_TV)
    return out


def launch_sums(z_TV: Array, wanted_T: Array, *, interpret: bool) -> tuple[Array, Array]:
    """Per row the largest logit and the logarithm of the sum of exp(z - largest), float32 [T]."""
    t, size = z_TV.shape
    of = jax.ShapeDtypeStruct((t,), jnp.float32)
    largest, total = backend_lib.pallas(
        functools.partial(_sums_kernel, size=size, block=_block(size)),
        name="vocabulary_sums",
        grid=(t,),
        out_shape=(of, of),
        num_warps=16,
        num_stages=1,
        interpret=interpret,
    )(wanted_T.astype(jnp.int32), z_TV)
    return largest, total


def _block(size: int) -> int:
    return min(BLOCK, pl.next_power_of_2(size))


class _Row:
    """One row in blocks; what lies beyond its end is -inf."""

    def __init__(self, ref: Any, t: Array, size: int, block: int) -> None:
        self.ref, self.t, self.size, self.block = ref, t, size, block
        self.whole, self.rest = divmod(size, block)

    def load(self, i: Any, *, whole: bool) -> tuple[Array, Array, Array]:
        """Block i: numbers, whether they exist, logits."""
        at = i * self.block + jnp.arange(self.block, dtype=jnp.int32)
        inside = at < self.size
        if whole:
            z = plgpu.load(self.ref.at[self.t, pl.ds(i * self.block, self.block)])
            return at, inside, z
        # Masked loads cost registers on AMD: read the last one again instead.
        z = plgpu.load(self.ref.at[self.t, jnp.minimum(at, self.size - 1)])
        return at, inside, jnp.where(inside, z, -jnp.inf)

    def fold(self, step: Callable[[Any, Any], Any], state: Any) -> Any:
        """`step` over all blocks in their order."""

        def whole(i: Array, state: Any) -> Any:
            return step(self.load(i, whole=True), state)

        state = lax.fori_loop(jnp.int32(0), jnp.int32(self.whole), whole, state)
        return step(self.load(jnp.int32(self.whole), whole=False), state) if self.rest else state

    def sums(self, of: Callable[[Array, Array], tuple[Array, ...]]) -> tuple[Array, ...]:
        """Sums of `of(logits, inside)` over the row: block by block, then within the block."""

        def add(block: Any, totals: tuple[Array, ...]) -> tuple[Array, ...]:
            _, inside, z = block
            return tuple(a + b for a, b in zip(totals, of(z, inside), strict=True))

        one = jnp.zeros((self.block,), jnp.float32)
        zeros = tuple(jnp.zeros_like(x) for x in of(one, one > 0))
        return tuple(jnp.sum(x) for x in self.fold(add, zeros))

    def largest(self) -> Array:
        """The largest logit."""
        start = jnp.full((self.block,), -jnp.inf, jnp.float32)
        return jnp.max(self.fold(lambda block, most: jnp.maximum(most, block[2]), start))

    def least_from(self, bound: Array) -> Array:
        """The smallest of the row's integers (`ordered`) that reach a bound."""

        def less(block: Any, least: Array) -> Array:
            _, inside, z = block
            key = ordered(z)
            return jnp.minimum(least, jnp.where(inside & (key >= bound), key, MOST))

        start = jnp.full((self.block,), MOST, jnp.int32)
        return jnp.min(self.fold(less, start))

    def last(self, of: Callable[[Array], tuple[Array, Array]], goal: Array, needed: Array) -> Array:
        """The largest of the row's integers at which `of` still has the goal.

        Args: of: bound -> (what falls as the bound grows, how many of the row reach the bound).
            needed: False: nothing is searched for, the result is LEAST.
        """

        def unsettled(state: Any) -> Any:
            bit, _, reach, missed = state
            return (bit >= 0) & (reach - missed > 1)

        def next_bit(state: Any) -> Any:
            bit, found, reach, missed = state
            higher = found + (jnp.int32(1) << bit)
            value, count = of(higher)
            more = value >= goal
            return (
                bit - 1, jnp.where(more, higher, found), jnp.where(more, count, reach),
                jnp.where(more, missed, count),
            )  # fmt: skip

        count = jnp.where(needed, jnp.int32(self.size), jnp.int32(0))
        start = (jnp.int32(31), jnp.int32(LEAST), count, jnp.int32(0))
        found: Array = lax.while_loop(unsettled, next_bit, start)[1]
        return jnp.where(needed, self.least_from(found), jnp.int32(LEAST))


def _sums_kernel(
    wanted_ref: Any, z_ref: Any, largest_ref: Any, total_ref: Any, *, size: int, block: int
) -> None:
    t = pl.program_id(0)

    @pl.when(plgpu.load(wanted_ref.at[t]) > 0)
    def _() -> None:
        row = _Row(z_ref, t, size, block)
        largest = row.largest()
        [total] = row.sums(lambda z, _: (jnp.exp(z - largest),))
        plgpu.store(largest_ref.at[t], largest)
        plgpu.store(total_ref.at[t], jnp.log(total))


def _nucleus_kernel(
    top_k_ref: Any, top_p_ref: Any, z_ref: Any, out_ref: Any, *, size: int, block: int
) -> None:
    t = pl.program_id(0)
    top_k, top_p = plgpu.load(top_k_ref.at[t]), plgpu.load(top_p_ref.at[t])

    @pl.when((top_k > 0) | (top_p < 1.0))
    def _() -> None:
        row = _Row(z_ref, t, size, block)
        largest = row.largest()

        def reach(bound: Array) -> tuple[Array, Array]:
            [count] = row.sums(
                lambda z, inside: ((inside & (ordered(z) >= bound)).astype(jnp.int32),)
            )
            return count, count

        kth = row.last(reach, top_k, (top_k > 0) & (top_k < size))

        def mass(bound: Array) -> tuple[Array, Array]:
            least = jnp.maximum(bound, kth)

            def one(z: Array, inside: Array) -> tuple[Array, Array]:
                key = ordered(z)
                kept = jnp.where(inside & (key >= least), jnp.exp(z - largest), 0.0)
                return kept, (inside & (key >= bound)).astype(jnp.int32)

            total, count = row.sums(one)
            return total, count

        cut = top_p < 1.0
        goal = top_p * mass(jnp.int32(LEAST))[0]
        bound = row.last(mass, goal, cut)
        bound = jnp.maximum(jnp.minimum(bound, ordered(largest)), kth)
        above, _ = mass(bound + 1)
        bits = jnp.where(bound < 0, bound ^ jnp.int32(MOST), bound)
        each = jnp.exp(lax.bitcast_convert_type(bits, jnp.float32) - largest)
        room = jnp.clip(jnp.ceil((goal - above) / each), 1.0, 2.0**30).astype(jnp.int32)
        room = jnp.where(cut, room, jnp.int32(2**30))

        def store(block: Any, before: Array) -> Array:
            at, inside, z = block
            key = ordered(z)
            equal = (inside & (key == bound)).astype(jnp.int32)
            earlier = before + jnp.cumsum(equal) - equal
            kept = (key > bound) | ((equal > 0) & (earlier < room))
            plgpu.store(out_ref.at[t, at], jnp.where(kept, z, -jnp.inf), mask=inside)
            return before + jnp.sum(equal)

        row.fold(store, jnp.int32(0))
