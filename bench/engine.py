"""Engine-level benchmarks without a server: decode steps, prefill chunks, frontier.

    python -m bench.engine --json OUT.json [--model nano|mid|PATH] [--weights decoded|packed]
    python -m bench.engine --json OUT.json --model mid --torch     # beside eager PyTorch

Every time is that of one compiled step from the call to its results on the host, on real state of
the given length. Bytes are counted from the routes that the measured rows took: `streamed` if every
row reads its weights itself, as rows on the CPU do (layer by layer, row by row), `unique` if rows
share them. The roofline of a step is its unique bytes over the read bandwidth measured in the same
run: the time of an engine that does nothing but read. No other engine reads these models on a CPU,
so that line stands in for one; it is no measurement of an engine.

Throughput of "mid" is valid, its text is not: its weights are random, so routing is near-uniform,
the worst case for bytes of experts.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import models, report
from bench.models import Loaded
from bench.steps import Steps, Took
from ds4jax.config import RuntimeConfig

ROOT = Path(__file__).parents[1]
WARM_UP = 10
CHECK_ERROR = 1e-3
BLOCKS = 6
Cell = dict[str, Any]


def measured_limits(device: str) -> dict[str, Any]:
    """Of `bench.limits`, in a process of its own."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [sys.executable, "-m", "bench.limits", "--device", device, "--json", out.name]
        subprocess.run(command, cwd=ROOT, check=True)
        found: dict[str, Any] = json.loads(Path(out.name).read_text())
    return found


def random_tokens(model: Loaded, count: int, seed: int) -> Any:
    """Token ids, int32 [count]."""
    return np.random.default_rng(seed).integers(0, model.cfg.vocab_size, count, np.int32)


def decode_cells(
    steps: Steps, lanes: Sequence[int], contexts: Sequence[int], count: int, read_GBps: float
) -> list[Cell]:
    """`decode-step` for every number of rows and context."""
    cells = []
    for context in contexts:
        steps.prefill(0, 0, random_tokens(steps.model, context, 0))
        steps.copy(0, range(1, max(lanes)))
        for rows in lanes:
            slots = range(rows)
            saved = [steps.save(s) for s in slots]
            first = random_tokens(steps.model, rows, rows)
            routes = steps.probe(slots, context, first[:, None])[1]
            for slot, state in zip(slots, saved, strict=True):
                steps.restore(slot, state)
            took = decode_steps(steps, rows, context, first, WARM_UP + count)[WARM_UP:]
            for slot, state in zip(slots, saved, strict=True):
                steps.restore(slot, state)
            read = models.traffic(steps.model, routes, [context] * rows)
            cells.append(
                {"name": "decode-step", "rows": rows, "context": context}
                | timing(took)
                | bandwidth(took, read, read_GBps)
                | {"tok_s": rows / statistics.median(t.total for t in took)}
            )
            print_cell(cells[-1])
    return cells


def decode_steps(steps: Steps, rows: int, context: int, first: Any, count: int) -> list[Took]:
    """Consecutive steps of `rows` lanes from position `context` on."""
    slots = range(rows)
    took = [steps.decode(slots, context, list(first))]
    took += [steps.decode(slots, context + i) for i in range(1, count)]
    return took


def timing(took: Sequence[Took]) -> Cell:
    """Spread of step times in milliseconds."""
    totals = [1e3 * t.total for t in took]
    return {
        "samples": len(took),
        "step_ms": {
            "median": statistics.median(totals),
            "p10": report.percentile(totals, 10),
            "p95": report.percentile(totals, 95),
            "min": min(totals),
        },
        "dispatch_ms": 1e3 * statistics.median(t.dispatch for t in took),
    }


def bandwidth(took: Sequence[Took], read: models.Traffic, read_GBps: float) -> Cell:
    """Bytes of a step, what they mean per second, and the roofline."""
    seconds = statistics.median(t.total for t in took)
    roofline = read.unique / read_GBps / 1e9
    return {
        "bytes_streamed": read.streamed,
        "bytes_unique": read.unique,
        "experts_per_layer": read.experts,
        "GBps": read.streamed / seconds / 1e9,
        "fraction_of_read": read.streamed / seconds / 1e9 / read_GBps,
        "roofline_ms": 1e3 * roofline,
        "times_roofline": seconds / roofline,
    }


