"""What this device can do at most: copy and read bandwidth, matrix rate, launch latency. JSON.

    python -m bench.limits [--device cpu] [--json OUT]

Run by the other benchmarks in a process of its own, before anything else is on the device. The copy
is a device-side `x + 1` of one large array: read and write are both counted. Reading is a sum on a
device. On a CPU both are the best of one thread and a thread for every core (copies into an array
that exists, scalar products), and the matrix rate is that of float32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np


def measure() -> dict[str, Any]:
    """Limits of JAX's default device, and what it is called."""
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]
    small = device.platform == "cpu"
    count = (64 << 20) if small else (1 << 30)  # float32 numbers
    add = jax.jit(lambda x: x + jnp.float32(1))
    rates = _host_rates(count) if small else _device_rates(add, jnp.zeros((count,), jnp.float32))
    size = 1024 if small else 8192
    key = jax.random.key(0)
    dtype = jnp.float32 if small else jnp.bfloat16
    a = jax.random.normal(key, (size, size), dtype)
    dot = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    product = _median(lambda: dot(a).block_until_ready(), 3 if small else 10)
    tiny = jnp.zeros((8,), jnp.float32)
    launch = _median(lambda: add(tiny).block_until_ready(), 50)
    stats = device.memory_stats() or {}
    return {
        **rates,
        "matmul_TFLOPs": 2 * size**3 / product / 1e12,
        "matmul_dtype": jnp.dtype(dtype).name,
        "launch_us": launch * 1e6,
        "devices": [
            {"name": d.device_kind, "arch": getattr(d, "compute_capability", d.platform),
             "memory_bytes": stats.get("bytes_limit"), "driver": d.client.platform_version}
            for d in jax.devices()
        ],
    }  # fmt: skip


def _device_rates(add: Callable[[Any], Any], array: Any) -> dict[str, float]:
    """Bytes per second of copying (both ways counted) and of reading an array."""
    import jax
    import jax.numpy as jnp

    total = jax.jit(jnp.sum)
    copy = _median(lambda: add(array).block_until_ready(), 10)
    read = _median(lambda: total(array).block_until_ready(), 10)
    return {"copy_GBps": 2 * array.nbytes / copy / 1e9, "read_GBps": array.nbytes / read / 1e9}


def _host_rates(count: int) -> dict[str, float]:
    """The same in host memory, for `count` float32 numbers."""
    a = np.ones(count, np.float32)
    b = np.ones_like(a)
    copy = read = float("inf")
    for threads in {1, len(os.sched_getaffinity(0))}:
        pairs = list(zip(np.array_split(a, threads), np.array_split(b, threads), strict=True))
        with ThreadPoolExecutor(threads) as pool:
            run = pool.map
            read = min(read, _median(lambda: list(run(lambda p: np.dot(p[0], p[0]), pairs)), 7))  # noqa: B023
            copy = min(copy, _median(lambda: list(run(lambda p: np.copyto(*p), pairs)), 7))  # noqa: B023
    return {"copy_GBps": 2 * a.nbytes / copy / 1e9, "read_GBps": a.nbytes / read / 1e9}


def _median(call: Callable[[], Any], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="bench.limits", description=__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "rocm"), default="auto")
    parser.add_argument("--json", default="-", metavar="OUT")
    args = parser.parse_args(argv)
    if args.device != "auto":
        import jax

        jax.config.update("jax_platforms", args.device)
    text = json.dumps(measure())
    if args.json == "-":
        print(text)
    else:
        Path(args.json).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
