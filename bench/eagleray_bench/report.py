"""Results as text for standard output and as JSON files."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import eagleray
from eagleray.errors import UserError
from eagleray_bench.figures import Summary


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns: the first to the left, the others to the right."""
    lines = [list(headings), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        ).rstrip()
        for line in lines
    )


def summaries(unit: str, rows: Mapping[str, Summary | None]) -> str:
    """Return a table with a row for each summary; None becomes dashes."""
    columns = ("mean", "p50", "p90", "p99")
    cells = [
        [name, *(f"{getattr(row, column):,.2f}" if row else "-" for column in columns)] for name, row in rows.items()
    ]
    return table([unit, *columns], cells)


def facts(rows: Mapping[str, str]) -> str:
    """Return one line for each name and its value."""
    width = max(map(len, rows))
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows.items())


def check_writable(path: str | None, *, flag: str, suffix: str = "") -> Path | None:
    """Return the path if a file can be made there, so that a mistake shows before an hour of measurements.

    Raises `UserError` if there is no such directory, or the name does not end in `suffix`.
    """
    if path is None:
        return None
    file = Path(path)
    if suffix and file.suffix.lower() != suffix:
        raise UserError(f"{flag} {path}: only {suffix} is supported; name a file that ends in {suffix}")
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        raise UserError(f"{flag} {path}: no file can be written there")
    return file


def write_json(path: Path, benchmark: str, options: Mapping[str, Any], figures: Any) -> None:
    """Write the figures (structs, or lists and dicts of them) with the options, the machine and the time."""
    content = {
        "benchmark": benchmark,
        "options": dict(options),
        "machine": _machine(),
        "figures": msgspec.to_builtins(figures),
    }
    path.write_text(json.dumps(content, indent=1, default=str) + "\n")


def _machine() -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "eagleray": eagleray.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
    }