def prefill_cells(
    steps: Steps, chunks: Sequence[int], starts: Sequence[int], repeats: int
) -> list[Cell]:
    """`prefill-chunk` for every chunk and start position."""
    cells = []
    for start in sorted(starts):
        if start:
            steps.prefill(0, 0, random_tokens(steps.model, start, 0))
        saved = steps.save(0)
        for chunk in chunks:
            took = []
            for i in range(repeats + 1):
                took.append(steps.prefill(0, start, random_tokens(steps.model, chunk, i)))
                steps.restore(0, saved)
            cells.append(
                {"name": "prefill-chunk", "rows": chunk, "start": start}
                | timing(took[1:])
                | {"tok_s": chunk / statistics.median(t.total for t in took[1:])}
            )
            print_cell(cells[-1])
    return cells


def frontier_cells(steps: Steps, lengths: Sequence[int], count: int) -> list[Cell]:
    """Walk one long text; at every length decode `count` tokens and go back."""
    cells: list[Cell] = []
    text = random_tokens(steps.model, max(lengths, default=0), 1)
    at = 0
    for length in sorted(lengths):
        prefill = steps.prefill(0, at, text[at:length])
        saved = steps.save(0)
        took = [steps.decode([0], length + i) for i in range(count)]
        steps.restore(0, saved)
        cells.append(
            {"name": "frontier", "context": length, "cache_bytes": steps.cache_bytes}
            | {"prefill_tok_s": (length - at) / prefill.total}
            | {"decode_tok_s": 1 / statistics.median(t.total for t in took), "samples": count}
        )
        print_cell(cells[-1])
        at = length
    return cells


# ---- beside eager PyTorch ------------------------------------------------------------------------


