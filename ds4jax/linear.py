"""Products of rows with weights, plain or packed: the seam between the model and the kernels.

On the reference backend a row meets each weight alone, as a matrix-vector product, so its bits
depend on nothing but the row; packed weights are decoded where they are used. Other backends hand
the whole batch to `pallas_kernels`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ds4jax.config import Backend
from pallas_kernels import dense, experts, norm, packing

F32 = jnp.float32


class Stacked(NamedTuple):
    """One layer's weight inside a stack of layers: kernels take the whole stack and the number."""

    stack: Any  # Array or QuantArray [L, ...]
    layer: Array  # int32 scalar


def _whole(w: Any) -> tuple[Any, Array | None]:
    return (w.stack, w.layer) if isinstance(w, Stacked) else (w, None)


def _entry(w: Any) -> Any:
    """The weight itself; of a stack this copies one layer (reference backend only)."""
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


def matmul(x_TK: Array, w_NK: Any, *, backend: Backend, out_dtype: Any) -> Array:
    """y = x @ w^T, accumulated in float32.

    Args:
        x_TK: float32 or bfloat16. w_NK: Array, QuantArray [N, K], or Stacked.
        backend: resolved backend. out_dtype: dtype of the result.

    Returns: y_TN in `out_dtype`.
    """
    if backend != "reference" and not isinstance(w_NK, Array):
        w, layer = _whole(w_NK)
        return dense.dense(x_TK, w, layer=layer, backend=backend, out_dtype=out_dtype)
    w = decoded(w_NK, x_TK.dtype)
    y = lax.dot_general(
        x_TK,
        w.astype(x_TK.dtype),
        (((1,), (1,)), ((), ())),
        preferred_element_type=F32,
        precision=lax.Precision.HIGHEST,
    )
    return y.astype(out_dtype)


def grouped_matmul(x_TGI: Array, w_NI: Any, *, backend: Backend, out_dtype: Any) -> Array:
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
    backend: Backend,
) -> Array:
    """Sum over a row's experts of w2 (silu(min(g, limit)) * clip(u, limit) * weight), slot by slot.

    Args:
        x_TM: compute dtype. ids_TK: int32 expert numbers, negative for padding rows.
        weights_TK: float32 routing weights, applied before w2.
        w1_EFM, w3_EFM, w2_EMF: gate, up and down of the experts that this device owns, numbers
            first_expert .. first_expert + E - 1; routes to others add nothing and cost nothing.
        limit: SwiGLU limit.

    Returns: y_TM float32.
    Source: architecture of DeepSeek-V4, mixture of experts.
    """
    if backend != "reference":
        (w1, layer), (w3, _), (w2, _) = _whole(w1_EFM), _whole(w3_EFM), _whole(w2_EMF)
        return experts.experts(
            x_TM, ids_TK, weights_TK, w1, w3, w2,
            layer=layer, first_expert=first_expert, limit=limit, backend=backend,
        )  # fmt: skip
    w1_EFM, w3_EFM, w2_EMF = _entry(w1_EFM), _entry(w3_EFM), _entry(w2_EMF)
    owned = jax.tree.leaves(w1_EFM)[0].shape[0]

    def one(x_1M: Array, expert: Array, weight: Array) -> Array:
        w1, w3, w2 = jax.tree.map(lambda a: a[expert], (w1_EFM, w3_EFM, w2_EMF))
        g = matmul(x_1M, w1, backend=backend, out_dtype=F32)
        u = matmul(x_1M, w3, backend=backend, out_dtype=F32)
        h = norm.silu(jnp.minimum(g, limit)) * jnp.clip(u, -limit, limit) * weight
        return matmul(h.astype(x_1M.dtype), w2, backend=backend, out_dtype=F32)[0]

    def slot(j: Array, y: Array) -> Array:
        t, k = j // ids_TK.shape[1], j % ids_TK.shape[1]
        expert = ids_TK[t, k] - first_expert
        x = lax.dynamic_slice_in_dim(x_TM, t, 1)
        live = (expert >= 0) & (expert < owned)
        add = lax.cond(
            live,
            lambda: one(x, jnp.clip(expert, 0, owned - 1), weights_TK[t, k]),
            lambda: jnp.zeros((x_TM.shape[1],), F32),
        )
        return y.at[t].add(add)

    return lax.fori_loop(jnp.int32(0), jnp.int32(ids_TK.size), slot, jnp.zeros(x_TM.shape, F32))


def all_experts(
    x_TM: Array,
    ids_TK: Array,
    weights_TK: Array,
    w1_EFM: Any,
    w3_EFM: Any,
    w2_EMF: Any,
    *,
    limit: float,
) -> Array:
    """`routed_experts` by computing every expert for every row: differentiable, no loop.

    Rows weigh the experts they were not routed to with 0. Costs E / K times the arithmetic, in
    three plain products: for training small models.

    Returns: y_TM float32.
    """
    experts, inner, width = w1_EFM.shape
    hot = jax.nn.one_hot(ids_TK, experts, dtype=F32)
    share_TE = jnp.sum(hot * weights_TK[:, :, None], axis=1)

    def wide(w_EFM: Any) -> Array:
        w = decoded(w_EFM, x_TM.dtype).reshape(experts * inner, width)
        y = matmul(x_TM, w, backend="reference", out_dtype=x_TM.dtype)
        return y.astype(F32).reshape(-1, experts, inner)

    g, u = wide(w1_EFM), wide(w3_EFM)
    h = norm.silu(jnp.minimum(g, limit)) * jnp.clip(u, -limit, limit) * share_TE[:, :, None]
    w2 = decoded(w2_EMF, x_TM.dtype).transpose(1, 0, 2).reshape(width, experts * inner)
    h = h.reshape(-1, experts * inner).astype(x_TM.dtype)
    return matmul(h, w2, backend="reference", out_dtype=F32)
