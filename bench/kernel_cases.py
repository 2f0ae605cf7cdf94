"""The small kernels of a layer with random operands, for timing and for tests on a device.

A case runs one kernel for some of its rows, so that the same call shows whether rows keep their
bits, and says what the kernel must move.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ds4jax.config import ModelConfig
from pallas_kernels import dense, qkv, rope, router, streams, vocabulary
from pallas_kernels.backend import Backend

Rows = jax.Array


@dataclass(frozen=True)
class Case:
    """One kernel.

    Attributes:
      args: operands for all rows. run: (args, int32 rows, backend) -> results, row axis first.
      row_bytes: what one row reads and writes. fixed_bytes: what is read once.
      tolerance: of the results against the reference, relative to the row's norm.
      settled: what is compared with the reference of what the kernel wrote (the bits of which are
        compared as they are): NumPy arrays.
    """

    name: str
    args: dict[str, Any]
    run: Callable[[dict[str, Any], Rows, Backend], tuple[jax.Array, ...]]
    row_bytes: int
    fixed_bytes: int = 0
    tolerance: float = 1e-2
    settled: Callable[[list[Any]], list[Any]] = list


def _normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def cases(cfg: ModelConfig, rows: int) -> list[Case]:
    """All of them at a model's sizes, in the order of a layer."""
    return [_mix(cfg, rows), _read(cfg, rows), _inputs(cfg, rows), _heads(cfg, rows),
            _router(cfg, rows)]  # fmt: skip


def _sizes(cfg: ModelConfig) -> streams.Sizes:
    return streams.Sizes(
        n=cfg.hc_mult, iters=cfg.hc_sinkhorn_iters, hc_eps=cfg.hc_eps, rms_eps=cfg.rms_norm_eps
    )


def _mix(cfg: ModelConfig, rows: int) -> Case:
    n, d, k = cfg.hc_mult, cfg.hidden_size, cfg.num_experts_per_tok
    entries = (2 + n) * n
    args = {
        "streams": _normal(0, rows, n * d).astype(jnp.bfloat16),
        "routed": _normal(1, k, rows, d), "shared": _normal(2, 8, rows, d),
        "ids": jnp.asarray(np.random.default_rng(0).integers(-1, 9, (rows, k)), jnp.int32),
        "post": jax.nn.sigmoid(_normal(3, rows, n)), "comb": jax.nn.softmax(_normal(4, rows, n, n)),
        "fn": _normal(5, 2, entries, n * d) * (n * d) ** -0.5,
    }  # fmt: skip

    def run(a: dict[str, Any], at: Rows, backend: Backend) -> tuple[jax.Array, ...]:
        p = streams.Pending(
            a["streams"][at], (a["routed"][:, at], a["shared"][:, at]), a["ids"][at],
            a["post"][at], a["comb"][at],
        )  # fmt: skip
        return streams.mix(p, a["fn"], layer=1, backend=backend)

    def settled(got: list[Any]) -> list[Any]:
        # The reference has one chunk of channels: compare what the chunks add up to.
        return [got[0], got[1].reshape(len(got[1]), -1, streams.COLUMNS).sum(1)]

    return Case(
        "streams_mix", args, run, 2 * 2 * n * d + 4 * (k + 8) * d, 4 * entries * n * d,
        settled=settled,
    )  # fmt: skip


def _read(cfg: ModelConfig, rows: int) -> Case:
    n, d = cfg.hc_mult, cfg.hidden_size
    entries, chunks = (2 + n) * n, d // streams.CHUNK
    mixed = _normal(1, rows, chunks, streams.COLUMNS) * chunks**-0.5
    squares = jnp.full((rows, chunks), n * d / chunks, jnp.float32)
    args = {
        "streams": _normal(0, rows, n * d).astype(jnp.bfloat16),
        "mixed": mixed.at[:, :, -1].set(squares).reshape(rows, -1),
        "scale": _normal(2, 2, 3), "base": _normal(3, 2, entries), "norm": _normal(4, 2, d),
    }  # fmt: skip

    def run(a: dict[str, Any], at: Rows, backend: Backend) -> tuple[jax.Array, ...]:
        return streams.read(
            a["streams"][at], a["mixed"][at], a["scale"], a["base"], a["norm"], layer=1,
            sizes=_sizes(cfg), backend=backend,
        )  # fmt: skip

    return Case("streams_read", args, run, 2 * (n + 1) * d + 4 * chunks * streams.COLUMNS)


