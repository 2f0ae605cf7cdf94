"""Logits and losses of known token ids, in pieces of any size.

The model's own step over one lane, every row's logits read. However the ids are cut into pieces,
they go through the same one or two compiled programs, and the results are the same bits. Nothing is
sampled here; researchers who want activations use `ds4jax.functional`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

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

Kind = Literal["logits", "losses"]


@functools.partial(jax.jit, static_argnames=("cfg", "run", "bucket", "kind"), donate_argnums=1)
def _evaluate(
    params: Params,
    cache: Cache,
    words: Array,
    target_T: Array,
    *,
    cfg: ModelConfig,
    run: RuntimeConfig,
    bucket: Bucket,
    kind: Kind,
) -> tuple[Cache, Array]:
    """One step: cache, logits_TV or loss_T (-log p(target) in nats), float32."""
    plan = step.unpack_plan(bucket, words)
    cache, out = model.forward(params, cache, plan, cfg=cfg, run=run, chunk=bucket.chunk)
    if kind == "logits":
        return cache, out.logits

    def loss(row: tuple[Array, Array]) -> Array:
        logits_V, target = row
        return jax.nn.logsumexp(logits_V) - logits_V[target]

    return cache, lax.map(loss, (out.logits, target_T))


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
        sizes = (*run.row_buckets, *run.prefill_buckets) if chunk else run.prefill_buckets[-1:]
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
        return self._steps("logits", ids, pieces, on_done)

    def losses(
        self, ids: Sequence[int] | IntIds, on_done: Callable[[int], None] = lambda done: None
    ) -> F32:
        """-log p(ids[i + 1] | ids[: i + 1]) in nats, float32 [len(ids) - 1].

        Raises:
            ValueError: as `logits`, or fewer than two ids.
        """
        if len(ids) < 2:
            raise ValueError(f"{len(ids)} ids, at least 2 are needed for a loss")
        out = np.concatenate(list(self._steps("losses", ids, None, on_done)))
        return out[:-1]

    def _steps(
        self,
        kind: Kind,
        ids: Sequence[int] | IntIds,
        pieces: Sequence[int] | None,
        on_done: Callable[[int], None],
    ) -> Iterator[F32]:
        known = self._checked(ids)
        total = len(known)
        sizes = [total] if pieces is None else list(pieces)
        if sum(sizes) != total or min(sizes) < 1:
            raise ValueError(f"pieces {sizes} must be positive and add up to {total} ids")
        targets = np.append(known[1:], np.int32(0))
        cache = cache_lib.init(self.cfg, self.run)
        pending: tuple[Any, int] | None = None
        done = 0
        for start, stop in self._spans(sizes):
            bucket = next(b for b in self._buckets if b.rows >= stop - start)
            rows = LaneRows(0, start, known[start:stop], range(self.run.pages), "all")
            words = step.pack_plan(bucket, [rows], self.run.num_slots)
            target = np.zeros(bucket.rows, np.int32)
            target[: stop - start] = targets[start:stop]
            cache, result = _evaluate(
                self._params, cache, words, target,
                cfg=self.cfg, run=self.run, bucket=bucket, kind=kind,
            )  # fmt: skip
            if pending is not None:  # read the step before while this one runs
                done += pending[1]
                yield np.asarray(pending[0])[: pending[1]]
                on_done(done)
            pending = (result, stop - start)
        assert pending is not None
        yield np.asarray(pending[0])[: pending[1]]
        on_done(total)

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
