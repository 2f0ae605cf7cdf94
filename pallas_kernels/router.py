"""Expert selection: learned scores with a selection bias, or a table indexed by token id.

`route` is the definition, on the normalised row. `select` starts from the products with gate and
shared expert that one kernel made, and activates the shared expert on the way.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import backend as backend_lib
from pallas_kernels.backend import Backend
from pallas_kernels.dense import DOT_ROWS
from pallas_kernels.ring import grid_index


def _scores(x_TM: Array, gate_EM: Array) -> Array:
    """sqrt(softplus(x @ gate^T)), all in float32; [T, E]."""
    z = lax.dot_general(
        x_TM.astype(jnp.float32),
        gate_EM.astype(jnp.float32),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
    )
    return jnp.sqrt(jax.nn.softplus(z))


def route(
    x_TM: Array,
    gate_EM: Array,
    *,
    bias_E: Array | None,
    table_VK: Array | None,
    token_T: Array,
    top_k: int,
    scaling: float,
    normalise: bool,
) -> tuple[Array, Array]:
    """Experts of every row and their weights, in order of selection.

    Learned layers take the `top_k` largest of score + bias (ties to the lower id); hash layers take
    the table's row of the token. Weights are the unbiased scores of the chosen, divided by their
    sum if `normalise`, times `scaling`.

    Args:
        x_TM: normalised hidden, any float dtype. gate_EM: [E, M].
        bias_E: float32 selection bias, or None. table_VK: int32 [V, K'], or None; K' >= top_k.
        token_T: int32 token ids, used by the table.

    Returns: ids_TK int32, weights_TK float32.
    Source: architecture of DeepSeek-V4, mixture of experts.
    """
    return choose(
        _scores(x_TM, gate_EM), bias_E=bias_E, table_VK=table_VK, token_T=token_T, top_k=top_k,
        scaling=scaling, normalise=normalise,
    )  # fmt: skip


def choose(
    s: Array,
    *,
    bias_E: Array | None,
    table_VK: Array | None,
    token_T: Array,
    top_k: int,
    scaling: float,
    normalise: bool,
) -> tuple[Array, Array]:
    """`route` from the scores s [T, E]."""
    if table_VK is not None:
        ids = table_VK[token_T][:, :top_k]
    else:
        biased = s if bias_E is None else s + jnp.broadcast_to(bias_E, s.shape)
        ids = lax.top_k(biased, top_k)[1]
    w = jnp.take_along_axis(s, ids, axis=1)
    if normalise:
        w = w / jnp.sum(w, axis=1, keepdims=True)
    return ids.astype(jnp.int32), w * scaling


class Shared(NamedTuple):
    """The shared expert's gate and up products, parts float32 [S, T, F], and its clamp."""

    gate: Array
    up: Array
    limit: float | None  # None: no clamp


def select(
    gate_STE: Array,
    shared: Shared,
    *,
    bias_LE: Array | None,
    table_LVK: Array | None,
    token_T: Array,
    live_T: Array,
    layer: int | Array,
    top_k: int,
    scaling: float,
    normalise: bool,
    backend: Backend,
) -> tuple[Array, Array, Array]:
    """Experts of every row, their weights, and the shared expert's activation.

    Args:
        gate_STE: products with the gate in parts, float32. shared: those of the shared expert.
        bias_LE: float32 stack of selection biases, or None. table_LVK: int32 stack of tables of
            hash layers, or None; K >= top_k. layer: which of L.
        token_T: int32. live_T: bool, or int32 and not 0; rows that are not live get the number -1.
        top_k, scaling, normalise: as of `route`.

    Returns: ids_TK int32, weights_TK float32, h_TF bfloat16.
    Raises: NotImplementedError if `backend` has no kernel for these sizes.
    Source: architecture of DeepSeek-V4, mixture of experts.
    """
    backend = backend_lib.require("router", backend)
    if backend == "reference":
        s = jnp.sqrt(jax.nn.softplus(jnp.sum(gate_STE, axis=0)))
        ids, weights = choose(
            s, bias_E=None if bias_LE is None else bias_LE[layer],
            table_VK=None if table_LVK is None else table_LVK[layer],
            token_T=token_T, top_k=top_k, scaling=scaling, normalise=normalise,
        )  # fmt: skip
        h = _activated(jnp.sum(shared.gate, axis=0), jnp.sum(shared.up, axis=0), shared.limit)
        return jnp.where(live_T.astype(bool)[:, None], ids, -1), weights, h.astype(jnp.bfloat16)
    interpret = backend_lib.target(backend) == "interpret"
    return launch(
        gate_STE, shared, bias_LE, table_LVK, token_T, live_T, layer, top_k, scaling, normalise,
        interpret=interpret,
    )  # fmt: skip


def _activated(gate: Array, up: Array, limit: float | None) -> Array:
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(gate) * up


# --- The kernel ---

FEW_ROWS = 64
"""Largest number of rows that have a program each; more share one by 16. Bits do not change."""

WIDTH = 128
"""Channels of the shared expert that one program activates, at most."""


def launch(
    gate_STE: Array, shared: Shared, bias: Array | None, table: Array | None, token_T: Array,
    live_T: Array, layer: int | Array, top_k: int, scaling: float, normalise: bool, *,
    interpret: bool,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """`select` by its kernel: a program routes rows, or activates a chunk of their channels."""
    (_, t, num), inner = gate_STE.shape, shared.gate.shape[2]
    width, rows = min(inner & -inner, WIDTH), 1 if t <= FEW_ROWS else DOT_ROWS
    if num & (num - 1) or num < 16 or width < 16 or top_k > 8:
        raise NotImplementedError(
            f"router: the kernel takes a power of two of at least 16 experts, at most 8 of them a"
            f" row and a shared expert of a multiple of 16, not {num}, {top_k} and {inner}"
        )
    operands = {
        "layer": jnp.asarray(layer, jnp.int32).reshape(1), "gate": gate_STE, "token": token_T,
        "live": live_T.astype(jnp.int32), "a": shared.gate, "b": shared.up,
    }  # fmt: skip
    operands |= {} if bias is None else {"bias": bias}
    operands |= {} if table is None else {"table": table}
    of = jax.ShapeDtypeStruct
    ids, weights, h = backend_lib.pallas(
        functools.partial(
            _kernel,
            names=tuple(operands),
            top_k=top_k,
            scaling=scaling,
            normalise=normalise,
            limit=shared.limit,
            width=width,
            rows=rows,
        ),
        name="router",
        grid=(1 + inner // width, -(-t // rows)),
        out_shape=(
            of((t, top_k), jnp.int32),
            of((t, top_k), jnp.float32),
            of((t, inner), jnp.bfloat16),
        ),
        # A row within one warp: choosing takes exchanges between its lanes only.
        num_warps=1 if rows == 1 else 4,
        num_stages=1,
        interpret=interpret,
    )(*operands.values())
    return ids, weights, h


def _sum(ref: Any, at: tuple[Array, Array]) -> Array:
    total = plgpu.load(ref.at[jnp.int32(0), at[0], at[1]])
    for s in range(1, ref.shape[0]):
        total += plgpu.load(ref.at[jnp.int32(s), at[0], at[1]])
    return total


def _kernel(
    *all_refs: Any, names: tuple[str, ...], top_k: int, scaling: float, normalise: bool,
    limit: float | None, width: int, rows: int,
) -> None:  # fmt: skip
    refs = dict(zip(names, all_refs, strict=False))
    ids_ref, weights_ref, h_ref = all_refs[len(names) :]
    part, tile = pl.program_id(0), pl.program_id(1)
    count = refs["token"].shape[0]
    number = tile * rows + jnp.arange(rows, dtype=jnp.int32)
    inside, row = number < count, jnp.minimum(number, count - 1)

    @pl.when(part == 0)
    def _() -> None:
        ids, weights = _choose(refs, row, top_k)
        total = weights[0]
        for w in weights[1:]:
            total += w
        live = plgpu.load(refs["live"].at[row]) > 0
        for j in range(top_k):
            at = (number, jnp.full(number.shape, j, jnp.int32))
            w = weights[j] / total if normalise else weights[j]
            plgpu.store(ids_ref.at[at], jnp.where(live, ids[j], -1), mask=inside)
            plgpu.store(weights_ref.at[at], w * scaling, mask=inside)

    @pl.when(part > 0)
    def _() -> None:
        first = (part - 1) * width
        at = grid_index(row, first, width)
        h = _activated(_sum(refs["a"], at), _sum(refs["b"], at), limit)
        mask = jnp.broadcast_to(inside[:, None], h.shape)
        plgpu.store(h_ref.at[grid_index(number, first, width)], h.astype(jnp.bfloat16), mask=mask)


def _choose(refs: dict[str, Any], row: Array, top_k: int) -> tuple[list[Array], list[Array]]:
    """Numbers and unbiased scores of the chosen experts, [rows] each, in order of selection."""
    layer = plgpu.load(refs["layer"].at[jnp.int32(0)])
    num = refs["gate"].shape[2]
    z = _sum(refs["gate"], grid_index(row, jnp.int32(0), num))
    s = jnp.sqrt(jnp.maximum(z, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(z))))
    expert = lax.broadcasted_iota(jnp.int32, s.shape, 1)
    left = s
    if "bias" in refs:
        left += plgpu.load(refs["bias"].at[layer, pl.ds(0, num)])[None, :]
    ids, weights = [], []
    for j in range(top_k):
        if "table" in refs:
            token = plgpu.load(refs["token"].at[row])
            chosen = plgpu.load(refs["table"].at[layer, token, jnp.full(row.shape, j, jnp.int32)])
        else:
            best = jnp.max(left, axis=1)
            # Ties go to the lower number; scores that are no numbers give the last expert.
            chosen = jnp.min(jnp.where(left == best[:, None], expert, num - 1), axis=1)
        hit = expert == chosen[:, None]
        ids.append(chosen)
        weights.append(jnp.sum(jnp.where(hit, s, 0.0), axis=1))
        left = jnp.where(hit, -jnp.inf, left)
    return ids, weights