def _angles(cfg: ModelConfig, pos: jax.Array) -> jax.Array:
    freqs = rope.inverse_frequencies(cfg.rope_head_dim, cfg.rope_theta)
    return rope.cos_sin(jnp.asarray(rope.angle_tables(freqs, 4096)), pos)


def _inputs(cfg: ModelConfig, rows: int) -> Case:
    q, d, di, parts = cfg.q_lora_rank, cfg.head_dim, cfg.index_head_dim, 8
    pos = jnp.arange(rows, dtype=jnp.int32) + 200
    wide = {"q": q, "kv": d, "v0": 2 * d, "g0": 2 * d, "v1": 2 * di, "g1": 2 * di,
            "w": cfg.index_num_heads}  # fmt: skip
    args = {k: _normal(i, parts, rows, n) for i, (k, n) in enumerate(wide.items())}
    args |= {
        "q_norm": _normal(7, 2, q), "kv_norm": _normal(8, 2, d), "a0": _normal(9, 2, 4, 2 * d),
        "a1": _normal(10, 2, 4, 2 * di), "pos": pos, "cs": _angles(cfg, pos),
        "raw": jnp.zeros((2, rows + 1, 144, d), jnp.bfloat16),
    }  # fmt: skip

    def run(a: dict[str, Any], at: Rows, backend: Backend) -> tuple[jax.Array, ...]:
        part = {k: a[k][:, at] for k in wide}
        got = qkv.inputs(
            qkv.Projected(
                part["q"], part["kv"],
                (qkv.Compress(part["v0"], part["g0"], a["a0"]),
                 qkv.Compress(part["v1"], part["g1"], a["a1"])),
                part["w"],
            ),
            a["q_norm"], a["kv_norm"], a["raw"], at, a["pos"][at], a["cs"][at], layer=1,
            ring_layer=1, keep=True, weight_scale=0.1, eps=cfg.rms_norm_eps, backend=backend,
        )  # fmt: skip
        assert got.weight_TI is not None
        return got.q_TQ, got.ring[1, at, a["pos"][at] % 144], *got.states, got.weight_TI

    count = sum(wide.values())
    return Case("qkv_inputs", args, run, 4 * parts * count + 4 * count)


def _heads(cfg: ModelConfig, rows: int) -> Case:
    h, d, i, di = cfg.num_heads, cfg.head_dim, cfg.index_num_heads, cfg.index_head_dim
    pos = jnp.arange(rows, dtype=jnp.int32) + 200
    args = {"q": _normal(0, 1, rows, h * d), "i": _normal(1, 2, rows, i * di),
            "cs": _angles(cfg, pos)}  # fmt: skip

    def run(a: dict[str, Any], at: Rows, backend: Backend) -> tuple[jax.Array, ...]:
        return tuple(
            qkv.heads(
                (a["q"][:, at], a["i"][:, at]), a["cs"][at], ((d, True), (di, False)),
                eps=cfg.rms_norm_eps, backend=backend,
            )
        )  # fmt: skip

    return Case("qkv_heads", args, run, 6 * h * d + 10 * i * di)


