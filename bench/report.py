"""The report format that every benchmark writes, and the definitions behind its figures.

One JSON file per run. Figures are computed here, from records of single requests, so that no two
benchmarks can mean different things by one name. Nothing here measures or talks to a server.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

SCHEMA = 1
ROOT = Path(__file__).parents[1]


@dataclass(kw_only=True)
class Record:
    """One request as its client saw it. Times in seconds, monotonic.

    `arrivals`: (time, tokens) of every event that carried tokens, in order.
    """

    id: str
    wave: int
    issued: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    seed: int | None = None
    prompt_tokens: int = 0
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    error: str = ""
    server_first_token_s: float | None = None
    server_tokens: int | None = None  # completion tokens as the server counted them

    @property
    def tokens(self) -> int:
        """Completion tokens, counted by the client."""
        return len(self.ids)

    @property
    def first(self) -> float | None:
        """Arrival of the first event with a token."""
        return self.arrivals[0][0] if self.arrivals else None

    @property
    def end(self) -> float | None:
        """Arrival of the last token."""
        return self.arrivals[-1][0] if self.arrivals else None

    @property
    def ttft(self) -> float | None:
        """First token after issue: queueing, coalescing and prefill included."""
        return None if self.first is None else self.first - self.issued

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first."""
        if self.tokens < 2 or self.first is None or self.end is None:
            return None
        return (self.end - self.first) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Between consecutive events (not tokens)."""
        times = [t for t, _ in self.arrivals]
        return [b - a for a, b in itertools.pairwise(times)]


def percentile(values: Sequence[float], q: float) -> float | None:
    """Linear interpolation between order statistics; None of nothing."""
    return float(np.percentile(np.asarray(values, float), q)) if len(values) else None


def spread(values: Sequence[float], qs: Mapping[str, float], scale: float = 1.0) -> dict[str, Any]:
    """Named percentiles, and all values if there are fewer than 20."""
    scaled = [scale * v for v in values]
    out: dict[str, Any] = {name: percentile(scaled, q) for name, q in qs.items()}
    if len(scaled) < 20:
        out["all"] = [round(v, 6) for v in scaled]
    return out


def throughput(records: Sequence[Record]) -> dict[str, float | None]:
    """Aggregate, output-window and steady-decode tokens per second over the waves."""
    waves: dict[int, list[Record]] = {}
    for record in records:
        if record.arrivals:
            waves.setdefault(record.wave, []).append(record)
    total = sum(r.tokens for rs in waves.values() for r in rs)
    walls = windows = spans = steady = 0.0
    for rs in waves.values():
        ends = [r.arrivals[-1][0] for r in rs]
        firsts = [r.arrivals[0][0] for r in rs]
        walls += max(ends) - min(r.issued for r in rs)
        windows += max(ends) - min(firsts)
        low, high = max(firsts), min(ends)
        if high > low:
            spans += high - low
            steady += sum(n for r in rs for t, n in r.arrivals if low < t <= high)
    return {
        "wall_s": walls,
        "aggregate_tok_s": total / walls if walls > 0 else None,
        "output_window_tok_s": total / windows if windows > 0 else None,
        "steady_decode_tok_s": steady / spans if spans > 0 else None,
    }


def acceptance(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Speculation over the measured part, from two looks at the server's counters."""

    def delta(name: str) -> int:
        return int(after.get(name, 0)) - int(before.get(name, 0))

    proposed, verified, accepted = (
        delta(f"drafts_{n}") for n in ("proposed", "verified", "accepted")
    )
    steps = delta("spec_steps")
    depths = []
    for i, total in enumerate(after.get("verified_at_depth", ())):
        seen = total - _at(before.get("verified_at_depth", ()), i)
        kept = _at(after.get("accepted_at_depth", ()), i) - _at(
            before.get("accepted_at_depth", ()), i
        )
        depths.append({"verified": seen, "accepted": kept, "rate": kept / seen if seen else None})
    return {
        "proposed": proposed,
        "verified": verified,
        "accepted": accepted,
        "spec_steps": steps,
        "rate": accepted / verified if verified else None,
        "mean_tokens_per_step": 1 + accepted / steps if steps else None,
        "per_depth": depths,
    }


def _at(values: Sequence[int], index: int) -> int:
    return values[index] if index < len(values) else 0


