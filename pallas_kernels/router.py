"""Expert selection: learned scores with a selection bias, or a table indexed by token id."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax


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
    s = _scores(x_TM, gate_EM)
    if table_VK is not None:
        ids = table_VK[token_T][:, :top_k]
    else:
        biased = s if bias_E is None else s + jnp.broadcast_to(bias_E, s.shape)
        ids = lax.top_k(biased, top_k)[1]
    w = jnp.take_along_axis(s, ids, axis=1)
    if normalise:
        w = w / jnp.sum(w, axis=1, keepdims=True)
    return ids.astype(jnp.int32), w * scaling
