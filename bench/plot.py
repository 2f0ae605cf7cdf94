"""Small line and bar charts as SVG text, without a plotting library."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 40, 48
COLORS = ("#1f6fb4", "#d1495b", "#2e8b57", "#8a5fbf", "#b8860b", "#444444")

Points = Sequence[tuple[float, float]]


def _ticks(low: float, high: float, count: int = 6) -> list[float]:
    raw = (high - low) / count or 1.0
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(m * size for m in (1, 2, 5, 10) if m * size >= raw)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def lines(title: str, x_label: str, y_label: str, series: Mapping[str, Points]) -> str:
    """A line chart; every series is a list of (x, y).

    Raises:
        ValueError: no points at all.
    """
    points = [p for values in series.values() for p in values]
    if not points:
        raise ValueError(f"{title}: nothing to plot")
    x0, x1 = min(p[0] for p in points), max(p[0] for p in points)
    y0, y1 = min(p[1] for p in points), max(p[1] for p in points)
    pad = (y1 - y0) * 0.05 or 1.0
    y0, y1 = y0 - pad, y1 + pad
    x1 = x1 if x1 > x0 else x0 + 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        px = LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        return px, HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    out = _frame(title, x_label, y_label)
    for x in _ticks(x0, x1):
        px, _ = at(x, y0)
        out.append(_text(px, HEIGHT - BOTTOM + 18, f"{x:g}", "middle"))
    for y in _ticks(y0, y1):
        _, py = at(x0, y)
        out.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py:.1f}" y2="{py:.1f}" stroke="#ddd"/>'
        )
        out.append(_text(LEFT - 8, py + 4, f"{y:g}", "end"))
    for i, (name, values) in enumerate(series.items()):
        color = COLORS[i % len(COLORS)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in (at(*p) for p in values))
        out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        out.append(_text(WIDTH - RIGHT - 8, TOP + 16 + 18 * i, name, "end", color))
    return "\n".join([*out, "</svg>"]) + "\n"


def _frame(title: str, x_label: str, y_label: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 24, title, "start", "#111", 15),
        _text(WIDTH / 2, HEIGHT - 10, x_label, "middle"),
        f'<text transform="translate(16 {HEIGHT / 2}) rotate(-90)" text-anchor="middle"'
        f' fill="#333">{escape(y_label)}</text>',
    ]


def _text(x: float, y: float, text: str, anchor: str, color: str = "#333", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}"'
        f' font-size="{size}">{escape(text)}</text>'
    )


def bars(title: str, y_label: str, values: Mapping[str, float]) -> str:
    """A bar chart from 0 up, one bar per name.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError(f"{title}: nothing to plot")
    top = max(max(values.values()), 1e-12) * 1.05
    out = _frame(title, "", y_label)
    room = (WIDTH - LEFT - RIGHT) / len(values)
    scale = (HEIGHT - TOP - BOTTOM - 60) / top
    floor = HEIGHT - BOTTOM - 60
    for y in _ticks(0.0, top):
        py = floor - y * scale
        out.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py:.1f}" y2="{py:.1f}" stroke="#ddd"/>'
        )
        out.append(_text(LEFT - 8, py + 4, f"{y:g}", "end"))
    for i, (name, value) in enumerate(values.items()):
        x, height = LEFT + i * room + room * 0.15, max(value, 0.0) * scale
        out.append(
            f'<rect x="{x:.1f}" y="{floor - height:.1f}" width="{room * 0.7:.1f}"'
            f' height="{height:.1f}" fill="{COLORS[0]}"/>'
        )
        cx = x + room * 0.35
        out.append(
            f'<text transform="translate({cx:.1f} {floor + 12}) rotate(40)" fill="#333">'
            f"{escape(name)}</text>"
        )
    return "\n".join([*out, "</svg>"]) + "\n"


def loss_curve(log: Path) -> str:
    """Training and held-out loss of a log of `bench.train_nano`."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    names = {"loss": "training", "held_text": "held-out text", "held_chat": "held-out chat"}
    series = {
        label: [(r["step"], r[key]) for r in rows if key in r and r["step"] > rows[0]["step"]]
        for key, label in names.items()
    }
    return lines("ds4-nano: loss", "step", "nats per token", {k: v for k, v in series.items() if v})
