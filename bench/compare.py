"""A/B/A comparison of report files.

    python -m bench.compare A1.json B.json A2.json [A1b.json Bb.json A2b.json ...]
    python -m bench.compare A.json B.json

Files are refused unless workload, request list, hardware and (unless --other-model) model agree.
Identity comes first: every response of B must equal A1's and A2's of the same cell. The noise is
the difference of the two A runs; above 3 % the comparison has to be repeated. An effect is claimed
only if it exceeds max(2 x noise, 1 %) in the same direction in three triples.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench import report

METRICS = ("aggregate_tok_s", "output_window_tok_s", "steady_decode_tok_s")
MAX_NOISE = 0.03
LEAST_EFFECT = 0.01
TRIPLES_FOR_A_CLAIM = 3


class Incomparable(ValueError):
    """Reports that must not be compared."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One metric of one cell of one triple."""

    cell: str
    metric: str
    a1: float
    b: float
    a2: float | None
    noise: float | None
    change: float  # B against mean(A), minus 1


def check(reports: Sequence[Mapping[str, Any]], *, other_model: bool = False) -> None:
    """Refuse what cannot be compared.

    Raises:
        Incomparable: naming what differs.
    """
    first = reports[0]
    for number, other in enumerate(reports[1:], start=2):
        for what, get in _KEYS.items():
            if what == "model fingerprint" and other_model:
                continue
            if get(first) != get(other):
                raise Incomparable(
                    f"file {number} differs in {what}: {get(first)!r} against {get(other)!r}"
                )


def _devices(r: Mapping[str, Any]) -> Any:
    hardware = r["hardware"]
    return [d["name"] for d in hardware["devices"]] + [hardware["host_cpu"]]


_KEYS = {
    "workload": lambda r: r["workload"],
    "request list": lambda r: r["requests_sha256"],
    "model fingerprint": lambda r: r["model"]["fingerprint"],
    "hardware": _devices,
}


def cells_of(r: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Cells by concurrency, in order; arms of one concurrency by their order."""
    out: dict[str, Mapping[str, Any]] = {}
    for cell in r["cells"]:
        name, n = f"C{cell['concurrency']}", 2
        while name in out:
            name, n = f"C{cell['concurrency']}#{n}", n + 1
        out[name] = cell
    return out


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    """(cell, request, first position) where two reports gave other ids for the same request."""
    out = []
    others = cells_of(b)
    for name, cell in cells_of(a).items():
        if name not in others:
            continue
        theirs = _by_request(others[name])
        for key, mine in _by_request(cell).items():
            if key in theirs and mine["ids_sha256"] != theirs[key]["ids_sha256"]:
                at = report._first_difference(mine["ids"], theirs[key]["ids"])
                out.append((name, key[0], at))
    return out


def _by_request(cell: Mapping[str, Any]) -> dict[tuple[str, int], Mapping[str, Any]]:
    return {(r["id"], r["wave"]): r for r in cell["per_request"]}


def rows(a1: Mapping[str, Any], b: Mapping[str, Any], a2: Mapping[str, Any] | None) -> list[Row]:
    """Every metric that all files have."""
    out = []
    bs, a2s = cells_of(b), cells_of(a2) if a2 is not None else {}
    for name, cell in cells_of(a1).items():
        for metric in METRICS:
            one, two = cell.get(metric), bs.get(name, {}).get(metric)
            three = a2s.get(name, {}).get(metric) if a2 is not None else None
            if one is None or two is None or (a2 is not None and three is None):
                continue
            mean = one if three is None else (one + three) / 2
            noise = None if three is None else abs(one - three) / mean
            out.append(
                Row(cell=name, metric=metric, a1=one, b=two, a2=three, noise=noise,
                    change=two / mean - 1)
            )  # fmt: skip
    return out


def verdict(triples: Sequence[Row]) -> str:
    """What may be said of one metric of one cell after all triples."""
    if any(r.noise is None for r in triples):
        return "no second A run: nothing can be claimed"
    if any(r.noise is not None and r.noise > MAX_NOISE for r in triples):
        return f"noise above {MAX_NOISE:.0%}: repeat"
    clear = [abs(r.change) > max(2 * (r.noise or 0), LEAST_EFFECT) for r in triples]
    same_way = len({r.change > 0 for r in triples}) == 1
    if not all(clear) or not same_way:
        return "no difference"
    word = "faster" if triples[0].change > 0 else "slower"
    if len(triples) < TRIPLES_FOR_A_CLAIM:
        return f"{word} so far: {TRIPLES_FOR_A_CLAIM - len(triples)} more triples for a claim"
    return word


def table(triples: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """The comparison as lines of text."""
    lines = []
    by_key: dict[tuple[str, str], list[Row]] = {}
    for number, (a1, b, *rest) in enumerate(triples, start=1):
        a2 = rest[0] if rest else None
        changed = differences(a1, b) + (differences(a2, b) if a2 is not None else [])
        own = differences(a1, a2) if a2 is not None else []
        lines.append(
            f"triple {number}: output "
            + (
                "identical"
                if not changed
                else f"CHANGED in {len(changed)} responses: {changed[:3]}"
            )
            + (f"; A differs from itself: {own[:3]}" if own else "")
        )
        for row in rows(a1, b, a2):
            by_key.setdefault((row.cell, row.metric), []).append(row)
    lines.append(
        f"{'cell':<6} {'metric':<20} {'A1':>10} {'B':>10} {'A2':>10} {'noise':>7} {'B/A':>8}"
    )
    for (cell, metric), found in by_key.items():
        for row in found:
            a2_text = "-" if row.a2 is None else f"{row.a2:.2f}"
            noise = "-" if row.noise is None else f"{row.noise:.1%}"
            lines.append(
                f"{cell:<6} {metric:<20} {row.a1:>10.2f} {row.b:>10.2f} {a2_text:>10} {noise:>7}"
                f" {row.change:>+8.1%}"
            )
        lines.append(f"{'':<6} -> {verdict(found)}")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Compare; exit status 1 if the files cannot be compared."""
    parser = argparse.ArgumentParser(prog="bench.compare", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--other-model", action="store_true", help="the models may differ")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    args = parser.parse_args(argv)
    if len(args.files) != 2 and len(args.files) % 3:
        parser.error(f"{len(args.files)} files: give A B, or one or more triples A1 B A2")
    try:
        reports = [report.read(f) for f in args.files]
        check(reports, other_model=args.other_model)
    except ValueError as error:
        print(f"bench.compare: {error}", file=sys.stderr)
        return 1
    size = 2 if len(reports) == 2 else 3
    triples = [reports[i : i + size] for i in range(0, len(reports), size)]
    if args.json:
        found = [
            vars(r) for a1, b, *rest in triples for r in rows(a1, b, rest[0] if rest else None)
        ]
        print(json.dumps(found))
    else:
        print("\n".join(table(triples)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
