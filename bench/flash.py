"""The full-size model on one device with synthetic weights: decode steps, prefill chunks, kernels.

    python -m bench.flash --json OUT [--experts rocmfp2/rocmfp3] [--dense rocmfp4] [--layers 43|fit]
    python -m bench.flash --json OUT --tiny       # the whole run in small, on any device

Weights of the true shapes and formats are made on the device, so throughput is valid and text is
not: routing is near-uniform, the worst case for the bytes of experts. The history that a step reads
is random too, and lanes share its pages; what a lane writes is its own. Bytes are those of the
routes that the rows took, the share is that of the copy bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from bench import kernel_timing, limits, models, report
from bench.models import FLASH, Loaded
from ds4jax import cache as cache_lib
from ds4jax import engine, fused, sampling, step, synthetic, tensors, weights
from ds4jax import model as model_lib
from ds4jax.config import PAGE_TOKENS, ModelConfig, RuntimeConfig, Sampler
from ds4jax.step import Bucket, LaneRows
from pallas_kernels import backend as backend_lib

ALIASES = {
    "rocmfp2": "rocmfp2_s40",
    "fp4": "hf_fp4_e2m1",
    "fp8": "hf_fp8_e4m3_block128",
}
"""Short names of formats."""

TINY = dataclasses.replace(
    FLASH, vocab_size=256, hidden_size=64, num_layers=4, num_heads=2, head_dim=32, rope_head_dim=16,
    q_lora_rank=32, o_groups=2, o_lora_rank=32, compress_ratios=(0, 4, 128, 4), index_num_heads=16,
    index_head_dim=32, index_topk=16, num_experts=16, num_experts_per_tok=2,
    moe_intermediate_size=32, num_hash_layers=1, swiglu_limits=(10.0,) * 4,
    shared_swiglu_limits=(10.0,) * 4, rope_original_len=256,
)  # fmt: skip

RESERVE = 4 << 30
"""Device memory that `--layers fit` leaves to programs."""

LONG_PROMPT = 1195
Cell = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    chunks: tuple[int, ...]
    prompt: int
    warm_up: int
    steps: int

    @property
    def max_ctx(self) -> int:
        """Positions of one lane."""
        most = max(*self.contexts, self.prompt) + max(self.chunks) + self.warm_up + 3 * self.steps
        return -(-most // PAGE_TOKENS) * PAGE_TOKENS


FULL = Sizes(
    rows=(1, 4, 6, 8, 16, 32, 64, 256), contexts=(512, 4096, 32768), chunks=(128, 512, 2048),
    prompt=LONG_PROMPT, warm_up=10, steps=50,
)  # fmt: skip
SMALL = Sizes(rows=(1, 4), contexts=(64, 256), chunks=(32,), prompt=40, warm_up=1, steps=3)


def config(layers: int, base: ModelConfig = FLASH) -> ModelConfig:
    """The first `layers` layers of a model."""
    return dataclasses.replace(
        base, num_layers=layers, compress_ratios=base.compress_ratios[:layers],
        num_hash_layers=min(layers, base.num_hash_layers),
        swiglu_limits=base.swiglu_limits[:layers],
        shared_swiglu_limits=base.shared_swiglu_limits[:layers],
    )  # fmt: skip


def formats(experts: str, dense: str) -> dict[tensors.TensorClass, str]:
    """Formats by class of tensor: "gate-and-up/down" of the experts, and of all other matrices."""
    up, _, down = experts.partition("/")
    names = [ALIASES.get(x, x) for x in (up, down or up, dense)]
    rest: tuple[tensors.TensorClass, ...] = (
        "attention", "shared", "compressor", "indexer", "head", "embedding",
    )  # fmt: skip
    types: dict[tensors.TensorClass, str] = dict.fromkeys(rest, names[2])
    return types | {"experts_gate_up": names[0], "experts_down": names[1]}


def runtime(backend: Any, sizes: Sizes) -> RuntimeConfig:
    """A run that holds the largest batch; lanes share the pages of their history."""
    lanes = max(sizes.rows)
    own = 2 + -(-(sizes.warm_up + 3 * sizes.steps) // PAGE_TOKENS)
    pages = sizes.max_ctx // PAGE_TOKENS + lanes * own + max(sizes.chunks) // PAGE_TOKENS + 2
    one = backend != "reference"  # has programs of one row
    eight = lambda n: 1 if n == 1 and one else -(-n // 8) * 8  # noqa: E731
    return RuntimeConfig(
        dtype="bfloat16", backend=backend, max_ctx=sizes.max_ctx, num_slots=lanes, num_pages=pages,
        row_buckets=tuple(sorted({eight(t) for t in sizes.rows})), prefill_buckets=sizes.chunks,
        samplers=("full", "greedy"),
    )  # fmt: skip


def planned(
    cfg: ModelConfig, run: RuntimeConfig, types: dict[tensors.TensorClass, str]
) -> dict[str, int]:
    """Bytes of weights, of every array of the cache, and of what filling an array takes."""
    tree = weights.abstract(cfg, run, synthetic.forms(cfg, run, types))
    sizes = [math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree)]
    # The allocator may need a second place for the largest one.
    return {"weights": sum(sizes), "filling": max(sizes)} | cache_lib.plan_bytes(cfg, run)


def fitting(
    wanted: str, base: ModelConfig, run: RuntimeConfig, types: dict[tensors.TensorClass, str],
    free: int | None,
) -> ModelConfig:  # fmt: skip
    """The model with the layers asked for, or as many as fit.

    Raises: MemoryError with the plan where they do not.
    """
    counts = [int(wanted)] if wanted != "fit" else range(base.num_layers, 0, -1)
    plan: dict[str, int] = {}
    for count in counts:
        cfg = config(count, base)
        plan = planned(cfg, run, types)
        if free is None or sum(plan.values()) + RESERVE <= free:
            return cfg
    table = "\n".join(f"  {k:12} {v:>16,}" for k, v in plan.items())
    raise MemoryError(f"{sum(plan.values()):,} bytes are needed, {free:,} are free:\n{table}")


class Runner:
    """A cache full of random history, and the compiled steps that work on it."""

    def __init__(
        self, model: Loaded, run: RuntimeConfig, sizes: Sizes, sampler: Sampler = "greedy"
    ) -> None:
        self.model, self.run, self.sizes, self.sampler = model, run, sizes, sampler
        self.compiled: list[Cell] = []
        self.prepared = 0.0  # seconds
        self.syncs = 0
        self._programs: dict[Any, Any] = {}
        self._lanes = jax.jit(lambda: sampling.init_lanes(run))()
        self._cache = jax.jit(functools.partial(_random_cache, model.cfg, run))()
        self._own = (run.pages - sizes.max_ctx // PAGE_TOKENS - self._chunk_pages) // run.num_slots

    @property
    def _chunk_pages(self) -> int:
        return max(self.sizes.chunks) // PAGE_TOKENS + 2

    def pages(self, slot: int, context: int, *, prefill: bool = False) -> npt.NDArray[np.int32]:
        """Physical page of every table entry: shared below the context, then the lane's own."""
        count, first = self.run.pages_per_slot, context // PAGE_TOKENS
        shared = self.sizes.max_ctx // PAGE_TOKENS
        start, own = shared + slot * self._own, self._own
        if prefill:
            start, own = self.run.pages - self._chunk_pages, self._chunk_pages
        out = np.arange(count, dtype=np.int32)
        later = np.arange(count - first, dtype=np.int32)
        out[first:] = start + np.minimum(later, own - 1)
        return out

    def rewind(self, context: int, *, prefill: bool = False) -> None:
        """Every lane at `context` tokens."""
        slots = self.run.num_slots
        table = np.stack([self.pages(s, context, prefill=prefill) for s in range(slots)])
        table = np.concatenate([table, np.full((1, table.shape[1]), self.run.pages, np.int32)])
        length = np.full(slots + 1, context, np.int32)
        length[-1] = 0
        self._cache = self._cache.replace(table=jnp.asarray(table), length=jnp.asarray(length))

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Compile the programs of steps, some at a time."""
        start = time.perf_counter()
        jobs = [
            ("routes", self._routes),
            *[("", functools.partial(self._step, b)) for b in buckets],
        ]

        def run(job: Callable[[], Any]) -> float:
            job()
            return time.perf_counter() - start

        *_, (_, self.prepared) = engine.at_once(jobs, run, engine.compilers(self.run.backend))

    def _step(self, bucket: Bucket) -> Any:
        fn = functools.partial(step.run_step, cfg=self.model.cfg, run=self.run, bucket=bucket)
        args = (self.model.params, self._cache, self._lanes, np.zeros(bucket.words, np.int32))
        name = f"{'prefill' if bucket.prefill else 'rows'} {bucket.rows}"
        return self._program(name, bucket, fn, *args)

    def _program(self, name: str, key: Any, fn: Any, *args: Any) -> Any:
        if key not in self._programs:
            start = time.perf_counter()
            shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
            self._programs[key] = jax.jit(fn, donate_argnums=1).lower(*shapes).compile()
            self.compiled.append({"name": name, "seconds": time.perf_counter() - start})
        return self._programs[key]

    def dispatch(self, bucket: Bucket, rows: Sequence[LaneRows]) -> Any:
        """Start one step; its results stay on the device."""
        words = step.pack_plan(bucket, rows, self.run.num_slots)
        program = self._step(bucket)
        self._cache, results = program(self.model.params, self._cache, self._lanes, words)
        return results

    def read(self, results: Any) -> Any:
        """Results on the host: the one synchronisation of a step."""
        self.syncs += 1
        return np.asarray(results)

    def decode(self, rows: int, context: int, at: int, first: Any = None) -> Any:
        """One token more for `rows` lanes: these tokens, or those sampled before."""
        size = next(t for t in self.run.row_buckets if t >= rows)
        plan = [
            LaneRows(s, context + at, None if first is None else first[s : s + 1],
                     self.pages(s, context))  # type: ignore[arg-type]
            for s in range(rows)
        ]  # fmt: skip
        return self.dispatch(self.decoding(size), plan)

    def decoding(self, rows: int) -> Bucket:
        """The program of so many rows."""
        return Bucket(rows, rows, self.sampler)

    def prefilling(self, rows: int) -> Bucket:
        """The program of a chunk."""
        return Bucket(rows, 1, "greedy", prefill=True, chunk=self.run.backend != "reference")

    def prefill(self, tokens: Any, start: int, context: int) -> Any:
        """Known tokens of lane 0 from `start` on, in the largest chunks; results of the last."""
        results = None
        pages = self.pages(0, context, prefill=True)
        for i in range(0, len(tokens), self.run.prefill_buckets[-1]):
            part = tokens[i : i + self.run.prefill_buckets[-1]]
            size = next(t for t in self.run.prefill_buckets if t >= len(part))
            bucket = self.prefilling(size)
            emit = "last" if i + len(part) == len(tokens) else "none"
            lane = LaneRows(0, start + i, part, pages, emit)  # type: ignore[arg-type]
            results = self.dispatch(bucket, [lane])
        return results

    def routes(self, context: int, first: Any) -> dict[int, npt.NDArray[np.int32]]:
        """Experts by layer of the first token of every lane.

        A row's routes are its own, so one program for the largest batch serves all.
        """
        cfg, run = self.model.cfg, self.run
        rows = [
            LaneRows(s, context, first[s : s + 1], self.pages(s, context), "none")  # type: ignore[arg-type]
            for s in range(run.num_slots)
        ]
        words = step.pack_plan(self._widest, rows, run.num_slots)
        self._cache, seen = self._routes()(self.model.params, self._cache, words)
        return {i: np.asarray(seen[f"L{i}.router_ids"]) for i in range(cfg.num_layers)}

    @property
    def _widest(self) -> Bucket:
        return Bucket(self.run.row_buckets[-1], self.run.row_buckets[-1])

    def _routes(self) -> Any:
        cfg, run, bucket = self.model.cfg, self.run, self._widest
        names = frozenset(f"L{i}.router_ids" for i in range(cfg.num_layers))

        def fn(params: Any, cache: Any, words: Any) -> Any:
            plan = step.unpack_plan(bucket, words)
            cache, out = model_lib.forward(params, cache, plan, cfg=cfg, run=run, capture=names)
            return cache, out.captured

        words = np.zeros(bucket.words, np.int32)
        return self._program("routes", "routes", fn, self.model.params, self._cache, words)


def _random_cache(cfg: ModelConfig, run: RuntimeConfig) -> cache_lib.Cache:
    cache = cache_lib.init(cfg, run)
    new = {}
    for i, name in enumerate(("raw", "comp4", "comp128", "index4")):
        old = getattr(cache, name)
        # Row by row of the first axis: no second copy in float32.
        keys = jax.random.split(jax.random.key(i), old.shape[0])
        new[name] = jax.lax.map(
            lambda k, old=old: jax.random.normal(k, old.shape[1:], jnp.float32).astype(old.dtype),
            keys,
        )
    return cache.replace(**new)  # type: ignore[attr-defined, no-any-return]


def profiled(call: Callable[[], Any], steps: int) -> Cell:
    """Kernels, their time and copies to the host per step, from the profiler; {} on a CPU."""
    if backend_lib.platform() == "cpu":
        return {}
    names: dict[str, list[float]] = {}
    for name, seconds in kernel_timing.events(lambda: [call() for _ in range(steps)]):
        names.setdefault(name, []).append(1e6 * seconds)
    copies = {k: v for k, v in names.items() if k.lower().startswith("memcpy")}
    kernels = {k: v for k, v in names.items() if k not in copies}
    most = sorted(kernels.items(), key=lambda kv: -sum(kv[1]))[:25]
    return {
        "kernels_per_step": sum(map(len, kernels.values())) / steps,
        "kernel_us_per_step": sum(map(sum, kernels.values())) / steps,
        "copies_per_step": {k: len(v) / steps for k, v in copies.items()},
        "top_kernels": [
            {"name": k, "per_step": len(v) / steps, "us": sum(v) / len(v)} for k, v in most
        ],
    }


def decode_cells(runner: Runner, copy_GBps: float) -> list[Cell]:
    """`decode-step` for every context and number of rows."""
    cells, sizes, cfg = [], runner.sizes, runner.model.cfg
    first = np.random.default_rng(0).integers(0, cfg.vocab_size, runner.run.num_slots, np.int32)
    for context in sizes.contexts:
        runner.rewind(context)
        routes = runner.routes(context, first)
        for rows in sizes.rows:
            runner.rewind(context)
            totals, at, before = [], 0, runner.syncs
            for i in range(sizes.warm_up + sizes.steps):
                start = time.perf_counter()
                runner.read(runner.decode(rows, context, at, first if i == 0 else None))
                totals.append(time.perf_counter() - start)
                at += 1
            syncs = (runner.syncs - before) / len(totals)
            start = time.perf_counter()
            for _ in range(sizes.steps):
                last = runner.decode(rows, context, at)
                at += 1
            runner.read(last)
            queued = (time.perf_counter() - start) / sizes.steps

            def one(rows: int = rows, context: int = context, at: int = at) -> None:
                runner.read(runner.decode(rows, context, at))

            seen = profiled(one, 3)
            read = models.traffic(
                runner.model, {k: v[:rows] for k, v in routes.items()}, [context] * rows, itemsize=2
            )
            times = totals[sizes.warm_up :]
            cell = {
                "name": "decode-step", "rows": rows, "context": context, "samples": len(times),
                "step_ms": {"median": 1e3 * statistics.median(times),
                            "p95": 1e3 * report.percentile(times, 95), "min": 1e3 * min(times)},
                "queued_ms": 1e3 * queued, "tok_s": rows / queued, "host_syncs_per_step": syncs,
                "bytes": read.unique, "live_experts": read.experts,
                "GBps": read.unique / queued / 1e9,
                "of_copy": read.unique / queued / 1e9 / copy_GBps,
            }  # fmt: skip
            cells.append(cell | seen)
            print_cell(cell)
    return cells


def active_weights(cfg: ModelConfig) -> int:
    """Weights that one token meets, the embedding left out."""
    total = 0
    for spec in tensors.specs(cfg):
        if spec.required and spec.kind not in ("embedding", "table", "norm"):
            size = math.prod(spec.shape)
            share = cfg.num_experts_per_tok if spec.key.startswith("ffn.experts.") else None
            total += size if share is None else size // cfg.num_experts * share
    return total


def prefill_cells(runner: Runner) -> list[Cell]:
    """`prefill-chunk` for every chunk and start, and the long prompt."""
    cells, sizes, cfg = [], runner.sizes, runner.model.cfg
    rng = np.random.default_rng(1)
    work = [(c, s) for s in (0, *sizes.contexts[1:]) for c in sizes.chunks] + [(sizes.prompt, 0)]
    for count, start in work:
        tokens = rng.integers(0, cfg.vocab_size, count, np.int32)
        times = []
        for _ in range(1 + max(3, sizes.warm_up // 2)):
            runner.rewind(start, prefill=True)
            began = time.perf_counter()
            runner.read(runner.prefill(tokens, start, start))
            times.append(time.perf_counter() - began)
        seconds = statistics.median(times[1:])
        seen = profiled(lambda n=tokens, s=start: runner.read(runner.prefill(n, s, s)), 1)  # type: ignore[misc]
        cell = {
            "name": "long-prompt" if count == sizes.prompt else "prefill-chunk", "rows": count,
            "context": start, "samples": len(times) - 1, "step_ms": {"median": 1e3 * seconds},
            "tok_s": count / seconds,
            "TFLOPs": 2e-12 * active_weights(cfg) * count / seconds,
        }  # fmt: skip
        cells.append(cell | seen)
        print_cell(cell)
    return cells


def print_cell(cell: Cell) -> None:
    """One line for a person."""
    share = f", {100 * cell['of_copy']:.0f} % of copy" if "of_copy" in cell else ""
    print(
        f"{cell['name']:14} rows {cell['rows']:5} context {cell['context']:6}:"
        f" {cell['step_ms']['median']:9.3f} ms, {cell['tok_s']:10.1f} tokens/s{share}",
        file=sys.stderr,
    )


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench.flash", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", required=True, metavar="OUT", help="report file, or -")
    parser.add_argument("--layers", default="43", help="number of layers, or fit")
    parser.add_argument("--experts", default="rocmfp2/rocmfp3", help="gate-and-up/down")
    parser.add_argument("--dense", default="rocmfp4", help="format of all other matrices")
    parser.add_argument("--rows", help="numbers of rows, by commas")
    parser.add_argument("--contexts", help="contexts, by commas")
    parser.add_argument("--chunks", help="prefill chunks, by commas")
    parser.add_argument("--sampler", default="greedy", choices=("greedy", "full"))
    parser.add_argument("--skip", default="", help="decode, prefill, or both by commas")
    parser.add_argument("--backend", default="auto", help="auto, reference, interpret or triton")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand weights")
    parser.add_argument("--notes", default="")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure and write the report."""
    args = arguments(argv)
    sizes = SMALL if args.tiny else FULL
    for name in ("rows", "contexts", "chunks"):
        if getattr(args, name):
            values = tuple(sorted(int(x) for x in getattr(args, name).split(",")))
            sizes = dataclasses.replace(sizes, **{name: values})
    on_cpu = backend_lib.platform() == "cpu"
    backend = args.backend if args.backend != "auto" else "reference" if on_cpu else "triton"
    types = formats(args.experts, args.dense)
    run = runtime(backend, sizes)
    measured = limits.measure()
    devices = measured.pop("devices")
    base = TINY if args.tiny else FLASH
    free = None if on_cpu else jax.devices()[0].memory_stats()["bytes_limit"]
    cfg = fitting(str(base.num_layers) if args.tiny else args.layers, base, run, types, free)
    notes = [] if backend == "reference" else list(
        fused.backends(run).notes
    )  # fmt: skip
    print("\n".join(notes), file=sys.stderr)
    start = time.perf_counter()
    tree = synthetic.init_random(cfg, jax.random.key(0), run, types=types)
    jax.block_until_ready(tree)
    facts = {
        "name": "synthetic flash", "sha256": "synthetic", "layers": cfg.num_layers,
        "quantisation": f"{args.experts} experts, {args.dense} dense", "weights": "packed",
        "dtype": run.dtype, "numerics": run.numerics, "routing": "near-uniform",
        "bytes_resident_per_device": sum(a.nbytes for a in jax.tree.leaves(tree)),
        "experts_per_token": cfg.num_experts_per_tok, "load_s": time.perf_counter() - start,
    }  # fmt: skip
    print(f"{facts['bytes_resident_per_device'] / 1e9:.1f} GB of weights", file=sys.stderr)
    runner = Runner(Loaded(cfg=cfg, params=tree, facts=facts), run, sizes, args.sampler)
    skipped = args.skip.split(",")
    runner.prepare([
        *([] if "decode" in skipped else map(runner.decoding, run.row_buckets)),
        *([] if "prefill" in skipped else map(runner.prefilling, run.prefill_buckets)),
    ])  # fmt: skip
    cells = [] if "decode" in skipped else decode_cells(runner, measured["copy_GBps"])
    cells += [] if "prefill" in skipped else prefill_cells(runner)
    result = report.make(
        workload="engine:flash", cells=cells, model=facts,
        server={"backend": backend, "backends": notes, "profile": run.numerics,
                "buckets": {"rows": run.row_buckets, "prefill": run.prefill_buckets},
                "compile": {"programs": runner.compiled,
                            "seconds": sum(c["seconds"] for c in runner.compiled),
                            "at_once_s": runner.prepared}, "sampler": args.sampler},
        requests_sha256=report.sha256(json.dumps(dataclasses.asdict(sizes))),
        devices=devices, limits=measured, notes=args.notes,
    )  # fmt: skip
    report.write(result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
