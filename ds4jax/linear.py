"""Products of rows with weights, plain or packed, in plain JAX.

The model's definition multiplies here; kernels have products of their own (`ds4jax.fused`). A row
that comes alone meets each weight in a matrix-vector product, so its bits depend on nothing but the
row. Packed weights are decoded where they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import norm, packing

F32 = jnp.float32


class Stacked(NamedTuple):
    """One layer's weight inside a stack of layers."""

    stack: Any  # Array or QuantArray [L, ...]
    layer: Array  # int32 scalar


def _entry(w: Any) -> Any:
    """The weight itself; of a stack this copies one layer."""
    return jax.tree.map(lambda a: a[w.layer], w.stack) if isinstance(w, Stacked) else w


def decoded(w: Any, dtype: Any) -> Array:
    """A weight as a plain array of `dtype`; packed ones are unpacked."""
    w = _entry(w)
    if isinstance(w, Array):
        return w
    return packing.unpack(w, dtype=dtype)


def take_rows(w_NK: Any, rows_T: Array, dtype: Any) -> Array:
    """Rows of one matrix (an embedding lookup) as [T, K] of `dtype`."""
    if isinstance(w_NK, Array):
        return w_NK[rows_T].astype(dtype)
    return packing.take_rows(w_NK, rows_T, dtype)


def matmul(x_TK: Array, w_NK: Any, *, out_dtype: Any) -> Array:
    """y = x @ w^T, accumulated in float32.

    Args:
        x_TK: float32 or bfloat16. w_NK: Array, QuantArray [N, K], or Stacked.
        out_dtype: dtype of the result.

    Returns: y_TN in `out_dtype`.
    """
    w = decoded(w_NK, x_TK.dtype)
    y = lax.dot_general(
        x_TK,
        w.astype(x_TK.dtype),
        (((1,), (1,)), ((), ())),
        preferred_element_type=F32,
        precision=lax.Precision.HIGHEST,
    )
    return y.astype(out_dtype)


