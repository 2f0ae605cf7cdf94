"""Timing of single kernels on a GPU: random packed weights, rotation past the cache, medians.

Used by `bench.kernels` (the report) and `bench.tune` (the search for tiles). Not a command.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import formats, packing

CACHE_BYTES = 256 << 20
"""Weights that a timed chain walks through, at least: several times a large GPU's L2."""


_SCALE_BYTE = {"e8m0": 0x78, "e5m3": 0x90, "ue4m3": 0x38, "f16": 0x30, "k": 0x30, "tile": 0}


def _repeat(byte: int) -> int:
    """`byte` four times, as a signed 32-bit number."""
    word = byte * 0x01010101
    return word - (1 << 32) if word >> 31 else word


def random_weights(name: str, lead: tuple[int, ...], rows: int, cols: int) -> packing.QuantArray:
    """Packed weights of moderate size, made on the device."""

    def fill(key: jax.Array, like: jax.ShapeDtypeStruct, scale: bool) -> jax.Array:
        if like.dtype != jnp.int32:
            return jax.random.normal(key, like.shape, jnp.float32).astype(like.dtype)
        bits = jax.lax.bitcast_convert_type(jax.random.bits(key, like.shape), jnp.int32)
        # Scales a little below one in the byte forms; small positive float16 in the others.
        return (bits & 0x03030303) | _repeat(_SCALE_BYTE[fmt.scale]) if scale else bits

    fmt = formats.get(name)
    shapes = packing.abstract(name, lead, rows, cols)

    @jax.jit
    def make() -> packing.QuantArray:
        new = {
            f: fill(jax.random.key(i), getattr(shapes, f), f in ("scales", "mins", "supers"))
            for i, f in enumerate(packing.FIELDS)
            if getattr(shapes, f) is not None
        }
        return packing.QuantArray(**new, format=name, rows=rows, cols=cols)

    return make()


def chain_seconds(
    call: Callable[..., Any], args: tuple[Any, ...], count: int, *, repeats: int = 5
) -> tuple[float, float]:
    """Seconds per call and their spread, without what starting and ending a program costs.

    `call(i, *args)` with a traced i < count runs in one device loop, two calls an iteration; the
    difference between a long and a short loop is divided by the calls between them.
    """
    shapes = jax.eval_shape(lambda *a: call(jnp.int32(0), *a), *args)
    unrolled = 2

    @jax.jit
    def run(iterations: jax.Array, *args: Any) -> Any:
        def body(i: jax.Array, out: tuple[Any, ...]) -> tuple[Any, ...]:
            del out
            return tuple(call((i * unrolled + u) % count, *args) for u in range(unrolled))

        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return jax.lax.fori_loop(0, iterations, body, (zero,) * unrolled)

    def sample(iterations: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(jnp.int32(iterations), *args))
        return time.perf_counter() - start

    low, high = 8, 72
    for n in (low, high):
        sample(n)
    differences = []
    for _ in range(repeats):
        short, long = (min(sample(n) for _ in range(3)) for n in (low, high))
        differences.append((long - short) / ((high - low) * unrolled))
    return statistics.median(differences), max(differences) - min(differences)


def copy_bandwidth(nbytes: int = 4 << 30) -> float:
    """Bytes per second, read plus written, of a device-to-device copy."""
    a = jnp.ones((nbytes // 4,), jnp.float32)
    copy = jax.jit(lambda a: a * 2)
    jax.block_until_ready(copy(a))
    samples = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(copy(a))
        samples.append(time.perf_counter() - start)
    return 2 * nbytes / statistics.median(samples)
