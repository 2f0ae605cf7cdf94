"""Searches tiles of the kernels on this GPU and writes them as a table for `pallas_kernels/tiles`.

    python -m bench.tune --json pallas_kernels/tiles/KIND.json [--formats a,b] [--rows 1,512]

The name of KIND is printed. Tiles never change results, only times; every candidate that compiles
is timed by the profiler. Serving never searches: it reads the table or takes the default.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from bench import cache_cases, kernel_timing, kernels, models
from pallas_kernels import backend as backend_lib
from pallas_kernels import (
    cached_attention,
    compressed_rows,
    dense,
    experts,
    packing,
    row_selection,
)


def dense_candidates(rows: int, target: str) -> Iterator[dense.Tile]:
    """Tiles worth trying for `rows` activation rows."""
    stages = (1, 2) if target == "rocm" else (3, 4)
    if rows <= dense.DOT_ROWS:
        for (out, warps), unroll, s in itertools.product(
            ((16, 1), (32, 1), (32, 2), (64, 2), (64, 4), (128, 4)), (1, 2), stages
        ):
            yield dense.Tile(rows=out, num_warps=warps, unroll=unroll, num_stages=s)
        return
    for (out, warps), s in itertools.product(((64, 4), (128, 4), (128, 8)), stages):
        if target == "rocm":
            for dots in (1, 2, 4):
                yield dense.Tile(rows=out, num_warps=warps, dots=dots, num_stages=s)
        else:
            for width in (64, 128, 256):
                yield dense.Tile(rows=out, num_warps=warps, dot_rows=width, dots=1, num_stages=s)


def expert_candidates(rows: int, target: str) -> Iterator[experts.Tile]:
    """The same tile for both kernels; the better of each is picked apart."""
    for t in dense_candidates(rows, target):
        if rows > dense.DOT_ROWS and (t.dot_rows > 128 or t.dots > 1):
            continue
        yield experts.Tile(
            up_rows=t.rows, up_unroll=t.unroll, up_warps=t.num_warps, up_stages=t.num_stages,
            down_rows=t.rows, down_unroll=t.unroll, down_warps=t.num_warps,
            down_stages=t.num_stages, wide=target != "rocm" and rows > dense.DOT_ROWS,
        )  # fmt: skip


def kernel_seconds(call: Any, args: tuple[Any, ...], count: int) -> dict[str, float]:
    """Median seconds per kernel name; empty if it does not compile."""
    try:
        found = kernel_timing.device_seconds(call, args, count)
    except Exception as error:
        if "profiler" in str(error):
            raise
        print(f"  does not run: {str(error)[:100]}", file=sys.stderr)
        return {}
    return {k: statistics.median(v) for k, v in found.items()}


def changed(tile: Any, default: Any) -> dict[str, Any]:
    """Fields that differ from the default's class defaults."""
    own, base = dataclasses.asdict(tile), dataclasses.asdict(type(default)())
    return {k: v for k, v in own.items() if v != base[k]}


