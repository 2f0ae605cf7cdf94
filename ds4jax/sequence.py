"""Attention over whole sequences: the form of the model's functions that can be differentiated.

Rows are B lanes of T tokens each, every lane from position 0 on, so nothing is read from a cache
and every shape is known when the program is traced. Loops whose length depends on data, rings and
pages are replaced by slices, gathers of selected rows by masks; projections, pooling, scores and
softmax are the functions that serve requests. Training and teacher forcing use this form; no
request is served with it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import attention, compressor, indexer
from pallas_kernels.attention import Partial

F32 = jnp.float32


def group_windows(state_TVC: Array, lanes: int, ratio: int) -> tuple[Array, Array]:
    """Compressor states of the positions that each compressed row pools.

    Args:
        state_TVC: [B*T, 2, C], value and gate of every row. lanes: B. Tokens of a group that is
            not complete are left out.

    Returns: states [B*G, overlap * ratio, 2, C] by ascending position and valid [B*G, ...] (False
        below position 0), with G = T // ratio groups a lane.
    """
    length = state_TVC.shape[0] // lanes
    groups = length // ratio
    s = state_TVC.reshape(lanes, length, *state_TVC.shape[1:])[:, : groups * ratio]
    s = s.reshape(lanes, groups, ratio, *state_TVC.shape[1:])
    valid = jnp.ones((lanes, groups, ratio), bool)
    if compressor.overlap(ratio) == 2:
        s = jnp.concatenate([jnp.pad(s, ((0, 0), (1, 0)) + ((0, 0),) * 3)[:, :-1], s], axis=2)
        older = jnp.arange(groups, dtype=jnp.int32) > 0
        valid = jnp.concatenate(
            [jnp.broadcast_to(older[None, :, None], valid.shape), valid], axis=2
        )
    return s.reshape(lanes * groups, *s.shape[2:]), valid.reshape(lanes * groups, -1)


def visible(length: int, groups: int, ratio: int) -> Array:
    """Which compressed rows each position may see: bool [length, groups]."""
    count = (jnp.arange(length, dtype=jnp.int32) + 1) // ratio
    return jnp.arange(groups, dtype=jnp.int32)[None, :] < count[:, None]


def index_scores(q_BTIJ: Array, weight_BTI: Array, keys_BSJ: Array) -> Array:
    """Indexer scores of every compressed row of its lane for every token; float32 [B, T, S]."""

    def one(q_IJ: Array, weight_I: Array, keys_SJ: Array) -> Array:
        return indexer.score_block(q_IJ[None], weight_I[None], keys_SJ[None])[0]

    return jax.vmap(jax.vmap(one, in_axes=(0, 0, None)))(q_BTIJ, weight_BTI, keys_BSJ)


def select(scores_BTS: Array, visible_TS: Array, *, top_k: int) -> Array:
    """The choice of `indexer.select` as a mask: bool [B, T, S]."""
    lanes, length, groups = scores_BTS.shape
    scores = jnp.where(visible_TS[None], lax.stop_gradient(scores_BTS), -jnp.inf)
    count = jnp.tile(jnp.sum(visible_TS, axis=1, dtype=jnp.int32), lanes)
    ids = indexer.select(scores.reshape(-1, groups), count, top_k=top_k)
    rows = jnp.arange(lanes * length, dtype=jnp.int32)[:, None]
    mask = jnp.zeros((lanes * length, groups), bool).at[rows, ids].set(True, mode="drop")
    return mask.reshape(scores_BTS.shape)


def _join(p: Partial, q: Array, keys: Array, valid: Array) -> tuple[Partial, Array]:
    """One block of keys that the rows of a lane share: [B, T, ...] with [B, S, D], [B, T, S]."""

    def one(p: Partial, q_HD: Array, keys_SD: Array, valid_S: Array) -> tuple[Partial, Array]:
        s = attention.scores(q_HD[None], keys_SD[None])
        lifted = jax.tree.map(lambda a: a[None], p)
        joined = attention.join(lifted, s, keys_SD[None], valid_S[None])
        return jax.tree.map(lambda a: a[0], joined), s[0]

    out: tuple[Partial, Array] = jax.vmap(jax.vmap(one, in_axes=(0, 0, None, 0)))(p, q, keys, valid)
    return out


def _split(tree: Partial, lanes: int, rows: int) -> Partial:
    out: Partial = jax.tree.map(lambda a: a.reshape(lanes, rows, *a.shape[2:]), tree)
    return out


def attend(
    q_BTHD: Array,
    sink_H: Array,
    kv_BTD: Array,
    window: int,
    comp_BSD: Array | None = None,
    mask_BTS: Array | None = None,
) -> tuple[Array, Array | None]:
    """`attention.attend` for whole lanes.

    Args:
        q_BTHD: queries after rope. sink_H: float32. kv_BTD: raw rows. window: how many each sees.
        comp_BSD, mask_BTS: compressed rows and which of them each token attends to, or None.

    Returns: out_BTHD, dtype of q, still rotated; and the weight float32 [B, T, S] of every
        compressed row, summed over heads, as if all had been attended to (up to a factor that a
        token's rows share), or None without compressed rows. No gradient flows through the weights.
    """
    lanes, length, heads, dim = q_BTHD.shape
    blocks = -(-length // window)
    pad = ((0, 0), (0, blocks * window - length))
    q = jnp.pad(q_BTHD, (*pad, (0, 0), (0, 0)))
    kv = jnp.pad(kv_BTD, (*pad, (0, 0)))
    start = attention.start(q.reshape(-1, heads, dim), sink_H)
    p: Partial = jax.tree.map(lambda a: a.reshape(lanes, -1, *a.shape[1:]), start)
    scores = None
    if comp_BSD is not None and mask_BTS is not None:
        p, scores = _join(p, q, comp_BSD, jnp.pad(mask_BTS, (*pad, (0, 0))))

    kv = kv.reshape(lanes, blocks, window, dim)
    older = jnp.pad(kv, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
    keys = jnp.concatenate([older, kv], axis=2).reshape(lanes * blocks, 2 * window, dim)
    row, key = jnp.arange(window, dtype=jnp.int32), jnp.arange(2 * window, dtype=jnp.int32)
    back = window + row[:, None] - key[None, :]
    first = jnp.arange(lanes * blocks, dtype=jnp.int32) % blocks == 0
    exists = (key >= window)[None, :] | ~first[:, None]
    valid = ((back >= 0) & (back < window))[None] & exists[:, None, :]
    p, _ = _join(_split(p, lanes * blocks, window), q.reshape(-1, window, heads, dim), keys, valid)
    p = _split(p, lanes, blocks * window)
    out = (p.acc_THD / p.sum_TH[..., None]).astype(q.dtype)[:, :length]
    if scores is None:
        return out, None
    weight = jnp.exp(scores - p.max_TH[..., None]) / p.sum_TH[..., None]
    return out, lax.stop_gradient(jnp.sum(weight, axis=2)[:, :length])


def distillation_loss(scores_BTS: Array, weight_BTS: Array, visible_TS: Array) -> Array:
    """KL divergence of the indexer's softmax over visible rows from the attention's; [B, T].

    Args:
        scores_BTS: from `index_scores`. weight_BTS: from `attend`; not normalised.

    Returns: float32, 0 where no row is visible.
    """
    seen = jnp.broadcast_to(visible_TS[None], scores_BTS.shape)
    weight = jnp.where(seen, weight_BTS, 0.0)
    target = weight / jnp.maximum(jnp.sum(weight, axis=-1, keepdims=True), 1e-30)
    log_p = jax.nn.log_softmax(jnp.where(seen, scores_BTS, -1e30), axis=-1)
    log_target = jnp.log(jnp.maximum(target, 1e-30))
    kl = jnp.sum(jnp.where(seen, target * (log_target - log_p), 0.0), axis=-1)
    return jnp.where(jnp.any(visible_TS, axis=-1)[None], kl, 0.0)
