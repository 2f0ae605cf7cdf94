"""What this device can do at most: copy bandwidth, matrix rate, launch latency. JSON on stdout.

    python -m bench.limits [--device cpu] [--json OUT]

Run by the other benchmarks in a process of its own, before anything else is on the device. The copy
is a device-side `x + 1` of one large array: read and write are both counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def measure() -> dict[str, Any]:
    """Limits of JAX's default device, and what it is called."""
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]
    small = device.platform == "cpu"
    count = (64 << 20) if small else (1 << 30)  # float32 numbers
    add = jax.jit(lambda x: x + jnp.float32(1))
    copy = _copy_seconds(add, jnp.zeros((count,), jnp.float32), 3 if small else 10)
    size = 1024 if small else 8192
    key = jax.random.key(0)
    a = jax.random.normal(key, (size, size), jnp.bfloat16)
    dot = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    product = _median(lambda: dot(a).block_until_ready(), 3 if small else 10)
    tiny = jnp.zeros((8,), jnp.float32)
    launch = _median(lambda: add(tiny).block_until_ready(), 50)
    stats = device.memory_stats() or {}
    return {
        "copy_GBps": 2 * 4 * count / copy / 1e9,
        "matmul_TFLOPs": 2 * size**3 / product / 1e12,
        "launch_us": launch * 1e6,
        "devices": [
            {"name": d.device_kind, "arch": getattr(d, "compute_capability", d.platform),
             "memory_bytes": stats.get("bytes_limit"), "driver": d.client.platform_version}
            for d in jax.devices()
        ],
    }  # fmt: skip


def _copy_seconds(add: Callable[[Any], Any], array: Any, repeats: int) -> float:
    return _median(lambda: add(array).block_until_ready(), repeats)


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
