"""Single kernels at the real model's sizes: bytes and operations per second against the device.

    python -m bench.kernels --json OUT [--formats a,b] [--sizes small|flash] [--rows 1,8,512]

Every cell is checked before it is timed: against the plain-JAX reference, and row by row against
the same rows in another batch (bits). On a GPU the time is that of the kernels themselves, from the
profiler, over weights several times the cache; on a CPU it is the wall time of the reference, which
is what a CPU runs. Bytes are those of the packed weights that must be read once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import cache_cases, flash, kernel_cases, kernel_timing, limits, models, report
from ds4jax.config import ModelConfig
from pallas_kernels import backend as backend_lib
from pallas_kernels import dense, experts, packing
from pallas_kernels.backend import Backend

FLASH = {
    "wq_b": (32768, 1024),
    "wo_b": (4096, 8192),
    "shared_w1": (2048, 4096),
    "shared_w2": (4096, 2048),
    "head": (129280, 4096),
}
"""Outputs and inputs of the dense matrices of DeepSeek-V4-Flash."""

SMALL = {"square": (256, 512)}

FORMATS = ("rocmfp4", "q8_0", "mxfp4", "rocmfp2_s40", "rocmfp3")
EXPERTS = (("mxfp4", "mxfp4"), ("rocmfp2_s40", "rocmfp3"))

Call = Callable[..., jax.Array]
Cell = dict[str, Any]


def activations(rows: int, cols: int) -> jax.Array:
    """Random rows, bfloat16."""
    x = jax.random.normal(jax.random.key(1), (rows, cols), jnp.float32)
    return (x * 0.25).astype(jnp.bfloat16)


def checks(call: Call, reference: Call, x: jax.Array, tolerance: float) -> dict[str, Any]:
    """Error against the reference, and whether rows keep their bits in a smaller batch.

    Raises: RuntimeError if either is wrong: a time of wrong results is worth nothing.
    """
    got, want = (np.asarray(jax.jit(f)(x), np.float64) for f in (call, reference))
    error = float(np.max(np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)))
    fewer = np.asarray(jax.jit(call)(x[: max(1, len(x) // 3)]), np.float64)
    same = bool(np.array_equal(fewer, got[: len(fewer)]))
    if not error <= tolerance or not same:
        raise RuntimeError(f"wrong result: error {error:.2e} (limit {tolerance}), same bits {same}")
    return {"error": error, "rows_keep_bits": same}


def timed(call: Call, args: tuple[Any, ...], count: int) -> dict[str, Any]:
    """Seconds of one call, and of each kernel in it on a GPU."""
    if backend_lib.platform() == "cpu":
        run = jax.jit(call)
        samples = []
        for i in range(count + 2):
            start = time.perf_counter()
            jax.block_until_ready(run(jnp.int32(i % count), *args))
            samples.append(time.perf_counter() - start)
        return {"seconds": statistics.median(samples[2:]), "method": "wall"}
    found = kernel_timing.device_seconds(call, args, count)
    kernels = {k: {"seconds": statistics.median(v), "spread": max(v) - min(v),
                   "per_call": len(v) / count} for k, v in found.items()}  # fmt: skip
    total = sum(k["seconds"] * k["per_call"] for k in kernels.values())
    return {"seconds": total, "method": "profiler", "kernels": kernels}


def rated(cell: Cell, nbytes: float, operations: float, copy_GBps: float) -> Cell:
    """A cell with its rates."""
    s = cell["seconds"]
    return cell | {
        "bytes": nbytes,
        "GBps": nbytes / s / 1e9,
        "of_copy": nbytes / s / 1e9 / copy_GBps,
        "TFLOPs": operations / s / 1e12,
    }


def dense_cells(
    sizes: dict[str, tuple[int, int]], formats: list[str], rows: list[int], backend: Backend,
    copy_GBps: float,
) -> Iterator[Cell]:  # fmt: skip
    """Dense products, one matrix of a stack per call."""
    for name in formats:
        for label, (n, k) in sizes.items():
            nbytes = packing.nbytes(name, (), n, k)
            cache = 0 if backend == "reference" else kernel_timing.CACHE_BYTES
            layers = max(2, -(-cache // nbytes))
            w = kernel_timing.random_weights(name, (layers,), n, k)
            for t in rows:
                x = activations(t, k)

                def call(i: Any, x: jax.Array, w: Any) -> jax.Array:
                    return dense.dense(x, w, layer=i, backend=backend, out_dtype=jnp.float32)

                def plain(x: jax.Array, w: Any = w) -> jax.Array:
                    return dense.reference(x, w, layer=1, out_dtype=jnp.float32)

                checked = checks(lambda x, w=w: call(1, x, w), plain, x, 1e-2)
                cell = {"kernel": "dense", "format": name, "size": label, "N": n, "K": k, "rows": t}
                took = timed(call, (x, w), min(layers, 12))
                yield rated(cell | checked | took, nbytes, 2.0 * t * n * k, copy_GBps)


def routes(rows: int, num: int, count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Distinct experts per row, other ones in every call; int32 [count, rows, 6]."""
    rng = np.random.default_rng(0)
    draws = [[rng.permutation(num)[:6] for _ in range(rows)] for _ in range(count)]
    return np.asarray(draws, np.int32)


