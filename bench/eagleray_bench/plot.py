"""Plots of distributions, as SVG files made by matplotlib.

A panel shows which part of the measurements is at most so large (an empirical distribution function), with the
percentiles that the table names. Values far beyond the 99th percentile are named, not drawn. matplotlib is imported
only when something is drawn: it takes a third of a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_WIDTH, PANEL_HEIGHT = 3.6, 3.2
"""Size of a panel in inches."""
MAX_POINTS = 300
"""Most steps of a curve: of more values, only some are drawn."""
PERCENTILES = (50, 90, 99)
FAR = 1.5
"""Multiple of the 99th percentile beyond which values are not drawn."""
INK, PALE, GRID, CURVE = "#1f2933", "#616e7c", "#e4e7eb", "#2563a8"
SVG_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "eagleray",
    "font.size": 8.0,
    "text.color": INK,
    "axes.edgecolor": PALE,
    "axes.labelcolor": PALE,
    "xtick.color": PALE,
    "ytick.color": PALE,
}


class Panel(NamedTuple):
    """Distribution to plot, with its heading and the unit of its values."""

    title: str
    unit: str
    values: Sequence[float]


def write_plot(path: Path, title: str, panels: Sequence[Panel]) -> None:
    write_svg(path, draw(title, panels))


def write_svg(path: Path, figure: Figure) -> None:
    """Write a figure as SVG. Equal figures give equal files."""
    import matplotlib

    with matplotlib.rc_context(SVG_STYLE):
        figure.savefig(path, format="svg", metadata={"Date": None})


def draw(title: str, panels: Sequence[Panel]) -> Figure:
    """Draw the panels beside each other."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SVG_STYLE):
        figure = Figure(figsize=(PANEL_WIDTH * max(1, len(panels)), PANEL_HEIGHT), layout="constrained")
        figure.suptitle(title, x=0.02, ha="left", size="large", weight="bold", parse_math=False)
        for index, panel in enumerate(panels):
            _draw_panel(figure.add_subplot(1, len(panels), index + 1), panel)
    return figure


def _draw_panel(axes: Axes, panel: Panel) -> None:
    values = np.sort(np.asarray(panel.values, dtype=float))
    if not len(values):
        axes.set_axis_off()
        axes.set_title(f"{panel.title}\nnothing was measured", loc="left", size="medium", parse_math=False)
        return
    marks = np.percentile(values, PERCENTILES)
    longest = float(values[-1])
    end = min(longest, FAR * float(marks[-1])) or 1.0
    heading = [panel.title, _percentiles(marks, panel.unit)]
    if longest > end:
        heading.append(f"longest {_number(longest)} {panel.unit}, not drawn")
    axes.set_title("\n".join(heading), loc="left", size="medium", parse_math=False)
    axes.step(*_curve(values), where="post", color=CURVE)
    axes.plot(marks, np.array(PERCENTILES) / 100, "o", color=CURVE, markersize=4)
    axes.set_xlim(0, 1.02 * end)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(lambda part, _: f"{part:.0%}")
    axes.set_xlabel(panel.unit)
    axes.grid(axis="y", color=GRID)
    axes.spines[["top", "right"]].set_visible(False)


def _curve(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps of the distribution function of sorted `values`, at most `MAX_POINTS` and the first at 0."""
    indices = np.unique(np.linspace(0, len(values) - 1, min(len(values), MAX_POINTS)).astype(int))
    return np.concatenate([values[:1], values[indices]]), np.concatenate([[0.0], (indices + 1) / len(values)])


def _percentiles(marks: np.ndarray, unit: str) -> str:
    named = zip(PERCENTILES, marks.tolist(), strict=True)
    return ", ".join(f"p{percentile} {_number(value)}" for percentile, value in named) + f" {unit}"


def _number(value: float) -> str:
    """Return `value` with three significant digits."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
