"""One step as one function: a packed plan in, packed results out, cache updated in place.

The plan is one int32 vector and so are the results, so a step costs one transfer each way. This
module packs and unpacks them and joins the model to the sampler; it is pure and jits nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array, lax

from ds4jax import fused, model, sampling
from ds4jax.cache import ROWS4, Cache
from ds4jax.config import PAGE_TOKENS, ModelConfig, RuntimeConfig, Sampler
from ds4jax.params import Params
from ds4jax.plan import TokenResult
from ds4jax.sampling import Lanes

_ROW_FIELDS = ("slot", "pos", "token", "run", "after", "table_idx", "table_page")


@dataclass(frozen=True)
class Bucket:
    """Static shape of one program: rows, emitted rows, sampler."""

    rows: int
    emits: int
    sampler: Sampler = "full"
    prefill: bool = False
    chunk: bool = False  # the form of `layers.Context.chunk`

    @property
    def words(self) -> int:
        """int32 words of its packed plan."""
        return len(_ROW_FIELDS) * self.rows + self.emits + 2


@dataclass(frozen=True)
class LaneRows:
    """Rows of one lane in a step: `tokens` given, or (None) one whose token the device holds."""

    slot: int
    start: int  # position of the first row
    tokens: npt.NDArray[np.int32] | None
    pages: Sequence[int]  # physical pages of the lane by table entry
    emit: str = "last"  # "last", "none" or "all"

    @property
    def count(self) -> int:
        """Rows."""
        return 1 if self.tokens is None else len(self.tokens)


def pack_plan(bucket: Bucket, lanes: Sequence[LaneRows], trash: int) -> npt.NDArray[np.int32]:
    """The plan of a step as int32 [bucket.words]; padding rows sit in slot `trash`.

    Raises:
        ValueError: more rows or emitted rows than the bucket holds.
    """
    rows = sum(x.count for x in lanes)
    table = np.zeros((len(_ROW_FIELDS), bucket.rows), np.int32)
    slot, pos, token, run, after, table_idx, table_page = table
    slot[:], table_idx[:] = trash, -1
    emit: list[int] = []
    if rows > bucket.rows:
        raise ValueError(f"{rows} rows do not fit a bucket of {bucket.rows}")
    at = 0
    for lane in lanes:
        n = lane.count
        span = slice(at, at + n)
        index = np.arange(n, dtype=np.int32)
        slot[span], pos[span] = lane.slot, lane.start + index
        token[span] = model.FROM_HISTORY if lane.tokens is None else lane.tokens
        run[span], after[span] = index, n - 1 - index
        entry = pos[span] // PAGE_TOKENS
        table_idx[span] = entry
        table_page[span] = np.asarray(lane.pages, np.int32)[entry]
        if lane.emit != "none":
            emit += range(at, at + n) if lane.emit == "all" else [at + n - 1]
        at += n
    if len(emit) > bucket.emits:
        raise ValueError(f"{len(emit)} emitted rows do not fit a bucket of {bucket.emits}")
    emits = np.zeros(bucket.emits, np.int32)
    emits[: len(emit)] = emit
    return np.concatenate([table.reshape(-1), emits, np.array([rows, len(emit)], np.int32)])


def unpack_plan(bucket: Bucket, words: Array) -> model.Plan:
    """The plan as the model takes it. words: int32 [bucket.words]."""
    t, n = bucket.rows, len(_ROW_FIELDS)
    fields = {k: words[i * t : (i + 1) * t] for i, k in enumerate(_ROW_FIELDS)}
    return model.Plan(
        emit=words[n * t : n * t + bucket.emits],
        num_rows=words[-2],
        num_emit=words[-1],
        **fields,
    )


def run_step(
    params: Params,
    cache: Cache,
    lanes: Lanes,
    words: Array,
    *,
    cfg: ModelConfig,
    run: RuntimeConfig,
    bucket: Bucket,
    batched: bool | None = None,
) -> tuple[Cache, Array]:
    """Model and sampler over one packed plan; sampled tokens are kept in the cache's history.

    Args:
        words: int32 [bucket.words]. cfg, run, bucket, batched: static.

    Returns: cache (donatable), results int32 [bucket.emits, RESULT_WORDS].
    """
    plan = unpack_plan(bucket, words)
    cache, out = model.forward(
        params, cache, plan, cfg=cfg, run=run, chunk=bucket.chunk, batched=batched
    )
    greedy = bucket.sampler == "greedy"
    rows_alone = run.backend == "reference" if batched is None else not batched
    history, where = cache.tokens, jnp.minimum(out.pos + 1, cache.tokens.shape[1] - 1)

    if rows_alone:
        shape = (bucket.emits, sampling.RESULT_WORDS)

        def body(e: Array, results: Array) -> Array:
            got = sampling.sample(
                out.logits[e], lanes, history, out.slot[e], where[e], greedy=greedy
            )[1]
            return lax.dynamic_update_slice_in_dim(results, got[None], e, 0)

        results = lax.fori_loop(jnp.int32(0), plan.num_emit, body, jnp.zeros(shape, jnp.int32))
    else:
        results = sampling.sample_rows(
            out.logits, lanes, history, out.slot, where, greedy=greedy,
            backend=fused.backends(run)["sampling"],
        )[1]  # fmt: skip
    tokens = history.at[out.slot, where].set(results[:, 0])
    return cache.replace(tokens=tokens), results  # type: ignore[attr-defined]


def open_lane(
    cache: Cache, lanes: Lanes, slot: Array, words: Array, length: Array
) -> tuple[Cache, Lanes]:
    """Make a slot ready for a lane: empty table, `length` committed tokens, its parameters.

    Rings and pages need no clearing: visibility masks what an earlier lane left there.
    """
    trash = cache.table[cache.table.shape[0] - 1, 0]
    cache = cache.replace(  # type: ignore[attr-defined]
        table=cache.table.at[slot].set(trash), length=cache.length.at[slot].set(length)
    )
    return cache, sampling.set_lane(lanes, slot, words)


def read_results(words: npt.NDArray[np.int32], want: int | None) -> tuple[TokenResult, bool]:
    """One row of results on the host.

    Args:
        words: int32 [RESULT_WORDS]. want: number of top logprobs; 0: the chosen one's only; None.

    Returns: the token, and whether all logits of its row (and its logprob) were finite.
    """
    token, finite = int(words[0]), bool(words[1])
    if want is None:
        return TokenResult(token), finite
    ids = words[3 : 3 + want]
    top = words[3 + sampling.TOP : 3 + sampling.TOP + want].view(np.float32)
    pairs = tuple(
        (int(i), float(x)) for i, x in zip(ids, top, strict=True) if i >= 0 and np.isfinite(x)
    )
    logprob = float(words[2:3].view(np.float32)[0])
    return TokenResult(token, logprob, pairs), finite and math.isfinite(logprob)


# ---- snapshots of one lane ---------------------------------------------------------------------

PAGED = {"comp4": ROWS4, "index4": ROWS4, "comp128": 1}
"""Paged arrays of the cache and their rows per page."""

SLOTTED = ("raw", "state4", "istate4", "state128")
"""Arrays of the cache with a slot axis after the layer axis."""


def take_slot(cache: Cache, slot: Array) -> dict[str, Array]:
    """Rings and token history of one slot."""
    out = {k: getattr(cache, k)[:, slot] for k in SLOTTED}
    return out | {"tokens": cache.tokens[slot], "length": cache.length[slot]}


def put_slot(cache: Cache, slot: Array, data: dict[str, Array]) -> Cache:
    """The inverse of `take_slot`."""
    new = {k: getattr(cache, k).at[:, slot].set(data[k]) for k in SLOTTED}
    new["tokens"] = cache.tokens.at[slot].set(data["tokens"])
    new["length"] = cache.length.at[slot].set(data["length"])
    return cache.replace(**new)  # type: ignore[attr-defined]


def take_pages(cache: Cache, pages: Array) -> dict[str, Array]:
    """Rows of the given physical pages, [layers, pages, rows per page, ...]."""
    out = {}
    for name, per_page in PAGED.items():
        out[name] = _paged(getattr(cache, name), per_page)[:, pages]
    return out


def _paged(a: Array, per_page: int) -> Array:
    """Rows by page; a model may have no layer of the kind, so no size is left to be inferred."""
    return a.reshape(a.shape[0], a.shape[1] // per_page, per_page, a.shape[-1])


def put_pages(
    cache: Cache, slot: Array, first: Array, pages: Array, data: dict[str, Array]
) -> Cache:
    """Write rows into physical pages and enter these in the table from entry `first` on.

    Padding pages are the trash page; their table entries are not touched.
    """
    new = {}
    for name, per_page in PAGED.items():
        a = getattr(cache, name)
        new[name] = _paged(a, per_page).at[:, pages].set(data[name]).reshape(a.shape)
    entry = first + jnp.arange(pages.shape[0], dtype=jnp.int32)
    live = pages != cache.comp128.shape[1] - 1
    entry = jnp.where(live, entry, cache.table.shape[1])
    table = cache.table.at[slot, entry].set(pages, mode="drop")
    return cache.replace(table=table, **new)  # type: ignore[attr-defined]
