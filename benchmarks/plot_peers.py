"""Plot of `peers.py --json`: the share of the machine's limit that each engine reaches.

python benchmarks/plot_peers.py FIGURES.json [MORE.json …] --out docs/performance.svg

A bar is limit / time (or rate / limit) of the medians; the line at 1 is the limit. Rows without a limit are left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from peer_engines import LIMIT

from eagleray_bench.plot import GRID, INK, PALE, SVG_STYLE, write_svg

COLORS = {"eagleray": "#2563a8", "vllm": "#c05621", "llama.cpp": "#718096"}
WIDTH, BAR_HEIGHT, MARGINS = 7.6, 0.14, 1.2
"""Sizes in inches."""
BAR_SHARE = 0.85
"""Height of a bar as a share of the distance to the next one."""
AXIS_END = 1.1

Shares = list[tuple[str, dict[str, float]]]
"""Name of each row, with the share of the limit by engine."""


def shares(rows: Mapping[str, Mapping[str, Any]]) -> Shares:
    """Return the shares of the limit in all rows that have one."""
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


def draw(rows: Shares) -> Figure:
    """Draw a group of bars for each row, the first row at the top."""
    num_lines = sum(len(reached) + 1 for _, reached in rows)
    with matplotlib.rc_context(SVG_STYLE):
        figure = Figure(figsize=(WIDTH, BAR_HEIGHT * num_lines + MARGINS), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(
            "Share of the machine's limit that is reached (1: all the time is spent reading memory, or multiplying)",
            loc="left",
            size="medium",
        )
        line, names = 0.0, {}
        for name, reached in rows:
            names[line + (len(reached) - 1) / 2] = name
            for engine, share in reached.items():
                bar = axes.barh(line, min(share, AXIS_END), height=BAR_SHARE, color=COLORS[engine], label=engine)
                axes.bar_label(bar, [f"{share:.2f}"], padding=3, color=PALE)
                line += 1
            line += 1
        axes.set_yticks(list(names), list(names.values()))
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "limit"])
        axes.set(xlim=(0, AXIS_END), ylim=(line - 1, -1))
        axes.grid(axis="x", color=GRID)
        axes.set_axisbelow(True)
        axes.axvline(1, color=INK)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        bars = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        figure.legend(bars.values(), bars.keys(), loc="outside upper left", ncols=len(COLORS), frameon=False)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    rows: dict[str, Any] = {}
    for file in given.figures:
        rows |= json.loads(file.read_text())["rows"]
    write_svg(given.out, draw(shares(rows)))


if __name__ == "__main__":
    main()
