"""From logits to tokens, on the device, for every lane by its own parameters.

Randomness is counter-based: the noise of the token at position p depends on the lane's seed and
candidate number, on p and on the vocabulary index, and on nothing else. `sample` handles one row,
`sample_rows` several at once on kernels. Order of operations: bias, penalties, temperature, top_k,
top_p, min_p, draw.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import struct
from jax import Array, lax

from ds4jax.config import BAN, MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS, RuntimeConfig
from ds4jax.plan import MAX_LANE_STOP_IDS, LaneSpec
from pallas_kernels import vocabulary
from pallas_kernels.backend import Backend

TOP = MAX_TOP_LOGPROBS


class _I(IntEnum):
    """Columns of the integer parameters of a lane."""

    SEED_HIGH = 0
    SEED_LOW = 1
    CANDIDATE = 2
    PROMPT_LEN = 3
    TOP_K = 4
    PENALTY_WINDOW = 5  # 0: all
    MIN_POS = 6  # stop ids are banned below this position
    LOGPROBS = 7  # 0: none, 1: of the model, 2: after sampling
    REASONING_MAX = 8  # -1: no limit
    REASONING_OPEN = 9
    OPEN_ID = 10
    CLOSE_ID = 11
    ALSO_CLOSE_ID = 12
    PENALISED = 13  # any penalty in force
    STOP = 14  # first of MAX_LANE_STOP_IDS


class _F(IntEnum):
    """Columns of the float parameters of a lane."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    REPETITION = 3
    FREQUENCY = 4
    PRESENCE = 5


NUM_INTS = _I.STOP + MAX_LANE_STOP_IDS
NUM_FLOATS = len(_F)
LANE_WORDS = NUM_INTS + NUM_FLOATS + 2 * MAX_LOGIT_BIAS
"""int32 words of one lane's parameters in a transfer; floats travel as their bits."""

RESULT_WORDS = 3 + 2 * TOP
"""int32 words of a result: token, finite flag, logprob bits, then TOP ids, TOP logprob bits."""


@struct.dataclass
class Lanes:
    """Sampling parameters of every slot (and the trash slot)."""

    ints: Array  # int32 [S+1, NUM_INTS]
    floats: Array  # float32 [S+1, NUM_FLOATS]
    bias_ids: Array  # int32 [S+1, MAX_LOGIT_BIAS], -1 where unused
    bias: Array  # float32 [S+1, MAX_LOGIT_BIAS]


