"""Logits and losses of known token ids, in pieces of any size.

The model's own step over one lane, every row's logits read. However the ids are cut into pieces,
they go through the same one or two compiled programs, and the results are the same bits. Nothing is
sampled here; researchers who want activations use `ds4jax.functional`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
import numpy.typing as npt
from jax import Array, lax

from ds4jax import cache as cache_lib
from ds4jax import model, step
from ds4jax.cache import Cache
from ds4jax.config import ModelConfig, RuntimeConfig
from ds4jax.params import Params
from ds4jax.step import Bucket, LaneRows

F32 = npt.NDArray[np.float32]
IntIds = npt.NDArray[np.int32]

MOST_ROWS = 128
"""Rows of a step on kernels, at most: each has logits of the whole vocabulary, in float32."""


@functools.partial(jax.jit, static_argnames=("cfg", "run", "bucket"), donate_argnums=1)
def _step(
    params: Params,
    cache: Cache,
    words: Array,
    *,
    cfg: ModelConfig,
    run: RuntimeConfig,
    bucket: Bucket,
) -> tuple[Cache, Array]:
    """One step: cache, logits_TV float32."""
    plan = step.unpack_plan(bucket, words)
    cache, out = model.forward(params, cache, plan, cfg=cfg, run=run, chunk=bucket.chunk)
    return cache, out.logits


@jax.jit
def _losses(logits_TV: Array, target_T: Array) -> Array:
    """-log p(target) of every row in nats, float32 [T]."""

    def one(row: tuple[Array, Array]) -> Array:
        logits_V, target = row
        return jax.nn.logsumexp(logits_V) - logits_V[target]

    return lax.map(one, (logits_TV, target_T))


class Evaluator:
    """One sequence through a model. Not for use by several threads.

    Args:
        cfg, params: the model. run: dtype, numerics, backend and max_ctx are used; one slot.

    Raises:
        ValueError: `run` has more than one slot.
    """

    def __init__(self, cfg: ModelConfig, params: Params, run: RuntimeConfig) -> None:
        if run.num_slots != 1:
            raise ValueError(f"num_slots is {run.num_slots}, an evaluation has 1")
        self.cfg, self.run, self._params = cfg, run, params
        chunk = run.backend != "reference"
        # Padded rows cost nothing on the reference backend: one program is enough there.
        sizes: tuple[int, ...] = run.prefill_buckets[-1:]
        if chunk:
            small = [t for t in run.prefill_buckets if t <= MOST_ROWS]
            sizes = (*run.row_buckets, *(small or run.prefill_buckets[:1]))
        self._buckets = [Bucket(t, t, chunk=chunk) for t in sorted(set(sizes))]

    def logits(
        self,
        ids: Sequence[int] | IntIds,
        pieces: Sequence[int] | None = None,
        on_done: Callable[[int], None] = lambda done: None,
    ) -> Iterator[F32]:
        """Logits after every id, float32 [n, vocabulary] for the next n positions at a time.

        Args:
            ids: at most max_ctx. pieces: positive sizes that add up to the number of ids; None: one
                piece. on_done: called with the number of ids done.

        Raises:
            ValueError: pieces that do not add up, too many ids, or ids outside the vocabulary.
        """
        for result, count in self._read(self._steps(self._checked(ids), pieces), on_done):
            yield np.asarray(result)[:count]

    def losses(
        self, ids: Sequence[int] | IntIds, on_done: Callable[[int], None] = lambda done: None
    ) -> F32:
        """-log p(ids[i + 1] | ids[: i + 1]) in nats, float32 [len(ids) - 1].

        Raises:
            ValueError: as `logits`, or fewer than two ids.
        """
        if len(ids) < 2:
            raise ValueError(f"{len(ids)} ids, at least 2 are needed for a loss")
        known = self._checked(ids)

        def steps() -> Iterator[tuple[Array, int]]:
            start = 0
            for logits, count in self._steps(known, None):
                target = np.zeros(logits.shape[0], np.int32)
                following = known[start + 1 : start + 1 + count]
                target[: len(following)] = following
                start += count
                yield _losses(logits, target), count

        out = [np.asarray(x)[:count] for x, count in self._read(steps(), on_done)]
        return np.concatenate(out)[:-1]

    def _read(
        self, steps: Iterator[tuple[Array, int]], on_done: Callable[[int], None]
    ) -> Iterator[tuple[Array, int]]:
        """Results one step late, so that the next step runs while one is read."""
        done = 0
        pending: tuple[Array, int] | None = None
        for following in itertools.chain(steps, [None]):
            if pending is not None:
                yield pending
                done += pending[1]
                on_done(done)
            pending = following

    def _steps(self, known: IntIds, pieces: Sequence[int] | None) -> Iterator[tuple[Array, int]]:
        """Dispatch step after step: device logits and how many of their rows are real."""
        sizes = [len(known)] if pieces is None else list(pieces)
        if sum(sizes) != len(known) or min(sizes) < 1:
            raise ValueError(f"pieces {sizes} must be positive and add up to {len(known)} ids")
        cache = cache_lib.init(self.cfg, self.run)
        for start, stop in self._spans(sizes):
            bucket = next(b for b in self._buckets if b.rows >= stop - start)
            rows = LaneRows(0, start, known[start:stop], range(self.run.pages), "all")
            words = step.pack_plan(bucket, [rows], self.run.num_slots)
            cache, result = _step(
                self._params, cache, words, cfg=self.cfg, run=self.run, bucket=bucket
            )
            yield result, stop - start

    def _spans(self, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
        start, most = 0, self._buckets[-1].rows
        for size in sizes:
            for at in range(start, start + size, most):
                yield at, min(at + most, start + size)
            start += size

    def _checked(self, ids: Sequence[int] | IntIds) -> IntIds:
        known = np.asarray(ids)
        if not 1 <= len(known) <= self.run.max_ctx:
            raise ValueError(f"{len(known)} ids, must be 1 to max_ctx = {self.run.max_ctx}")
        if known.min() < 0 or known.max() >= self.cfg.vocab_size:
            raise ValueError(f"ids must be in 0..{self.cfg.vocab_size - 1}, the vocabulary")
        return known.astype(np.int32)


def split(total: int, *, stepwise: int | None = None, chunks: Sequence[int] = ()) -> list[int]:
    """Sizes of the pieces that `total` ids are fed in.

    Args:
        stepwise: prefill of so many ids (0: none), then one at a time.
        chunks: sizes of the first pieces; what is left over is one more.

    Raises:
        ValueError: both given, or more ids asked for than there are.
    """
    if stepwise is not None and chunks:
        raise ValueError("stepwise and chunks exclude each other")
    if stepwise is not None:
        if stepwise > total:
            raise ValueError(f"stepwise {stepwise}: there are only {total} ids")
        return ([stepwise] if stepwise else []) + [1] * (total - stepwise)
    rest = total - sum(chunks)
    if rest < 0 or any(c < 1 for c in chunks):
        raise ValueError(
            f"chunks {','.join(map(str, chunks))} must be at least 1 each and add up to at most"
            f" {total}, the number of ids; they add up to {sum(chunks)}"
        )
    return [*chunks, *([rest] if rest else [])]