def _router(cfg: ModelConfig, rows: int) -> Case:
    e, f, k = cfg.num_experts, cfg.moe_intermediate_size, cfg.num_experts_per_tok
    args = {
        "gate": _normal(0, 8, rows, e), "g": _normal(1, 8, rows, f), "u": _normal(2, 8, rows, f),
        "bias": _normal(3, 2, e), "live": jnp.arange(rows) % 5 != 4,
    }  # fmt: skip

    def run(a: dict[str, Any], at: Rows, backend: Backend) -> tuple[jax.Array, ...]:
        shared = router.Shared(a["g"][:, at], a["u"][:, at], 10.0)
        return router.select(
            a["gate"][:, at], shared, bias_LE=a["bias"], table_LVK=None, token_T=at,
            live_T=a["live"][at], layer=1, top_k=k, scaling=1.5, normalise=True, backend=backend,
        )  # fmt: skip

    return Case("router", args, run, 4 * 8 * (e + 2 * f) + 2 * f)


def sampling(cfg: ModelConfig, rows: int) -> list[Case]:
    """The two of sampling; three rows of four ask for something."""
    v, every = cfg.vocab_size, jnp.arange(rows, dtype=jnp.int32)
    some = every % 4 != 3
    args = {
        "z": 3 * _normal(0, rows, v), "wanted": some, "token": every * 17 % v,
        "top_k": jnp.where(some & (every % 4 != 0), 50, 0),
        "top_p": jnp.where(some & (every % 4 != 1), jnp.float32(0.9), jnp.float32(1)),
    }  # fmt: skip

    def nucleus(a: dict[str, Any], at: Rows, backend: Backend) -> tuple[jax.Array, ...]:
        z = vocabulary.nucleus(a["z"][at], a["top_k"][at], a["top_p"][at], backend=backend)
        return (jnp.exp(z - jnp.max(z, axis=1, keepdims=True)),)

    def logprobs(a: dict[str, Any], at: Rows, backend: Backend) -> tuple[jax.Array, ...]:
        chosen, ids, top = vocabulary.logprobs(
            a["z"][at], a["token"][at], a["wanted"][at], 20, backend=backend
        )
        return chosen, ids.astype(jnp.float32), top

    # One token whose place is top_p within rounding may fall on either side.
    return [
        Case("nucleus", args, nucleus, 4 * v, tolerance=2e-2),
        Case("logprobs", args, logprobs, 4 * v, tolerance=1e-5),
    ]


def check(case: Case, rows: int, backend: Backend) -> float:
    """Largest error of a row against the reference; rows must keep their bits in a smaller batch.

    Raises: RuntimeError if anything is wrong.
    """
    one = jax.jit(case.run, static_argnames="backend")
    every = jnp.arange(rows, dtype=jnp.int32)
    some = every[::3][::-1]
    whole, want = (
        [np.asarray(x) for x in one(case.args, every, backend=b)] for b in (backend, "reference")
    )
    part = one(case.args, some, backend=backend)
    worst = 0.0
    for a, b in zip(case.settled(whole), case.settled(want), strict=True):
        got, right = (x.astype(np.float64).reshape(rows, -1) for x in (a, b))
        scale = np.linalg.norm(right, axis=1) + 1e-9
        worst = max(worst, float(np.max(np.linalg.norm(got - right, axis=1) / scale)))
    for a, c in zip(whole, part, strict=True):
        if not np.array_equal(a[np.asarray(some)], np.asarray(c)):
            raise RuntimeError(f"{case.name}: a row's bits depend on its batch of {rows}")
    if not worst <= case.tolerance:
        raise RuntimeError(f"{case.name}, {rows} rows: error {worst:.2e} of {case.tolerance}")
    return worst


def several_case(rows: int, k: int = 4096) -> tuple[Any, Any]:
    """Plain matrices of two dtypes for `dense.several`, and rows."""
    ws = [_normal(1, 2, 1024, k), _normal(2, 2, 512, k).astype(jnp.bfloat16)]
    return [w * k**-0.5 for w in ws], _normal(3, rows, k).astype(jnp.bfloat16)


def several(x: Any, ws: Any, backend: Backend) -> list[jax.Array]:
    """Their products."""
    return [dense.in_order(y) for y in dense.several(x, ws, layer=1, backend=backend)]
