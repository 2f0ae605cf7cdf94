"""Timing of single kernels on a GPU: random packed weights, rotation past the cache, medians.

Used by `bench.kernels` (the report) and `bench.tune` (the search for tiles). Not a command.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
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


def device_seconds(
    call: Callable[..., Any], args: tuple[Any, ...], count: int
) -> dict[str, list[float]]:
    """Durations of every kernel that `call(i, *args)`, i < count, started, by kernel name.

    Read from the profiler, so neither launches nor the host are in them.

    Raises: RuntimeError if the profiler saw no kernel.
    """

    one = jax.jit(call)

    @jax.jit
    def run(*args: Any) -> list[Any]:
        return [one(jnp.int32(i), *args) for i in range(count)]

    return durations(run, args)


def looped(call: Callable[..., Any], args: tuple[Any, ...], count: int) -> Callable[..., Any]:
    """A compiled program of all `call(i, *args)`, i < count, in a loop: little to compile.

    What collects the results adds kernels of its own.
    """

    def run(*args: Any) -> Any:
        return jax.lax.map(lambda i: call(i, *args), jnp.arange(count, dtype=jnp.int32))

    compiled: Callable[..., Any] = jax.jit(run).lower(*args).compile()
    return compiled


def durations(run: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, list[float]]:
    """Durations of every kernel of `run(*args)` by name, after two runs that do not count.

    Raises: RuntimeError if the profiler saw no kernel.
    """
    for _ in range(2):
        jax.block_until_ready(run(*args))
    found: dict[str, list[float]] = {}
    for name, seconds in events(lambda: jax.block_until_ready(run(*args))):
        found.setdefault(name, []).append(seconds)
    return found


def events(work: Callable[[], Any]) -> list[tuple[str, float]]:
    """Name and seconds of every kernel that `work` runs, in the order of their starts.

    Raises: RuntimeError if the profiler saw no kernel.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            work()
        [path] = Path(folder).rglob("*.xplane.pb")
        planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
        found = sorted(
            (event.start_ns, event.name, event.duration_ns * 1e-9)
            for plane in planes if plane.name.startswith("/device:GPU")
            for line in plane.lines if line.name.startswith("Stream")
            for event in line.events
        )  # fmt: skip
    if not found:
        seen = [(p.name, [line.name for line in p.lines]) for p in planes]
        raise RuntimeError(f"the profiler recorded no kernel on a GPU stream; it has {seen}")
    return [(name, seconds) for _, name, seconds in found]


def chain_seconds(call: Callable[..., Any], args: tuple[Any, ...], count: int) -> float:
    """Wall seconds per call in a program of many calls, less those of a shorter one."""
    one = jax.jit(call)

    def program(n: int) -> Callable[..., Any]:
        return jax.jit(lambda *a: [one(jnp.int32(i % count), *a) for i in range(n)])

    times = []
    for n in (16, 64):
        run = program(n)
        jax.block_until_ready(run(*args))
        samples = []
        for _ in range(7):
            start = time.perf_counter()
            jax.block_until_ready(run(*args))
            samples.append(time.perf_counter() - start)
        times.append(statistics.median(samples))
    return (times[1] - times[0]) / 48


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