def torch_cells(steps: Steps, lanes: Sequence[int], context: int, count: int) -> list[Cell]:
    """Decode and prefill of both, in turn, after a check that their logits agree.

    PyTorch runs with one thread and with one for every core.

    Raises:
        SystemExit: PyTorch is missing, or the logits differ.
    """
    try:
        import torch
    except ImportError:
        raise SystemExit("--torch needs PyTorch: pip install torch==2.13.0") from None
    from bench.torch_model import TorchModel

    other = TorchModel(steps.model.cfg, steps.model.params)
    # Up to the first row for which the indexer selects. Beyond, near ties of random weights fall
    # either way (in PyTorch too, from one split of the text to another).
    checked = min(4 * steps.model.cfg.index_topk + 4, steps.run.max_ctx)
    text = random_tokens(steps.model, max(checked, context), 0)
    error = torch_error(steps, other, text[:checked])
    if not error < CHECK_ERROR:
        raise SystemExit(f"logits of PyTorch differ by {error:.2e}; the limit is {CHECK_ERROR}")
    facts = {"torch": torch.__version__, "checked_tokens": checked, "logits_error": error}
    cells = []
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        found = [torch_prefill(steps, other, text, max(BLOCKS, count // 5))]
        found += [torch_decode(steps, other, rows, text[:context], count) for rows in lanes]
        cells += [c | facts | {"torch_threads": threads} for c in found]
    return cells


def torch_prefill(steps: Steps, other: Any, text: Any, count: int) -> Cell:
    """One chunk from position 0."""
    import torch

    chunk = steps.run.prefill_buckets[-1]
    prompt = torch.from_numpy(text[:chunk].astype(np.int64))[None]

    def theirs() -> float:
        other.start(1, chunk)
        start = time.perf_counter()
        other.forward(prompt)
        return time.perf_counter() - start

    a, b = in_turn(lambda: steps.prefill(0, 0, text[:chunk]).total, theirs, count)
    return versus("prefill", chunk, 0, a, b, chunk)


def torch_decode(steps: Steps, other: Any, rows: int, text: Any, count: int) -> Cell:
    """One row count: both decode on from the same text."""
    import torch

    context = len(text)
    steps.prefill(0, 0, text)
    steps.copy(0, range(1, rows))
    other.start(1, steps.run.max_ctx)
    other.forward(torch.from_numpy(text.astype(np.int64))[None])
    other.copy_lane(rows)
    first = random_tokens(steps.model, rows, rows)
    pos = context
    tokens = torch.from_numpy(first.astype(np.int64))[:, None]
    steps.decode(range(rows), context, list(first))

    def ours() -> float:
        nonlocal pos
        pos += 1
        return steps.decode(range(rows), pos).total

    def theirs() -> float:
        nonlocal tokens
        start = time.perf_counter()
        tokens = other.forward(tokens).argmax(-1, keepdim=True)
        return time.perf_counter() - start

    a, b = in_turn(ours, theirs, count)
    return versus("decode", rows, context, a, b, rows)


def in_turn(
    a: Callable[[], float], b: Callable[[], float], count: int
) -> tuple[list[float], list[float]]:
    """Samples of both, in blocks that alternate: the machine's mood hits both alike."""
    out: tuple[list[float], list[float]] = ([], [])
    for _ in range(BLOCKS):
        for call, times in zip((a, b), out, strict=True):
            time.sleep(0.05)  # threads of the other one go to sleep
            call()
            times += [call() for _ in range(-(-count // BLOCKS))]
    return out


def versus(what: str, rows: int, context: int, a: list[float], b: list[float], n: int) -> Cell:
    """A comparison: medians, and how many times faster we are."""
    ours, theirs = statistics.median(a), statistics.median(b)
    cell = {
        "name": f"torch-{what}", "rows": rows, "context": context, "samples": len(a),
        "ours_ms": 1e3 * ours, "torch_ms": 1e3 * theirs, "ours_tok_s": n / ours,
        "torch_tok_s": n / theirs, "times_faster": theirs / ours,
        "ours_min_ms": 1e3 * min(a), "torch_min_ms": 1e3 * min(b),
    }  # fmt: skip
    print_cell(cell)
    return cell


def torch_error(steps: Steps, other: Any, text: Any) -> float:
    """Largest difference of the logits over a text, ours in pieces of the row bucket."""
    import torch

    size = steps.run.row_buckets[-1]
    ours = [steps.probe([0], at, text[None, at : at + size])[0] for at in range(0, len(text), size)]
    other.start(1, len(text))
    given = torch.from_numpy(text.astype(np.int64))[None]
    theirs = [other.forward(part, last_only=False)[0] for part in given.split(128, 1)]
    return float(np.abs(np.concatenate(ours) - torch.cat(theirs).numpy()).max())


# ---- command -------------------------------------------------------------------------------------


def print_cell(cell: Cell) -> None:
    """One line on stderr."""
    flat = {k: v["median"] if isinstance(v, dict) else v for k, v in cell.items()}
    shown = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in flat.items())
    print(*shown, file=sys.stderr)


def numbers(text: str) -> list[int]:
    """A list of whole numbers, separated by commas; empty for none."""
    return [int(x) for x in text.split(",") if x]


def main(argv: list[str] | None = None) -> int:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(
        prog="bench.engine", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", required=True, metavar="OUT", help="report file, or -")
    parser.add_argument("--model", default="nano", help="nano, mid, or a path")
    parser.add_argument("--weights", choices=("decoded", "packed"), default="decoded")
    parser.add_argument("--lanes", type=numbers, default=[1, 2, 4, 6, 8], help="rows of a step")
    parser.add_argument("--contexts", type=numbers, default=[512], help="of decode steps")
    parser.add_argument("--chunks", type=numbers, default=[128], help="prefill buckets")
    parser.add_argument("--starts", type=numbers, default=[0, 512], help="of prefill chunks")
    parser.add_argument("--frontier", type=numbers, default=[512, 1024], help="lengths")
    parser.add_argument("--steps", type=int, default=50, help="measured steps of a cell")
    parser.add_argument("--torch", action="store_true", help="compare with eager PyTorch")
    parser.add_argument("--notes", default="")
    args = parser.parse_args(argv)
    host = report.host_facts()
    limits = measured_limits("cpu")
    devices = limits.pop("devices")
    longest = max([*args.contexts, *args.frontier, *(s + max(args.chunks) for s in args.starts)])
    rows = -(-max(args.lanes) // 8) * 8
    run = RuntimeConfig(
        max_ctx=-(-(longest + WARM_UP + max(args.steps, 128) + 2) // 128) * 128,
        num_slots=max(args.lanes), row_buckets=(rows,), prefill_buckets=tuple(args.chunks),
    )  # fmt: skip
    model = models.load(args.model, run, args.weights)
    steps = Steps(model, run)
    read = limits["read_GBps"]
    cells = decode_cells(steps, args.lanes, args.contexts, args.steps, read)
    cells += prefill_cells(steps, args.chunks, args.starts, 5)
    cells += frontier_cells(steps, args.frontier, 128)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if args.torch:
        few = [n for n in args.lanes if n in (1, 4, 8)]
        cells += torch_cells(steps, few, args.contexts[0], args.steps)
    compiled = {
        "count_before_ready": len(steps.compiled),
        "seconds": sum(c["seconds"] for c in steps.compiled),
        "cpu_seconds": sum(c["cpu_seconds"] for c in steps.compiled),
        "programs": steps.compiled,
    }
    result = report.make(
        workload="engine:cpu",
        cells=cells,
        model=model.facts | {"peak_rss_bytes": peak, "cache_bytes": steps.cache_bytes},
        server={"profile": run.numerics, "backend": run.backend, "compile": compiled,
                "buckets": {"rows": run.row_buckets, "prefill": run.prefill_buckets}},
        requests_sha256=report.sha256(json.dumps([args.lanes, args.contexts, args.chunks])),
        devices=devices,
        limits=limits,
        notes=args.notes,
        host=host,
    )  # fmt: skip
    report.write(result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
