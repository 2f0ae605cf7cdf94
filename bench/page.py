"""A report as one HTML page: throughput against concurrency, first tokens, gaps, identity.

    python -m bench.page REPORT.json OUT.html

Self-contained: charts are SVG, nothing is fetched.
"""

from __future__ import annotations

import argparse
import html
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import plot, report

_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}td,th{border:1px solid #ccc;padding:.25em .6em;"
    "text-align:right}th{background:#f3f3f3}td:first-child,th:first-child{text-align:left}"
    ".bad{color:#b00020;font-weight:bold}pre{background:#f6f6f6;padding:.6em;overflow:auto}"
)


def page(r: Mapping[str, Any]) -> str:
    """The whole page."""
    cells = r["cells"]
    title = f"{r['workload']}: {r['model']['name']}"
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{html.escape(_subtitle(r))}</p>",
        _warnings(r),
        _table(cells),
        *_charts(cells),
        "<h2>Everything else</h2>",
        f"<pre>{html.escape(json.dumps(_facts(r), indent=1))}</pre>",
    ]
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>"
        + "\n".join(parts)
        + "</html>\n"
    )


def _subtitle(r: Mapping[str, Any]) -> str:
    commit = (r["code"]["commit"] or "no commit")[:12] + (" dirty" if r["code"]["dirty"] else "")
    devices = ", ".join(d["name"] for d in r["hardware"]["devices"]) or "device not measured"
    return f"{r['when']}, {commit}, {devices}, {r['hardware']['host_cpu']}"


def _warnings(r: Mapping[str, Any]) -> str:
    out = []
    if r["model"].get("approximate"):
        out.append("approximate: fewer experts per token than the model's own")
    if r["model"].get("unqualified"):
        out.append("unqualified: on this device answers may depend on load")
    if not r["identity"]["pass"]:
        out.append(f"output differs between cells: {r['identity']['differences'][:5]}")
    out += [
        f"C{c['concurrency']} is invalid: {'; '.join(c['invalid_reasons'])}"
        for c in r["cells"] if not c["valid"]
    ]  # fmt: skip
    if r["notes"]:
        out.append(r["notes"])
    if not out:
        return "<p>All cells valid, outputs identical.</p>"
    return "".join(f"<p class=bad>{html.escape(text)}</p>" for text in out)


_COLUMNS = (
    ("tok/s", "aggregate_tok_s", 2), ("window tok/s", "output_window_tok_s", 2),
    ("steady tok/s", "steady_decode_tok_s", 2), ("per user tok/s", "per_user_tok_s", 2),
    ("prefill tok/s", "prefill_tok_s", 1), ("mean output", "mean_completion_tokens", 1),
)  # fmt: skip


def _table(cells: Sequence[Mapping[str, Any]]) -> str:
    heads = ["cell", "arm", *(h for h, _, _ in _COLUMNS), "TTFT s", "TPOT ms", "gap p95 ms",
             "host ms/step", "acceptance"]  # fmt: skip
    lines = ["".join(f"<th>{h}</th>" for h in heads)]
    for c in cells:
        values = [f"C{c['concurrency']}", html.escape(c["arm"])]
        values += [_number(c.get(key), digits) for _, key, digits in _COLUMNS]
        values += [
            _number(c["ttft_s"]["median"], 3), _number(c["tpot_ms"]["median"], 2),
            _number(c["itl_ms"]["p95"], 2),
            _number(c["server_counters"]["host_ms_per_step"], 3),
            _number(c["acceptance"]["rate"], 3),
        ]  # fmt: skip
        lines.append("".join(f"<td>{v}</td>" for v in values))
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _charts(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    out = []
    names = {"aggregate": "aggregate_tok_s", "output window": "output_window_tok_s",
             "steady decode": "steady_decode_tok_s"}  # fmt: skip
    series = {
        label: [(c["concurrency"], c[key]) for c in cells if c[key] is not None]
        for label, key in names.items()
    }
    series = {k: v for k, v in series.items() if v}
    if series:
        out.append(plot.lines("Throughput", "requests at the same time", "tokens/s", series))
    ttft = {_name(c): c["ttft_s"]["median"] for c in cells if c["ttft_s"]["median"] is not None}
    if ttft:
        out.append(plot.bars("Time to first token, median", "seconds", ttft))
    ordered = {_name(c): _cumulative(_ttfts(c)) for c in cells}
    ordered = {k: v for k, v in ordered.items() if v}
    if ordered:
        label = "share of requests, %"
        out.append(plot.lines("Time to first token, distribution", label, "seconds", ordered))
    gaps = {}
    for c in cells:
        h = c["itl_histogram"]
        total = sum(h["counts"]) or 1
        points = [
            ((low * high) ** 0.5, 100 * n / total)
            for low, high, n in zip(h["edges"], h["edges"][1:], h["counts"], strict=False)
        ]
        if points:
            gaps[_name(c)] = points
    if gaps:
        out.append(plot.lines("Gaps between events", "milliseconds", "share, %", gaps))
    return [f"<div>{svg}</div>" for svg in out]


def _cumulative(values: Sequence[float]) -> list[tuple[float, float]]:
    """(share of values not above, value)."""
    return [(100 * (i + 1) / len(values), v) for i, v in enumerate(sorted(values))]


def _name(c: Mapping[str, Any]) -> str:
    return f"C{c['concurrency']} {c['arm']}"


def _ttfts(c: Mapping[str, Any]) -> list[float]:
    return [r["ttft_s"] for r in c["per_request"] if r["ttft_s"] is not None]


def _facts(r: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in r.items() if k not in ("cells",)}


def main(argv: list[str] | None = None) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="bench.page", description=__doc__)
    parser.add_argument("report", metavar="REPORT.json")
    parser.add_argument("out", metavar="OUT.html")
    args = parser.parse_args(argv)
    try:
        text = page(report.read(args.report))
    except ValueError as error:
        print(f"bench.page: {error}", file=sys.stderr)
        return 1
    Path(args.out).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