def tune_dense(formats: list[str], rows: list[int], target: str) -> dict[str, dict[str, Any]]:
    """Best tile by key."""
    out: dict[str, dict[str, Any]] = {}
    for name, (n, k), t in itertools.product(formats, kernels.FLASH.values(), rows):
        nbytes = packing.nbytes(name, (), n, k)
        layers = max(2, -(-kernel_timing.CACHE_BYTES // nbytes))
        w = kernel_timing.random_weights(name, (layers,), n, k)
        x = kernels.activations(t, k)
        best: tuple[float, dense.Tile] | None = None
        for tile in dense_candidates(t, target):

            def call(i: Any, x: Any, w: Any, tile: dense.Tile = tile) -> Any:
                return dense.dense(
                    x, w, layer=i, backend="triton", out_dtype=jnp.float32, tile=tile
                )

            times = kernel_seconds(call, (x, w), min(layers, 8))
            own = [s for key, s in times.items() if key.startswith("dense")]
            if own and (best is None or own[0] < best[0]):
                best = (own[0], tile)
        if best:
            key = f"{name}/{n}x{k}/{'few' if t <= dense.DOT_ROWS else 'many'}"
            print(f"{key}: {best[0] * 1e6:.1f} us {nbytes / best[0] / 1e9:.0f} GB/s {best[1]}")
            out[key] = changed(best[1], best[1])
    return out


def tune_experts(rows: list[int], target: str) -> dict[str, dict[str, Any]]:
    """Best tile by key, up and down apart."""
    num, f, m = 256, 2048, 4096
    out: dict[str, dict[str, Any]] = {}
    for (up, down), t in itertools.product(kernels.EXPERTS, rows):
        w13 = kernel_timing.random_weights(up, (num,), 2 * f, m)
        w2 = kernel_timing.random_weights(down, (num,), m, f)
        ids = jnp.asarray(kernels.routes(t, num, 8))
        weight = jnp.full((t, 6), 0.25, jnp.float32)
        x = kernels.activations(t, m)
        best: dict[str, tuple[float, experts.Tile]] = {}
        for tile in expert_candidates(t, target):

            def call(i: Any, x: Any, ids: Any, weight: Any, *w: Any, tile: Any = tile) -> Any:
                return experts.experts(
                    x, ids[i], weight, *w, limit=10.0, backend="triton", tile=tile
                )

            for key, s in kernel_seconds(call, (x, ids, weight, w13, w2), 8).items():
                part = next((p for p in ("up", "down") if key.startswith(f"experts_{p}")), None)
                if part and (part not in best or s < best[part][0]):
                    best[part] = (s, tile)
        if len(best) == 2:
            key = f"{up}+{down}/{'few' if t <= dense.DOT_ROWS else 'many'}"
            print(key, {p: f"{s * 1e6:.1f} us" for p, (s, _) in best.items()})
            picked = {
                k: v
                for part, (_, tile) in best.items()
                for k, v in dataclasses.asdict(tile).items()
                if k.startswith(part)
            }
            wide = best["up"][1].wide
            out[key] = changed(experts.Tile(**picked, wide=wide), experts.Tile())
    return out


def cache_candidates(target: str) -> Iterator[cache_cases.Tile]:
    """Tiles of attention, indexer and compressor worth trying."""
    stages = (1, 2) if target == "rocm" else (1, 3, 4)
    heads = (16,) if target == "rocm" else (16, 32, 64)
    for n, width, channels, warps, s in itertools.product(
        heads, (64, 128, 256), (0, 256), (2, 4, 8), stages
    ):
        yield cached_attention.Tile(
            heads=n, width=width, channels=channels, num_warps=warps, num_stages=s
        )
    for keys, warps, s, pick in itertools.product((32, 64, 128), (2, 4), stages, (4, 8, 16)):
        yield row_selection.Tile(keys=keys, warps=warps, stages=s, pick_warps=pick)
    for warps in (4, 8, 16):
        yield compressed_rows.Tile(num_warps=warps)


def tune_cache(rows: list[int], target: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Best tile by operation and key. Attention has one for few rows and one for many; the others
    have one for all (their tiles decide bits), found with the first number of rows."""
    cfg = models.FLASH
    best: dict[tuple[str, str], tuple[float, Any]] = {}
    for t, tile in itertools.product(rows, cache_candidates(target)):
        size = "few" if t <= cached_attention.Tile.grid_rows else "many"
        kind = {
            cached_attention.Tile: ("attention_ratio4", f"{cfg.num_heads}x{cfg.head_dim}/{size}"),
            row_selection.Tile: ("indexer", f"{cfg.index_num_heads}x{cfg.index_head_dim}"),
            compressed_rows.Tile: ("compressor_ratio4", "ratio4"),
        }
        name, key = kind[type(tile)]
        if t != rows[0] and not isinstance(tile, cached_attention.Tile):
            continue
        # Candidates of one operation need only its own case.
        case = next(c for c in cache_cases.cases(cfg, t, tile=tile) if c.name == name)
        every = jnp.arange(t, dtype=jnp.int32)

        def call(i: Any, args: Any, at: Any, case: Any = case) -> Any:
            del i
            return case.run(args, at, "triton")

        op = name.split("_")[0]
        times = kernel_seconds(call, (case.args, every), 4)
        own = sum(s for k, s in times.items() if k.startswith(op))
        if own and ((op, key) not in best or own < best[op, key][0]):
            best[op, key] = (own, tile)
    out: dict[str, dict[str, dict[str, Any]]] = {}
    for (op, key), (seconds, tile) in best.items():
        print(f"{op} {key}: {seconds * 1e6:.1f} us {tile}")
        out.setdefault(op, {})[key] = changed(tile, tile)
    return out


def main(argv: list[str] | None = None) -> int:
    """Search and write the table."""
    parser = argparse.ArgumentParser(
        prog="bench.tune", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", required=True, type=Path, metavar="OUT")
    parser.add_argument("--formats", default=",".join(kernels.FORMATS))
    parser.add_argument("--rows", default="1,512")
    args = parser.parse_args(argv)
    target = backend_lib.target("triton")
    print("device kind:", backend_lib.device_kind())
    rows = [int(r) for r in args.rows.split(",")]
    table = {
        "dense": tune_dense(args.formats.split(","), rows, target),
        "experts": tune_experts(rows, target),
        **tune_cache(rows, target),
    }
    args.json.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