def server_counters(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What the server did in the measured part."""

    def delta(name: str) -> float:
        return float(after.get(name, 0)) - float(before.get(name, 0))

    steps = delta("steps")
    return {
        "steps": int(steps),
        "rows_real": int(delta("rows_real")),
        "rows_padded": int(delta("rows_padded")),
        "prefill_s": delta("prefill_seconds"),
        "decode_s": delta("decode_seconds"),
        "prefill_tokens": int(delta("prefill_tokens")),
        "output_tokens": int(delta("output_tokens")),
        "preemptions": int(delta("preemptions")),
        "suspensions": int(delta("suspensions")),
        "faults": int(delta("non_finite") + delta("watchdog") + delta("device_errors")),
        "compiles": int(delta("compiles_after_ready")),
        "host_syncs": int(delta("host_syncs")),
        "host_ms_per_step": 1e3 * delta("host_seconds") / steps if steps else None,
        "host_cpu_ms_per_step": 1e3 * delta("host_cpu_seconds") / steps if steps else None,
        "dispatch_ms_per_step": 1e3 * delta("dispatch_seconds") / steps if steps else None,
    }


def cell(
    records: Sequence[Record],
    *,
    concurrency: int,
    arm: str,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    invalid: Sequence[str] = (),
) -> dict[str, Any]:
    """One cell of a report. An invalid one shows its reasons and no throughput."""
    counters = server_counters(before, after)
    reasons = [*invalid, *_invalid_reasons(records, counters)]
    tokens = sum(r.tokens for r in records)
    ttft = [r.ttft for r in records if r.ttft is not None]
    tpot = [r.tpot for r in records if r.tpot is not None]
    gaps = [g for r in records for g in r.gaps]
    events = sum(len(r.arrivals) for r in records)
    extra = [
        r.ttft - r.server_first_token_s
        for r in records
        if r.ttft is not None and r.server_first_token_s is not None
    ]
    rates = throughput(records)
    if reasons:
        rates = {k: v if k == "wall_s" else None for k, v in rates.items()}
    return {
        "concurrency": concurrency,
        "arm": arm,
        "requests": len(records),
        "valid": not reasons,
        "invalid_reasons": reasons,
        "prompt_tokens": sum(r.prompt_tokens for r in records),
        "completion_tokens": tokens,
        "mean_completion_tokens": tokens / len(records) if records else None,
        **rates,
        "per_user_tok_s": 1 / float(np.median(tpot)) if tpot and not reasons else None,
        "prefill_tok_s": counters["prefill_tokens"] / counters["prefill_s"]
        if counters["prefill_s"]
        else None,
        "ttft_s": spread(ttft, {"median": 50, "p95": 95}),
        "tpot_ms": spread(tpot, {"median": 50, "p95": 95}, 1e3),
        "itl_ms": spread(gaps, {"median": 50, "p95": 95, "p99": 99}, 1e3),
        "itl_histogram": histogram([1e3 * g for g in gaps]),
        "tokens_per_event": tokens / events if events else None,
        "grpc_overhead_ms": spread(extra, {"median": 50, "p95": 95}, 1e3),
        "acceptance": acceptance(before, after),
        "server_counters": counters,
        "per_request": [_per_request(r) for r in records],
    }


def _invalid_reasons(records: Sequence[Record], counters: Mapping[str, Any]) -> list[str]:
    reasons = []
    failed = [r for r in records if r.error]
    if failed:
        reasons.append(f"{len(failed)} requests failed, the first with {failed[0].error}")
    odd = [r for r in records if r.server_tokens not in (None, r.tokens)]
    if odd:
        reasons.append(
            f"request {odd[0].id}: the server counted {odd[0].server_tokens} output tokens, the"
            f" client {odd[0].tokens}"
        )
    tokens = sum(r.tokens for r in records)
    if not failed and counters["output_tokens"] != tokens:
        reasons.append(
            f"the server counted {counters['output_tokens']} output tokens, the clients {tokens}"
        )
    for name in ("preemptions", "suspensions", "faults", "compiles"):
        if counters[name]:
            reasons.append(f"{counters[name]} {name} in the measured part")
    return reasons


def _per_request(r: Record) -> dict[str, Any]:
    return {
        "id": r.id,
        "wave": r.wave,
        "seed": r.seed,
        "prompt_tokens": r.prompt_tokens,
        "completion_tokens": r.tokens,
        "finish": r.finish,
        "ttft_s": r.ttft,
        "e2e_s": None if r.end is None else r.end - r.issued,
        "ids_sha256": sha256(json.dumps(r.ids)),
        "text_sha256": sha256(r.text),
        "ids": r.ids,
    }


def histogram(values: Sequence[float]) -> dict[str, Any]:
    """Counts over logarithmic bins, for the page of a report."""
    if not values:
        return {"edges": [], "counts": []}
    edges = np.logspace(-2, 5, 71)
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
    used = np.flatnonzero(counts)
    low, high = used[0], used[-1] + 1
    return {
        "edges": [float(e) for e in edges[low : high + 1]],
        "counts": [int(c) for c in counts[low:high]],
    }


def identity(cells: Sequence[Mapping[str, Any]], wanted: set[str] | None = None) -> dict[str, Any]:
    """Whether requests of one id gave the same ids in every cell they were in.

    Args:
        wanted: ids that are compared; None: every id that occurs in more than one place.
    """
    seen: dict[str, tuple[str, Mapping[str, Any]]] = {}
    differences = []
    for one in cells:
        name = f"C{one.get('concurrency')}/{one.get('arm')}"
        for request in one.get("per_request", ()):
            key = request["id"]
            if wanted is not None and key not in wanted:
                continue
            if key not in seen:
                seen[key] = (name, request)
                continue
            where, first = seen[key]
            if first["ids_sha256"] != request["ids_sha256"]:
                differences.append(
                    {"id": key, "cell_a": where, "cell_b": name,
                     "first_position": _first_difference(first["ids"], request["ids"])}
                )  # fmt: skip
    return {"pass": not differences, "compared": len(seen), "differences": differences}


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def sha256(text: str) -> str:
    """Of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


# ---- facts about the machine ---------------------------------------------------------------------


def code_facts() -> dict[str, Any]:
    """Version, commit, and whether the tree differs from it."""

    def git(*args: str) -> str | None:
        try:
            out = subprocess.run(
                ["git", *args], cwd=ROOT, capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        return out.stdout.strip()

    import ds4jax

    status = git("status", "--porcelain", "--untracked-files=no")
    return {
        "version": ds4jax.__version__,
        "commit": git("rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
    }


def host_facts() -> dict[str, Any]:
    """CPU, memory and load of this machine."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(x.partition(":")[2].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        pass
    try:
        ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        ram = None
    governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    return {
        "host_cpu": cpu,
        "host_cores": len(os.sched_getaffinity(0)),
        "host_ram": ram,
        "power_mode": governor.read_text().strip() if governor.is_file() else None,
        "clocks": None,
        "load_before": os.getloadavg()[0],
    }


def software_facts() -> dict[str, Any]:
    """Versions that matter."""

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    plugins = ("jax-rocm7-plugin", "jax-cuda13-plugin", "jax-cuda12-plugin")
    return {
        "python": platform.python_version(),
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "plugin": next((f"{p} {version(p)}" for p in plugins if version(p)), None),
        "grpcio": version("grpcio"),
        "rocm_or_cuda": os.environ.get("ROCM_VERSION") or os.environ.get("CUDA_VERSION"),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def make(
    *,
    workload: str,
    cells: Sequence[Mapping[str, Any]],
    model: Mapping[str, Any],
    server: Mapping[str, Any],
    requests_sha256: str,
    devices: Sequence[Mapping[str, Any]] = (),
    limits: Mapping[str, Any] | None = None,
    compared: set[str] | None = None,
    notes: str = "",
    host: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A whole report."""
    return {
        "schema": SCHEMA,
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "workload": workload,
        "code": code_facts(),
        "hardware": {"devices": list(devices), **(host or host_facts())},
        "software": software_facts(),
        "measured_limits": dict(limits or {}),
        "model": dict(model),
        "server": dict(server),
        "requests_sha256": requests_sha256,
        "cells": list(cells),
        "identity": identity(cells, compared),
        "notes": notes,
    }


def write(report: Mapping[str, Any], path: str) -> None:
    """Write a report; `-` is stdout."""
    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")


def read(path: str) -> dict[str, Any]:
    """Read a report.

    Raises:
        ValueError: it is none, or of another schema.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise ValueError(f"{path}: not a report of schema {SCHEMA}")
    return value


__all__ = [
    "Record", "acceptance", "asdict", "cell", "identity", "make", "percentile", "read", "spread",
    "throughput", "write",
]  # fmt: skip
