"""Searches tiles of the kernels on this GPU and writes them as a table for `pallas_kernels/tiles`.

    python -m bench.tune --json pallas_kernels/tiles/KIND.json [--dense FORMAT] [--rows 8,512]

The name of KIND is printed. The products are those of a layer of DeepSeek-V4-Flash as the model
asks for them, several matrices in one kernel included. Tiles never change results, only times;
candidates are compiled side by side and timed one after the other by the profiler. Serving never
searches: it reads the table or takes the default. A table that exists is added to.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench import cache_cases, flash, kernel_timing, kernels, models
from ds4jax import synthetic, tensors, weights
from ds4jax.config import RuntimeConfig
from pallas_kernels import backend as backend_lib
from pallas_kernels import (
    cached_attention,
    compressed_rows,
    dense,
    experts,
    packing,
    row_selection,
)

Table = dict[str, dict[str, dict[str, Any]]]

PRODUCTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "attention inputs, window only": (0, ("attn.wq_a", "attn.wkv")),
    "attention inputs, ratio 4": (4, (
        "attn.wq_a", "attn.wkv", "attn.compressor.wkv", "attn.compressor.wgate",
        "attn.indexer.compressor.wkv", "attn.indexer.compressor.wgate",
        "attn.indexer.weights_proj",
    )),
    "attention inputs, ratio 128": (128, (
        "attn.wq_a", "attn.wkv", "attn.compressor.wkv", "attn.compressor.wgate",
    )),
    "queries": (0, ("attn.wq_b",)),
    "queries, ratio 4": (4, ("attn.wq_b", "attn.indexer.wq_b")),
    "output, groups": (0, ("attn.wo_a",)),
    "output": (0, ("attn.wo_b",)),
    "router and shared expert": (
        0, ("ffn.gate", "ffn.shared_experts.w1", "ffn.shared_experts.w3")
    ),
    "shared expert, down": (0, ("ffn.shared_experts.w2",)),
    "head": (0, ("head",)),
}  # fmt: skip
"""The matrices that one kernel multiplies with, as `ds4jax.fused` asks for them; first the
compression ratio of a layer that has them all."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One tile to time. call: (i, *args) -> results; own: how names of its kernels begin, the same
    for all tiles that are compared."""

    tile: Any
    call: Callable[..., Any]
    own: tuple[str, ...]


def timed(trials: Sequence[Trial], args: tuple[Any, ...], count: int) -> list[dict[str, float]]:
    """Median seconds of every trial's own kernels; empty for what does not compile."""

    def build(trial: Trial) -> Any:
        try:
            return kernel_timing.looped(trial.call, args, count)
        except Exception as error:  # a tile too large for the device: the next one may do
            print(f"  does not run: {trial.tile}: {str(error)[:100]}", file=sys.stderr)
            return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = list(pool.map(build, trials))
    runs = [run for run in built if run is not None]
    if not runs:
        return [{} for _ in trials]
    for run in runs:
        jax.block_until_ready(run(*args))
    seen = kernel_timing.events(lambda: [jax.block_until_ready(run(*args)) for run in runs])
    by_run: list[dict[str, float]] = [{} for _ in runs]
    for own in trials[0].own:
        mine = [s for name, s in seen if name.startswith(own)]
        # Every program starts as many of them, one program after the other.
        each, rest = divmod(len(mine), len(runs) * count)
        if rest or not each:
            raise RuntimeError(f"{own}: {len(mine)} kernels of {len(runs)} x {count} calls")
        for i in range(len(runs)):
            part = mine[i * count * each : (i + 1) * count * each]
            by_run[i][own] = each * statistics.median(part)
    timed_runs = iter(by_run)
    return [{} if run is None else next(timed_runs) for run in built]


def size_of(rows: int) -> str:
    """The part of a key that tells numbers of rows apart."""
    return "few" if rows <= dense.DOT_ROWS else "many"


# --- Products ---