def expert_cells(
    shape: tuple[int, int, int], rows: list[int], backend: Backend, copy_GBps: float
) -> Iterator[Cell]:
    """Routed experts of one layer; bytes of the experts that the routes name."""
    num, f, m = shape
    for up, down in EXPERTS:
        w13 = kernel_timing.random_weights(up, (num,), 2 * f, m)
        w2 = kernel_timing.random_weights(down, (num,), m, f)
        one = packing.nbytes(up, (), 2 * f, m) + packing.nbytes(down, (), m, f)
        for t in rows:
            ids = routes(t, num, 12)
            live = float(np.mean([len(np.unique(i)) for i in ids]))
            weight = jnp.full((t, 6), 0.25, jnp.float32)
            x = activations(t, m)

            def call(i: Any, x: jax.Array, ids: Any, weight: Any, *w: Any) -> jax.Array:
                return experts.experts(x, ids[i], weight, *w, limit=10.0, backend=backend)

            first = jnp.asarray(ids[0])

            def run(
                x: jax.Array, how: Backend = backend, w: Any = (w13, w2), e: Any = first
            ) -> Any:
                some = e[: len(x)]
                even = jnp.full(some.shape, 0.25, jnp.float32)
                return experts.experts(x, some, even, *w, limit=10.0, backend=how)

            checked = checks(run, lambda x, run=run: run(x, "reference"), x, 1e-2)
            took = timed(call, (x, jnp.asarray(ids), weight, w13, w2), len(ids))
            cell = {"kernel": "experts", "format": f"{up}+{down}", "E": num, "F": f, "M": m,
                    "rows": t, "live_experts": live}  # fmt: skip
            yield rated(cell | checked | took, live * one, 6.0 * 2 * t * 3 * f * m, copy_GBps)


def step_cells(
    cfg: ModelConfig, rows: list[int], backend: Backend, copy_GBps: float
) -> Iterator[Cell]:
    """The small kernels of a layer: latency bounds them while there are few rows."""
    for t in rows:
        sampled = kernel_cases.sampling(cfg, t) if t <= 64 else []
        for case in (*kernel_cases.cases(cfg, t), *cache_cases.cases(cfg, t), *sampled):
            error = kernel_cases.check(case, t, backend)
            every = jnp.arange(t, dtype=jnp.int32)

            def call(i: Any, args: Any, at: Any, case: Any = case) -> Any:
                del i
                return case.run(args, at, backend)

            cell = {"kernel": case.name, "format": "-", "rows": t, "error": error}
            took = timed(call, (case.args, every), 12)
            yield rated(cell | took, case.fixed_bytes + t * case.row_bytes, 0.0, copy_GBps)


def main(argv: list[str] | None = None) -> int:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(
        prog="bench.kernels", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", required=True, metavar="OUT", help="report file, or -")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--sizes", choices=("small", "flash"), default=None)
    parser.add_argument("--rows", default="1,8,64,512")
    parser.add_argument("--notes", default="")
    args = parser.parse_args(argv)
    platform = backend_lib.platform()
    sizes = args.sizes or ("small" if platform == "cpu" else "flash")
    resolved = backend_lib.resolve()
    measured = limits.measure()
    devices = measured.pop("devices")
    copy = measured["copy_GBps"]
    rows = [int(r) for r in args.rows.split(",")]
    cells = []
    shapes = FLASH if sizes == "flash" else SMALL
    work = [
        dense_cells(shapes, args.formats.split(","), rows, resolved["dense"], copy),
        expert_cells(
            (256, 2048, 4096) if sizes == "flash" else (16, 128, 256),
            rows, resolved["experts"], copy,
        ),
        step_cells(
            models.FLASH if sizes == "flash" else flash.TINY, rows, resolved["streams"], copy
        ),
    ]  # fmt: skip
    for part in work:
        for cell in part:
            cells.append(cell)
            of = {k: cell[k] for k in ("kernel", "format", "rows")} | {"size": cell.get("size")}
            print(
                of, f"{cell['seconds'] * 1e6:.1f} us", f"{cell['GBps']:.0f} GB/s", file=sys.stderr
            )
    result = report.make(
        workload="engine:kernels",
        cells=cells,
        model={"name": "synthetic", "sha256": "synthetic", "sizes": sizes},
        server={"backends": dict(resolved.table), "notes": list(resolved.notes)},
        requests_sha256=report.sha256(json.dumps([sizes, args.formats, rows])),
        devices=devices,
        limits=measured,
        notes=args.notes,
    )
    report.write(result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
