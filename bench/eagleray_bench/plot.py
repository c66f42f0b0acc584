"""Distributions as a picture: an SVG file, written by hand. Pure but for the writing.

A panel shows which part of the measurements is at most so long (an empirical distribution function), with the
percentiles that the table names. What lies far beyond the 99th percentile is told, not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import numpy as np

__all__ = ["Panel", "svg", "write_plot"]

PANEL_WIDTH, PANEL_HEIGHT = 320, 260
LEFT, RIGHT, TOP, BOTTOM = 48, 16, 62, 44
"""Margins of a panel's curve."""
TITLE_HEIGHT = 34
NUM_POINTS = 300
NUM_TICKS = 5
PERCENTILES = (50, 90, 99)
FAR = 1.5
"""Times the 99th percentile: what is beyond is not drawn."""
INK, PALE, GRID, CURVE = "#1f2933", "#616e7c", "#e4e7eb", "#2563a8"


class Panel(NamedTuple):
    """One distribution."""

    title: str
    unit: str
    values: Sequence[float]


def write_plot(path: Path, title: str, panels: Sequence[Panel]) -> None:
    path.write_text(svg(title, panels))


def svg(title: str, panels: Sequence[Panel]) -> str:
    """The panels beside each other."""
    width, height = PANEL_WIDTH * max(1, len(panels)), PANEL_HEIGHT + TITLE_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(LEFT, 22, title, size=13, weight=600),
    ]
    for index, panel in enumerate(panels):
        parts.append(f'<g transform="translate({index * PANEL_WIDTH} {TITLE_HEIGHT})">')
        parts += _panel(panel)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel) -> Iterator[str]:
    values = np.sort(np.asarray(panel.values, dtype=float))
    yield _text(LEFT, 18, panel.title, weight=600)
    if not len(values):
        yield _text(LEFT, 36, "nothing was measured", color=PALE)
        return
    marks = dict(zip(PERCENTILES, np.percentile(values, PERCENTILES).tolist(), strict=True))
    told = ", ".join(f"p{percentile} {_number(value)}" for percentile, value in marks.items())
    yield _text(LEFT, 34, f"{told} {panel.unit}", color=PALE)
    longest = float(values[-1])
    end = longest if longest <= FAR * marks[99] else FAR * marks[99]
    if end < longest:
        yield _text(LEFT, 48, f"longest {_number(longest)} {panel.unit}, not drawn", color=PALE)
    axis = _Axis(end or 1.0)
    yield from _grid(axis, panel.unit)
    yield _curve(axis, values)
    for percentile, value in marks.items():
        yield f'<circle cx="{axis.x(value):.1f}" cy="{_y(percentile / 100):.1f}" r="3" fill="{CURVE}"/>'


class _Axis:
    """From 0 to a round number."""

    def __init__(self, end: float) -> None:
        step = _round_up(end / NUM_TICKS)
        self.ticks = [step * index for index in range(math.ceil(end / step - 1e-9) + 1)]

    def x(self, value: float) -> float:
        return LEFT + (PANEL_WIDTH - LEFT - RIGHT) * min(1.0, value / self.ticks[-1])


def _round_up(value: float) -> float:
    """The next number that is 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= value * (1 - 1e-9))


def _y(part: float) -> float:
    return PANEL_HEIGHT - BOTTOM - (PANEL_HEIGHT - TOP - BOTTOM) * part


def _grid(axis: _Axis, unit: str) -> Iterator[str]:
    right, bottom = PANEL_WIDTH - RIGHT, PANEL_HEIGHT - BOTTOM
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        yield f'<path d="M{LEFT} {_y(part):.1f}H{right}" stroke="{GRID}"/>'
        yield _text(LEFT - 6, _y(part) + 4, f"{part:.0%}", color=PALE, anchor="end")
    for tick in axis.ticks:
        yield f'<path d="M{axis.x(tick):.1f} {bottom}v4" stroke="{PALE}"/>'
        yield _text(axis.x(tick), bottom + 16, _number(tick), color=PALE, anchor="middle")
    yield _text((LEFT + right) / 2, bottom + 32, unit, color=PALE, anchor="middle")


def _curve(axis: _Axis, values: np.ndarray) -> str:
    """A staircase; of many values, every so manieth step."""
    indices = np.unique(np.linspace(0, len(values) - 1, min(len(values), NUM_POINTS)).astype(int))
    path = f"M{axis.x(float(values[0])):.1f} {_y(0):.1f}"
    for index in indices:
        x = axis.x(float(values[index]))
        path += f"H{x:.1f}V{_y((index + 1) / len(values)):.1f}"
        if values[index] > axis.ticks[-1]:
            break
    return f'<path d="{path}" fill="none" stroke="{CURVE}" stroke-width="1.8" stroke-linejoin="round"/>'


def _text(
    x: float, y: float, text: str, *, color: str = INK, anchor: str = "start", size: int = 11, weight: int = 400
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}" font-size="{size}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )


def _number(value: float) -> str:
    """Three digits that count."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
