"""Plots of `peers.py --json`: the share of the machine's limit that each engine reaches, and speed against the peers.

python benchmarks/plot_peers.py docs/figures/peers.json [MORE.json …] [--rows '*/http*' …]
                                [--limits docs/pictures/limits.svg] [--factors docs/pictures/factors.svg]

A bar of the first is limit / time (or rate / limit) of the medians; the line at 1 is the limit. A bar of the second
says how many times as fast as a peer eagleray is, on a logarithmic scale. Rows without a limit, or without a peer, are
left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from peer_engines import LIMIT

from eagleray_bench.plot import GRID, INK, PALE, SVG_STYLE, write_svg

OURS = "eagleray"
COLORS = {OURS: "#2563a8", "vllm": "#c05621", "llama.cpp": "#718096"}
WIDTH, BAR_HEIGHT, MARGINS = 7.6, 0.14, 1.2
"""Sizes in inches."""
BAR_SHARE = 0.85
"""Height of a bar as a share of the distance to the next one."""
AXIS_END = 1.1

FACTOR_MARGIN = 2.0
"""Factor between the longest bar and the end of its axis."""

Bars = list[tuple[str, dict[str, float]]]
"""Name of each row, with a number by engine."""


def shares(rows: Mapping[str, Mapping[str, Any]]) -> Bars:
    """Return the shares of the limit in all rows that have one."""
    found: Bars = []
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


def factors(rows: Mapping[str, Mapping[str, Any]]) -> Bars:
    """Return how many times as fast as each peer eagleray is, in all rows that have a peer."""
    found: Bars = []
    for name, row in rows.items():
        medians = row["medians"]
        ours = medians.get(OURS)
        peers = [engine for engine in medians if engine in COLORS and engine != OURS]
        if ours is not None and peers:
            times = {engine: ours / medians[engine] for engine in peers}
            found.append((name, {e: x if row["higher_is_better"] else 1 / x for e, x in times.items()}))
    return found


def draw_shares(rows: Bars) -> Figure:
    """Draw the shares of the limit, the first row at the top."""
    figure = draw_bars(
        rows, "Share of the machine's limit that is reached (1: all the time is spent reading memory, or multiplying)"
    )
    (axes,) = figure.axes
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "limit"])
    axes.set_xlim(0, AXIS_END)
    return figure


def draw_factors(rows: Bars) -> Figure:
    """Draw the factors against the peers, the first row at the top."""
    figure = draw_bars(rows, "How many times as fast as the peer eagleray is (right of 1: faster)", start=1)
    (axes,) = figure.axes
    values = [1.0, *(value for _, bars in rows for value in bars.values())]
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(min(values) / FACTOR_MARGIN, max(values) * FACTOR_MARGIN)
    return figure


def draw_bars(rows: Bars, title: str, *, start: float = 0) -> Figure:
    """Draw a group of bars from `start` for each row, with a line at 1."""
    num_lines = sum(len(bars) + 1 for _, bars in rows)
    with matplotlib.rc_context(SVG_STYLE):
        figure = Figure(figsize=(WIDTH, BAR_HEIGHT * num_lines + MARGINS), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title, loc="left", size="medium")
        line, names = 0.0, {}
        for name, bars in rows:
            names[line + (len(bars) - 1) / 2] = name
            for engine, value in bars.items():
                bar = axes.barh(
                    line, value - start, left=start, height=BAR_SHARE, color=COLORS[engine], label=engine, clip_on=True
                )
                axes.bar_label(bar, [f"{value:.2f}"], padding=3, color=PALE)
                line += 1
            line += 1
        axes.set_yticks(list(names), list(names.values()))
        axes.set_ylim(line - 1, -1)
        axes.grid(axis="x", color=GRID)
        axes.set_axisbelow(True)
        axes.axvline(1, color=INK)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        shown = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        figure.legend(shown.values(), shown.keys(), loc="outside upper left", ncols=len(COLORS), frameon=False)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="+", type=Path)
    parser.add_argument("--rows", nargs="+", default=["*"], metavar="PATTERN", help="rows by name, with * and ?")
    parser.add_argument("--limits", type=Path, help="write the shares of the limit here")
    parser.add_argument("--factors", type=Path, help="write the factors against the peers here")
    given = parser.parse_args(arguments)
    rows: dict[str, Any] = {}
    for file in given.figures:
        rows |= json.loads(file.read_text())["rows"]
    rows = {name: row for name, row in rows.items() if any(fnmatch(name, pattern) for pattern in given.rows)}
    if given.limits:
        write_svg(given.limits, draw_shares(shares(rows)))
    if given.factors:
        write_svg(given.factors, draw_factors(factors(rows)))


if __name__ == "__main__":
    main()