def lane_shapes(run: RuntimeConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every array of `Lanes`, by field name."""
    slots = run.num_slots + 1
    i32, f32 = jnp.dtype(jnp.int32), jnp.dtype(jnp.float32)
    return {
        "ints": jax.ShapeDtypeStruct((slots, NUM_INTS), i32),
        "floats": jax.ShapeDtypeStruct((slots, NUM_FLOATS), f32),
        "bias_ids": jax.ShapeDtypeStruct((slots, MAX_LOGIT_BIAS), i32),
        "bias": jax.ShapeDtypeStruct((slots, MAX_LOGIT_BIAS), f32),
    }


def init_lanes(run: RuntimeConfig) -> Lanes:
    """Parameters of no lane at all: zeros, greedy."""
    return Lanes(**{k: jnp.zeros(s.shape, s.dtype) for k, s in lane_shapes(run).items()})


def pack_lane(spec: LaneSpec) -> npt.NDArray[np.int32]:
    """The parameters of one lane as int32 [LANE_WORDS], for `set_lane`."""
    s, r = spec.sampling, spec.reasoning
    seed = s.seed or 0
    penalised = s.repetition_penalty != 1.0 or s.frequency_penalty != 0.0
    penalised = penalised or s.presence_penalty != 0.0
    logprobs = 0 if s.top_logprobs is None else 2 if s.logprobs_after_sampling else 1
    ints = np.full(NUM_INTS, -1, np.int32)
    head = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32).view(np.int32)
    ints[:2] = head
    ints[2 : _I.STOP] = [
        spec.candidate,
        len(spec.prompt),
        min(s.top_k, np.iinfo(np.int32).max),
        s.penalty_window or 0,
        len(spec.prompt) + spec.min_output_tokens,
        logprobs,
        -1 if r is None else r.max_tokens,
        0 if r is None else int(r.starts_open),
        -1 if r is None else r.open_id,
        -1 if r is None else r.close_id,
        r.also_close_ids[0] if r is not None and r.also_close_ids else -1,
        int(penalised),
    ]
    ints[_I.STOP : _I.STOP + len(spec.stop_ids)] = spec.stop_ids
    floats = np.array(
        [
            s.temperature, s.top_p, s.min_p,
            s.repetition_penalty, s.frequency_penalty, s.presence_penalty,
        ], np.float32,
    )  # fmt: skip
    bias_ids = np.full(MAX_LOGIT_BIAS, -1, np.int32)
    bias = np.zeros(MAX_LOGIT_BIAS, np.float32)
    for i, (token, value) in enumerate(s.logit_bias):
        bias_ids[i], bias[i] = token, -np.inf if value <= BAN else value
    return np.concatenate([ints, floats.view(np.int32), bias_ids, bias.view(np.int32)])


def set_lane(lanes: Lanes, slot: Array, words: Array) -> Lanes:
    """Store the parameters of one slot. `words`: int32 [LANE_WORDS] as made by `pack_lane`."""
    a, b, c = NUM_INTS, NUM_INTS + NUM_FLOATS, NUM_INTS + NUM_FLOATS + MAX_LOGIT_BIAS
    real = lambda x: lax.bitcast_convert_type(x, jnp.float32)  # noqa: E731
    return Lanes(
        ints=lanes.ints.at[slot].set(words[:a]),
        floats=lanes.floats.at[slot].set(real(words[a:b])),
        bias_ids=lanes.bias_ids.at[slot].set(words[b:c]),
        bias=lanes.bias.at[slot].set(real(words[c:])),
    )


def gumbel(ints: Array, pos: Array, vocab_size: int) -> Array:
    """Noise of the token at `pos`: float32 [V], from (seed, candidate, position, index) alone."""
    data = ints[_I.SEED_HIGH : _I.SEED_LOW + 1].astype(jnp.uint32)
    key = jax.random.wrap_key_data(data, impl="threefry2x32")
    key = jax.random.fold_in(key, ints[_I.CANDIDATE].astype(jnp.uint32))
    key = jax.random.fold_in(key, pos.astype(jnp.uint32))
    return jax.random.gumbel(key, (vocab_size,), jnp.float32)


def _biased(logits_V: Array, ids_B: Array, bias_B: Array) -> Array:
    vocab = logits_V.shape[0]
    return logits_V.at[jnp.where(ids_B >= 0, ids_B, vocab)].add(bias_B, mode="drop")


def _penalised(z_V: Array, ints: Array, floats: Array, history_C: Array, pos: Array) -> Array:
    """Repetition over prompt and output, frequency and presence over the output only.

    Args: history_C: token ids by position; pos: position of the token to come.
    """
    vocab = z_V.shape[0]
    at = jnp.arange(history_C.shape[0], dtype=jnp.int32)
    window = ints[_I.PENALTY_WINDOW]
    seen = (at < pos) & ((window == 0) | (at >= pos - window))
    own = seen & (at >= ints[_I.PROMPT_LEN])
    zeros = jnp.zeros((vocab,), jnp.int32)
    present = zeros.at[jnp.where(seen, history_C, vocab)].max(1, mode="drop") > 0
    counts = zeros.at[jnp.where(own, history_C, vocab)].add(1, mode="drop")
    factor = floats[_F.REPETITION]
    z = jnp.where(present, jnp.where(z_V > 0, z_V / factor, z_V * factor), z_V)
    most = jnp.finfo(jnp.float32).max
    z = jnp.where(z_V == -jnp.inf, z_V, jnp.clip(z, -most, most))  # banned stays banned
    z = z - floats[_F.FREQUENCY] * counts.astype(jnp.float32)
    return z - floats[_F.PRESENCE] * (counts > 0).astype(jnp.float32)


def _forced(ints: Array, history_C: Array, pos: Array) -> Array:
    """Id that must come at `pos` because reasoning has used its budget, or -1."""
    at = jnp.arange(history_C.shape[0], dtype=jnp.int32)
    first = ints[_I.PROMPT_LEN]
    output = (at >= first) & (at < pos)
    opens = output & (history_C == ints[_I.OPEN_ID])
    closes = (history_C == ints[_I.CLOSE_ID]) | (history_C == ints[_I.ALSO_CLOSE_ID])
    closes = output & closes & (history_C >= 0)
    last = lax.cummax(jnp.where(opens | closes, at, -1))
    was_open = jnp.where(last >= 0, opens[jnp.maximum(last, 0)], ints[_I.REASONING_OPEN] > 0)
    count = jnp.sum((output & was_open & ~opens & ~closes).astype(jnp.int32))
    still = jnp.where(pos > first, was_open[jnp.maximum(pos - 1, 0)], ints[_I.REASONING_OPEN] > 0)
    limit = ints[_I.REASONING_MAX]
    return jnp.where(still & (limit >= 0) & (count >= limit), ints[_I.CLOSE_ID], -1)


def _logprobs(z_V: Array, token: Array) -> tuple[Array, Array, Array]:
    """Chosen logprob, TOP ids by falling logprob (ties by id), their logprobs."""
    logp = jax.nn.log_softmax(z_V)
    k = min(TOP, z_V.shape[0])
    top, ids = lax.top_k(logp, k)
    pad = (0, TOP - k)
    return logp[token], jnp.pad(ids, pad, constant_values=-1), jnp.pad(top, pad)


def _scaled(logits_V: Array, lanes: Lanes, past: Array, slot: Array, pos: Array) -> Array:
    """Logits with bias, penalties, bans and temperature; float32 [V]."""
    ints, floats = lanes.ints[slot], lanes.floats[slot]
    z = _biased(logits_V, lanes.bias_ids[slot], lanes.bias[slot])
    z = lax.cond(ints[_I.PENALISED] > 0, lambda: _penalised(z, ints, floats, past, pos), lambda: z)
    stop = ints[_I.STOP :]
    banned = jnp.where((stop >= 0) & (pos < ints[_I.MIN_POS]), stop, z.shape[0])
    z = z.at[banned].set(-jnp.inf, mode="drop")
    hot = floats[_F.TEMPERATURE] > 0
    cool = jnp.where(hot, floats[_F.TEMPERATURE], 1.0)
    # The largest becomes 0, so that no temperature is too small to divide by.
    return jnp.where(hot, (z - jnp.max(z)) / cool, z)


def _limits(lanes: Lanes, slot: Array) -> tuple[Array, Array]:
    """top_k and top_p in force: 0 and 1 where they change nothing. slot: any shape."""
    hot = lanes.floats[slot, _F.TEMPERATURE] > 0
    top_k = jnp.where(hot, lanes.ints[slot, _I.TOP_K], 0)
    return top_k, jnp.where(hot, lanes.floats[slot, _F.TOP_P], 1.0)


def _drawn(
    scaled_V: Array, logits_V: Array, lanes: Lanes, past: Array, slot: Array, pos: Array
) -> tuple[Array, Array]:
    """The token from what top_k and top_p left, and the logits that logprobs are of."""
    ints, floats = lanes.ints[slot], lanes.floats[slot]
    hot = floats[_F.TEMPERATURE] > 0
    floor = jnp.max(scaled_V) + jnp.log(floats[_F.MIN_P])
    final = jnp.where(hot & (scaled_V < floor), -jnp.inf, scaled_V)
    noise = lax.cond(
        hot,
        lambda: gumbel(ints, pos, final.shape[0]),
        lambda: jnp.zeros_like(final),
    )
    token = jnp.argmax(final + noise).astype(jnp.int32)
    forced = lax.cond(
        ints[_I.REASONING_MAX] >= 0, lambda: _forced(ints, past, pos), lambda: jnp.int32(-1)
    )
    token = jnp.where(forced >= 0, forced, token)
    only = jnp.where(jnp.arange(final.shape[0]) == forced, 0.0, -jnp.inf)
    final = jnp.where(forced >= 0, only, final)
    return token, jnp.where(ints[_I.LOGPROBS] == 2, final, logits_V)


def _words(token: Array, logits_V: Array, chosen: Array, top_ids: Array, top: Array) -> Array:
    """One row of results: int32 [RESULT_WORDS]."""
    finite = jnp.all(jnp.isfinite(logits_V)).astype(jnp.int32)
    bits: Any = lambda x: lax.bitcast_convert_type(x, jnp.int32)  # noqa: E731
    return jnp.concatenate([jnp.stack([token, finite, bits(chosen)]), top_ids, bits(top)])


def _greedy(logits_V: Array) -> tuple[Array, Array]:
    token = jnp.argmax(logits_V).astype(jnp.int32)
    zeros = jnp.zeros((TOP,), jnp.int32)
    return token, _words(token, logits_V, jnp.float32(0), zeros, zeros.astype(jnp.float32))


def sample(
    logits_V: Array, lanes: Lanes, history: Array, slot: Array, pos: Array, *, greedy: bool
) -> tuple[Array, Array]:
    """Token for position `pos` of `slot` and its result words.

    Args:
        logits_V: float32, the model's own. lanes: all parameters. history: int32 [S+1, C] token ids
            by position. slot, pos: int32 scalars; pos is the position of the token to come.
        greedy: static; True for a program whose lanes are all plain greedy (no bias, penalties,
            bans or logprobs): the same tokens, less work.

    Returns: token int32 scalar, words int32 [RESULT_WORDS].
    """
    if greedy:
        return _greedy(logits_V)
    past = history[slot]
    scaled = _scaled(logits_V, lanes, past, slot, pos)
    top_k, top_p = _limits(lanes, slot)
    scaled = lax.cond(
        (top_k > 0) | (top_p < 1.0),
        lambda: vocabulary.nucleus_row(scaled, top_k, top_p),
        lambda: scaled,
    )
    token, seen = _drawn(scaled, logits_V, lanes, past, slot, pos)
    chosen, top_ids, top = lax.cond(
        lanes.ints[slot, _I.LOGPROBS] > 0,
        lambda: _logprobs(seen, token),
        lambda: (jnp.float32(0), jnp.full((TOP,), -1, jnp.int32), jnp.zeros((TOP,), jnp.float32)),
    )
    return token, _words(token, logits_V, chosen, top_ids, top)


def sample_rows(
    logits_EV: Array, lanes: Lanes, history: Array, slot_E: Array, pos_E: Array, *,
    greedy: bool, backend: Backend,
) -> tuple[Array, Array]:  # fmt: skip
    """`sample` of several rows at once, by kernels where something is summed up or sorted.

    What XLA makes of sums depends on the number of rows, and of conditions that both sides are
    computed for every row: neither is left to it.

    Returns: tokens int32 [E], words int32 [E, RESULT_WORDS].
    """
    if greedy:
        return jax.vmap(_greedy)(logits_EV)
    past = history[slot_E]
    of_row = (0, None, 0, 0, 0)
    scaled = jax.vmap(_scaled, of_row)(logits_EV, lanes, past, slot_E, pos_E)
    top_k, top_p = _limits(lanes, slot_E)
    scaled = vocabulary.nucleus(scaled, top_k, top_p, backend=backend)
    token, seen = jax.vmap(_drawn, (0, *of_row))(scaled, logits_EV, lanes, past, slot_E, pos_E)
    wanted = lanes.ints[slot_E, _I.LOGPROBS] > 0
    found = vocabulary.logprobs(seen, token, wanted, TOP, backend=backend)
    return token, jax.vmap(_words)(token, logits_EV, *found)
