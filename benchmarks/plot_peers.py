"""The figures of `peers.py --json` as a picture: how much of what the machine allows each engine reaches.

python benchmarks/plot_peers.py FIGURES.json [MORE.json …] --out docs/performance.svg

A bar is limit / time (or rate / limit), of the medians; the line at 1 is the limit. Rows without a limit are left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from peer_engines import LIMIT

COLORS = {"eagleray": "#2563a8", "vllm": "#c05621", "llama.cpp": "#718096"}
INK, PALE, GRID = "#1f2933", "#616e7c", "#e4e7eb"
LEFT, WIDTH, RIGHT, TOP = 190, 480, 60, 56
BAR, GAP = 13, 12
TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)
AXIS_END = 1.1

Shares = list[tuple[str, dict[str, float]]]
"""Of every row: by engine, what it reaches of the limit."""


def shares(rows: Mapping[str, Mapping[str, Any]]) -> Shares:
    found: Shares = []
    for name, row in rows.items():
        medians = row["medians"]
        if LIMIT not in medians:
            continue
        limit = medians[LIMIT]
        reached = {
            engine: value / limit if row["higher_is_better"] else limit / value
            for engine, value in medians.items()
            if engine in COLORS
        }
        found.append((name, reached))
    return found


def svg(rows: Shares) -> str:
    height = TOP + sum(len(reached) * BAR + GAP for _, reached in rows) + 30
    width = LEFT + WIDTH + RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(
            12, 20, "Part of the machine's limit that is reached (1: memory read, or products multiplied, all the time)"
        ),
        *_legend(),
        *_grid(height - 30),
        *_bars(rows),
        _line(_x(1), height - 30, INK),
        "</svg>",
        "",
    ]
    return "\n".join(parts)


def _x(share: float) -> float:
    return LEFT + WIDTH * min(share, AXIS_END) / AXIS_END


def _text(x: float, y: float, text: str, *, color: str = INK, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x: float, bottom: float, color: str) -> str:
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{bottom}" stroke="{color}"/>'


def _legend() -> Iterator[str]:
    for index, (engine, color) in enumerate(COLORS.items()):
        x = LEFT + 110 * index
        yield f'<rect x="{x}" y="29" width="10" height="10" fill="{color}"/>'
        yield _text(x + 15, 38, engine)


def _grid(bottom: float) -> Iterator[str]:
    for tick in TICKS:
        yield _line(_x(tick), bottom, GRID)
        yield _text(_x(tick), bottom + 16, "limit" if tick == 1 else f"{tick:g}", color=PALE, anchor="middle")


def _bars(rows: Shares) -> Iterator[str]:
    y: float = TOP
    for name, reached in rows:
        yield _text(LEFT - 8, y + len(reached) * BAR / 2 + 4, name, anchor="end")
        for engine, share in reached.items():
            length = _x(share) - LEFT
            yield f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR - 2}" fill="{COLORS[engine]}"/>'
            yield _text(LEFT + length + 4, y + BAR - 4, f"{share:.2f}", color=PALE)
            y += BAR
        y += GAP


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    rows: dict[str, Any] = {}
    for file in given.figures:
        rows |= json.loads(file.read_text())["rows"]
    given.out.write_text(svg(shares(rows)))


if __name__ == "__main__":
    main()