def grouped_matmul(x_TGI: Array, w_NI: Any, *, out_dtype: Any) -> Array:
    """z[t, g] = w[g] @ x[t, g] with w [G*O, I] seen as [G, O, I]; float32 accumulation.

    Returns: z_TGO in `out_dtype`.
    """
    groups = x_TGI.shape[1]
    w = decoded(w_NI, x_TGI.dtype).astype(x_TGI.dtype)
    w = w.reshape(groups, w.shape[0] // groups, w.shape[1])
    z = jnp.einsum(
        "tgi,goi->tgo", x_TGI, w, preferred_element_type=F32, precision=lax.Precision.HIGHEST
    )
    return z.astype(out_dtype)


Product = Callable[[Array, int, Array], Array]
"""A row [1, K] times matrix 0 (gate), 1 (up) or 2 (down) of an expert; float32 [1, N]."""


def routed_experts(
    x_TM: Array,
    ids_TK: Array,
    weights_TK: Array,
    w1_EFM: Any,
    w3_EFM: Any,
    w2_EMF: Any,
    *,
    first_expert: int,
    limit: Any,
) -> Array:
    """Sum over a row's experts of w2 (silu(min(g, limit)) * clip(u, limit) * weight).

    Expert by expert, so that the rows of one expert find its weights in the processor's cache; a
    row adds its experts up in ascending order, whatever the other rows take.

    Args:
        x_TM: compute dtype. ids_TK: int32 expert numbers, negative for padding rows.
        weights_TK: float32 routing weights, applied before w2.
        w1_EFM, w3_EFM, w2_EMF: gate, up and down of the experts that this device owns, numbers
            first_expert .. first_expert + E - 1; routes to others add nothing and cost nothing.
        limit: SwiGLU limit.

    Returns: y_TM float32.
    Source: architecture of DeepSeek-V4, mixture of experts.
    """
    stacks = (w1_EFM, w3_EFM, w2_EMF)
    owned, inner = _plain_or_packed(w1_EFM).shape[-3:-1]
    expert = ids_TK.reshape(-1) - first_expert
    expert = jnp.where((expert >= 0) & (expert < owned), expert, owned)
    order = jnp.argsort(expert)  # stable
    live = jnp.sum(expert < owned, dtype=jnp.int32)
    start, y = jnp.int32(0), jnp.zeros(x_TM.shape, F32)

    def routes(first: Array, last: Array, y: Array, product: Product) -> Array:
        """Add the routes first .. last - 1 of the order."""

        def route(i: Array, y: Array) -> Array:
            j = order[i]
            t, e = j // ids_TK.shape[1], expert[j]
            x = lax.dynamic_slice_in_dim(x_TM, t, 1)

            def hidden() -> Array:
                g, u = product(x, 0, e), product(x, 1, e)
                h = norm.silu(jnp.minimum(g, limit)) * jnp.clip(u, -limit, limit)
                return (h * weights_TK.reshape(-1)[j]).astype(x_TM.dtype)

            # A condition that always holds: what lies between two products is computed again for
            # every output unless it is the result of a computation of its own.
            h = lax.cond(e < owned, hidden, lambda: jnp.zeros((1, inner), x_TM.dtype))
            row = lax.dynamic_slice_in_dim(y, t, 1) + product(h, 2, e)
            return lax.dynamic_update_slice_in_dim(y, row, t, 0)

        out: Array = lax.fori_loop(first, last, route, y)
        return out

    if all(isinstance(_plain_or_packed(w), Array) for w in stacks):
        return routes(start, live, y, lambda x, which, e: _expert_product(x, stacks[which], e))

    def one_expert(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        i, y = carry
        e = expert[order[i]]
        w = [decoded(_expert(stack, e), x_TM.dtype) for stack in stacks]
        last = i + jnp.sum(expert == e, dtype=jnp.int32)
        return last, routes(i, last, y, lambda x, which, _: matmul(x, w[which], out_dtype=F32))

    return lax.while_loop(lambda carry: carry[0] < live, one_expert, (start, y))[1]


def _plain_or_packed(w: Any) -> Any:
    return w.stack if isinstance(w, Stacked) else w


def _expert(w: Any, expert: Array) -> Any:
    """One expert's matrix out of a stack, or out of a stack of stacks; a copy."""
    lead = (w.layer, expert) if isinstance(w, Stacked) else (expert,)
    w = _plain_or_packed(w)
    for i in lead:
        w = w[i] if isinstance(w, Array) else packing.index(w, i)
    return w


def _expert_product(x_1K: Array, w_ENK: Any, expert: Array) -> Array:
    """x @ w[expert]^T, float32 [1, N], without a copy of w[expert], a plain array.

    XLA's CPU products read whole buffers only: a matrix chosen by number is copied first, which
    costs more than the product. Element-wise operations fuse with the slices they read, so K is cut
    into a few parts whose products are added element by element, and a sum over one part remains.
    """
    lead = (w_ENK.layer, expert) if isinstance(w_ENK, Stacked) else (expert,)
    w = _plain_or_packed(w_ENK)
    n, k = w.shape[-2:]
    parts = next(p for p in (8, 4, 2, 1) if k % p == 0 and (k // p >= 16 or p == 1))
    width = k // parts
    total = jnp.zeros((n, width), F32)
    for start in range(0, k, width):
        at = (*lead, jnp.int32(0), jnp.int32(start))
        part = lax.dynamic_slice(w, at, (1,) * len(lead) + (n, width)).reshape(n, width)
        total += part.astype(F32) * x_1K[:, start : start + width].astype(F32)
    return matmul(jnp.ones((1, width), F32), total, out_dtype=F32)


GROUP_ROWS = 32
"""Rows of one expert multiplied together by `grouped_experts`."""


def grouped_experts(
    x_TM: Array,
    ids_TK: Array,
    weights_TK: Array,
    w1_EFM: Any,
    w3_EFM: Any,
    w2_EMF: Any,
    *,
    limit: Any,
) -> Array:
    """`routed_experts` in differentiable form: static shapes, no loop, no row dropped.

    Routes are sorted by expert and laid out in blocks of `GROUP_ROWS` rows that share one; there
    are always enough blocks for the last block of every expert to be part empty.

    Args: as of `routed_experts`, every expert owned and every row live.

    Returns: y_TM float32.
    """
    experts, (count, top_k) = w1_EFM.shape[0], ids_TK.shape
    blocks = -(-count * top_k // GROUP_ROWS) + experts
    flat = ids_TK.reshape(-1)
    hot = jax.nn.one_hot(flat, experts, dtype=jnp.int32)
    of_expert = jnp.sum(hot, axis=0)
    first_block = jnp.cumsum(-(-of_expert // GROUP_ROWS)) - -(-of_expert // GROUP_ROWS)
    order = jnp.cumsum(hot, axis=0)[jnp.arange(flat.shape[0], dtype=jnp.int32), flat] - 1
    place = first_block[flat] * GROUP_ROWS + order  # row of the layout that each route takes
    route = jnp.full(blocks * GROUP_ROWS, flat.shape[0], jnp.int32)
    route = route.at[place].set(jnp.arange(flat.shape[0], dtype=jnp.int32))
    number = jnp.arange(blocks, dtype=jnp.int32)
    expert_B = jnp.sum(number[:, None] >= first_block[None, :], axis=1, dtype=jnp.int32) - 1

    def multiply(rows: Array, w: Any) -> Array:
        w = decoded(w, x_TM.dtype).astype(x_TM.dtype)[expert_B]
        return jnp.einsum(
            "brk,bnk->brn", rows, w, preferred_element_type=F32, precision=lax.Precision.HIGHEST
        )

    row = jnp.minimum(route // top_k, count - 1)
    x = x_TM[row].reshape(blocks, GROUP_ROWS, -1)
    share = jnp.append(weights_TK.reshape(-1), 0.0)[route].reshape(blocks, GROUP_ROWS, 1)
    g, u = multiply(x, w1_EFM), multiply(x, w3_EFM)
    h = norm.silu(jnp.minimum(g, limit)) * jnp.clip(u, -limit, limit) * share
    y = multiply(h.astype(x_TM.dtype), w2_EMF).reshape(blocks * GROUP_ROWS, -1)
    return jnp.sum(y[place].reshape(count, top_k, -1), axis=1)
