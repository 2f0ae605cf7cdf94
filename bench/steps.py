"""Runs compiled steps one at a time, as the executor does, with every length under control.

The executor keeps a lane's history consistent; a benchmark wants to start anywhere, copy lanes and
go back. Both use the same programs (`ds4jax.step`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from bench.models import Loaded
from ds4jax import cache as cache_lib
from ds4jax import model as model_lib
from ds4jax import sampling, step
from ds4jax.config import RuntimeConfig
from ds4jax.step import Bucket, LaneRows


@dataclass(frozen=True)
class Took:
    """Seconds of one step: until the call came back, and until its results were on the host."""

    dispatch: float
    total: float


class Steps:
    """A cache of `run.num_slots` lanes, each with `run.max_ctx` positions of its own."""

    def __init__(self, model: Loaded, run: RuntimeConfig) -> None:
        self.model, self.run = model, run
        self.compiled: list[dict[str, Any]] = []
        self._programs: dict[Any, Any] = {}
        self._lanes = jax.jit(lambda: sampling.init_lanes(run))()
        self._cache = jax.jit(lambda: cache_lib.init(model.cfg, run))()

    def _pages(self, slot: int) -> range:
        per_slot = self.run.pages_per_slot
        return range(slot * per_slot, (slot + 1) * per_slot)

    def _compile(self, name: str, key: Any, fn: Any, donate: tuple[int, ...], *args: Any) -> Any:
        if key not in self._programs:
            wall, cpu = time.perf_counter(), time.process_time()
            self._programs[key] = jax.jit(fn, donate_argnums=donate).lower(*args).compile()
            self.compiled.append(
                {"name": name, "seconds": time.perf_counter() - wall,
                 "cpu_seconds": time.process_time() - cpu}
            )  # fmt: skip
        return self._programs[key]

    def _step(self, bucket: Bucket, rows: Sequence[LaneRows]) -> Took:
        words = step.pack_plan(bucket, rows, self.run.num_slots)
        fn = functools.partial(step.run_step, cfg=self.model.cfg, run=self.run, bucket=bucket)
        args = (self.model.params, self._cache, self._lanes, words)
        name = f"{'prefill' if bucket.prefill else 'rows'} {bucket.rows}"
        program = self._compile(name, bucket, fn, (1,), *args)
        start = time.perf_counter()
        self._cache, result = program(*args)
        dispatched = time.perf_counter() - start
        np.asarray(result)
        return Took(dispatched, time.perf_counter() - start)

    def prefill(self, slot: int, start: int, tokens: npt.NDArray[np.int32]) -> Took:
        """Feed known tokens from position `start` on, in chunks; the last row is sampled."""
        dispatch = total = 0.0
        size = self.run.prefill_buckets[-1]
        for at in range(0, len(tokens), size):
            part = tokens[at : at + size]
            rows = next(t for t in self.run.prefill_buckets if t >= len(part))
            chunked = self.run.backend != "reference"
            bucket = Bucket(rows, 1, prefill=True, chunk=chunked)
            emit = "last" if at + len(part) == len(tokens) else "none"
            took = self._step(bucket, [LaneRows(slot, start + at, part, self._pages(slot), emit)])
            dispatch, total = dispatch + took.dispatch, total + took.total
        return Took(dispatch, total)

    def decode(self, slots: Sequence[int], pos: int, tokens: Sequence[int] | None = None) -> Took:
        """One row at `pos` for each slot: these tokens, or those sampled by the step before."""
        rows = next(t for t in self.run.row_buckets if t >= len(slots))
        given = [None] * len(slots) if tokens is None else [np.array([t], np.int32) for t in tokens]
        plan = [LaneRows(s, pos, t, self._pages(s)) for s, t in zip(slots, given, strict=True)]
        return self._step(Bucket(rows, rows), plan)

    def probe(
        self, slots: Sequence[int], pos: int, tokens: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.float32], dict[int, npt.NDArray[np.int32]]]:
        """Feed tokens [slots, T] at `pos`; logits [slots * T, V] and experts per layer.

        A program of its own, which gives the logits of every row and the routes.
        """
        cfg, run = self.model.cfg, self.run
        size = run.row_buckets[-1]
        bucket = Bucket(size, size)
        names = frozenset(f"L{i}.router_ids" for i in range(cfg.num_layers))

        def fn(params: Any, cache: Any, words: Any) -> Any:
            plan = step.unpack_plan(bucket, words)
            cache, out = model_lib.forward(params, cache, plan, cfg=cfg, run=run, capture=names)
            return cache, out.logits, out.captured

        rows = [
            LaneRows(s, pos, t, self._pages(s), "all") for s, t in zip(slots, tokens, strict=True)
        ]
        words = step.pack_plan(bucket, rows, run.num_slots)
        args = (self.model.params, self._cache, words)
        self._cache, logits, seen = self._compile("probe", "probe", fn, (1,), *args)(*args)
        count = tokens.size
        routes = {i: np.asarray(seen[f"L{i}.router_ids"])[:count] for i in range(cfg.num_layers)}
        return np.asarray(logits)[:count], routes

    def save(self, slot: int) -> Any:
        """The rings of a slot (its pages are addressed by position and need no copy)."""
        return jax.tree.map(jnp.copy, step.take_slot(self._cache, jnp.int32(slot)))

    def restore(self, slot: int, saved: Any) -> None:
        """Back to a saved state."""
        self._cache = step.put_slot(self._cache, jnp.int32(slot), saved)

    def copy(self, source: int, targets: Sequence[int]) -> None:
        """Give other slots the state of one: rings, history and pages."""
        pages = jnp.asarray(list(self._pages(source)), jnp.int32)
        rings = step.take_slot(self._cache, jnp.int32(source))
        rows = step.take_pages(self._cache, pages)
        for slot in targets:
            own = jnp.asarray(list(self._pages(slot)), jnp.int32)
            cache = step.put_slot(self._cache, jnp.int32(slot), rings)
            zero = jnp.int32(0)
            self._cache = step.put_pages(cache, jnp.int32(slot), zero, own, rows)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache."""
        return sum(a.nbytes for a in jax.tree.leaves(self._cache))