def dense_candidates(rows: int, target: str) -> Iterator[dense.Tile]:
    """Tiles worth trying for `rows` activation rows."""
    stages = (1, 2) if target == "rocm" else (3,)
    if rows <= dense.DOT_ROWS:
        for (out, warps), unroll, s in itertools.product(
            ((16, 1), (16, 2), (32, 1), (32, 2), (64, 2), (64, 4)), (1, 2), stages
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


def matrix_bytes(w: Any) -> int:
    """Bytes of one matrix of a stack, packed or plain."""
    if isinstance(w, packing.QuantArray):
        return packing.nbytes(w.format, (), *w.shape[-2:])
    return int(w.shape[-2] * w.shape[-1] * w.dtype.itemsize)


def product_weights(format: str, keys: tuple[str, ...], ratio: int) -> list[Any]:
    """Random matrices of these names, as the real model has them; enough to outgrow a cache."""
    cfg = models.FLASH
    run = RuntimeConfig(dtype="bfloat16")
    shapes = weights.abstract(cfg, run, synthetic.forms(cfg, run, flash.formats(format, format)))
    layer = next(
        units[u] for group, units in zip(shapes.layout, shapes.groups, strict=True)
        for u, info in enumerate(group.unit) if keys[0] == "head" or info.ratio == (ratio or 0)
    )  # fmt: skip
    found = [(shapes.top if keys[0] == "head" else layer)[k] for k in keys]
    total = sum(map(matrix_bytes, found))
    layers = max(2, min(24, -(-kernel_timing.CACHE_BYTES // total)))
    out: list[Any] = []
    for i, a in enumerate(found):
        n, k = a.shape[-2:]
        if isinstance(a, packing.QuantArray):
            out.append(kernel_timing.random_weights(a.format, (layers,), n, k))
        else:
            new = jax.random.normal(jax.random.key(i), (layers, n, k), jnp.float32)
            out.append(new.astype(a.dtype))
    return out


def tune_dense(format: str, rows: list[int], target: str) -> dict[str, dict[str, Any]]:
    """Best tile by key."""
    out: dict[str, dict[str, Any]] = {}
    groups = models.FLASH.o_groups
    for (label, (ratio, keys)), t in itertools.product(PRODUCTS.items(), rows):
        ws = product_weights(format, keys, ratio)
        k = ws[0].shape[-1]
        count = min(ws[0].shape[0], 12)
        grouped = keys == ("attn.wo_a",)
        x = kernels.activations(t, k * (groups if grouped else 1))

        def call(i: Any, x: Any, *ws: Any, tile: Any = None, grouped: bool = grouped) -> Any:
            if grouped:
                x3 = x.reshape(x.shape[0], groups, -1)
                return dense.grouped(
                    x3, ws[0], layer=i, backend="triton", tile=tile, out_dtype=jnp.bfloat16
                )
            return dense.several(x, ws, layer=i, backend="triton", tile=tile)

        tiles = [None, *dense_candidates(t, target)]
        trials = [
            Trial(tile, lambda *a, tile=tile, call=call: call(*a, tile=tile), ("dense",))
            for tile in tiles
        ]  # fmt: skip
        times = timed(trials, (x, *ws), count)
        good = [(s["dense"], tile) for s, tile in zip(times, tiles, strict=True) if s]
        if not good:
            continue
        seconds, best = min(good, key=lambda pair: pair[0])
        names = "+".join(dense.kernel_format("dense", w) for w in ws)
        nbytes = sum(map(matrix_bytes, ws))
        key = f"{names}/{sum(w.shape[-2] for w in ws)}x{k}/{size_of(t)}"
        print(
            f"{label}, {t} rows: {seconds * 1e6:.1f} us (default {good[0][0] * 1e6:.1f}),"
            f" {nbytes / seconds / 1e9:.0f} GB/s, {best}"
        )
        if best is not None:
            out[key] = dataclasses.asdict(best)
    return out


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


def tune_experts(
    formats: Sequence[tuple[str, str]], rows: list[int], target: str
) -> dict[str, dict[str, Any]]:
    """Best tile by key, up and down apart. Few rows are one live row in a batch of them."""
    num, f, m = models.FLASH.num_experts, 2048, 4096
    out: dict[str, dict[str, Any]] = {}
    for (up, down), t in itertools.product(formats, rows):
        w13 = kernel_timing.random_weights(up, (num,), 2 * f, m)
        w2 = kernel_timing.random_weights(down, (num,), m, f)
        ids = kernels.routes(t, num, 8)
        if size_of(t) == "few":
            ids[:, 1:] = -1
        weight = jnp.full((t, 6), 0.25, jnp.float32)
        x = kernels.activations(t, m)

        def call(i: Any, x: Any, ids: Any, weight: Any, *w: Any, tile: Any = None) -> Any:
            return experts.experts(x, ids[i], weight, *w, limit=10.0, backend="triton", tile=tile)

        tiles = [None, *expert_candidates(t, target)]
        own = ("experts_up", "experts_down")
        trials = [Trial(x, lambda *a, x=x: call(*a, tile=x), own) for x in tiles]
        times = timed(trials, (x, jnp.asarray(ids), weight, w13, w2), 8)
        best = {
            part: min(
                ((s[f"experts_{part}"], tile) for s, tile in zip(times, tiles, strict=True) if s),
                key=lambda pair: pair[0],
            )
            for part in ("up", "down")
        }
        key = f"{up}+{down}/{size_of(t)}"
        default = {k: f"{v * 1e6:.1f} us" for k, v in times[0].items()}
        print(key, t, {p: f"{s * 1e6:.1f} us, {tile}" for p, (s, tile) in best.items()}, default)
        usual = experts.default_tile(t, target)  # type: ignore[arg-type]
        picked = {
            k: v
            for part, (_, tile) in best.items()
            for k, v in dataclasses.asdict(tile or usual).items()
            if k.startswith(part)
        }
        out[key] = picked | {"wide": usual.wide}
    return out


# --- The cache ---


def cache_candidates(target: str) -> Iterator[cache_cases.Tile]:
    """Tiles of attention, indexer and compressor worth trying."""
    stages = (1, 2) if target == "rocm" else (1, 3, 4)
    heads = (16,) if target == "rocm" else (16, 32)
    for n, width, channels, warps, s in itertools.product(
        heads, (64, 128), (0, 256), (4, 8), stages
    ):
        yield cached_attention.Tile(
            heads=n, width=width, channels=channels, num_warps=warps, num_stages=s
        )
    for keys, warps, s, pick in itertools.product((32, 64, 128), (2, 4), stages[1:], (4, 8)):
        yield row_selection.Tile(keys=keys, warps=warps, stages=s, pick_warps=pick)
    for warps in (4, 8, 16):
        yield compressed_rows.Tile(num_warps=warps)


def tune_cache(rows: list[int], target: str) -> Table:
    """Best tile by operation and key. Attention has one for few rows and one for many; the others
    have one for all (their tiles decide bits), found with the first number of rows."""
    cfg = models.FLASH
    out: Table = {}
    for t, kind in itertools.product(
        rows, (cached_attention.Tile, row_selection.Tile, compressed_rows.Tile)
    ):
        name, key = {
            cached_attention.Tile: (
                "attention_ratio4", f"{cfg.num_heads}x{cfg.head_dim}/{size_of(t)}"
            ),
            row_selection.Tile: ("indexer", f"{cfg.index_num_heads}x{cfg.index_head_dim}"),
            compressed_rows.Tile: ("compressor_ratio4", "ratio4"),
        }[kind]  # fmt: skip
        if t != rows[0] and kind is not cached_attention.Tile:
            continue
        tiles = [None, *(x for x in cache_candidates(target) if isinstance(x, kind))]
        cases = [
            next(c for c in cache_cases.cases(cfg, t, tile=tile) if c.name == name)
            for tile in tiles
        ]
        every, op = jnp.arange(t, dtype=jnp.int32), name.split("_")[0]
        trials = [
            Trial(tile, lambda i, args, at, case=case: case.run(args, at, "triton"), (op,))
            for tile, case in zip(tiles, cases, strict=True)
        ]
        times = timed(trials, (cases[0].args, every), 4)
        good = [(s[op], tile) for s, tile in zip(times, tiles, strict=True) if s]
        if good:
            seconds, best = min(good, key=lambda pair: pair[0])
            print(f"{name} {key} {t} rows: {seconds * 1e6:.1f} us"
                  f" (default {good[0][0] * 1e6:.1f}) {best}")  # fmt: skip
            if best is not None:
                out.setdefault(op, {})[key] = dataclasses.asdict(best)
    return out


def main(argv: list[str] | None = None) -> int:
    """Search and write the table."""
    parser = argparse.ArgumentParser(
        prog="bench.tune", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", required=True, type=Path, metavar="OUT")
    parser.add_argument("--dense", default="rocmfp4", help="formats of dense matrices, by commas")
    parser.add_argument(
        "--experts", default="rocmfp2/rocmfp3,mxfp4", help="formats of experts, by commas"
    )
    parser.add_argument("--rows", default="8,512")
    parser.add_argument("--ops", default="dense,experts,cache")
    args = parser.parse_args(argv)
    target = backend_lib.target("triton")
    print("device kind:", backend_lib.device_kind())
    rows = [int(r) for r in args.rows.split(",")]
    table: Table = json.loads(args.json.read_text("utf-8")) if args.json.exists() else {}
    types: Callable[[str], Any] = lambda x: flash.formats(x, "bfloat16")  # noqa: E731
    pairs: list[tensors.TensorClass] = ["experts_gate_up", "experts_down"]
    for op in args.ops.split(","):
        if op == "dense":
            found: Table = {"dense": {}}
            for name in args.dense.split(","):
                found["dense"] |= tune_dense(name, rows, target)
        elif op == "experts":
            kinds = [tuple(types(x)[c] for c in pairs) for x in args.experts.split(",")]
            found = {"experts": tune_experts(kinds, rows, target)}  # type: ignore[arg-type]
        elif op == "cache":
            found = tune_cache(rows, target)
        else:
            parser.error(f"no operation {op}; there are dense, experts and cache")
        for name, entries in found.items():
            table.setdefault(name, {}).update(entries)
        args.json.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
