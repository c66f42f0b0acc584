"""Put the figures of a machine with a GPU into docs/gpu.md.

    python scripts/gpu_report.py gpu.json                      replace the part of docs/gpu.md between its markers
    python scripts/gpu_report.py gpu.json --document FILE.md   the same in another document
    python scripts/gpu_report.py --empty                       a table in which nothing is measured

`benchmarks/gpu.py` writes the file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_record import GpuRecord  # noqa: E402
from gpu_tables import read_record, report_text, targets_table  # noqa: E402

BEGIN = "<!-- figures: begin (scripts/gpu_report.py) -->"
END = "<!-- figures: end -->"


def replaced(document: str, figures: str) -> str:
    """Return the document with other figures between its markers. Raises `ValueError` if it lacks them."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document has no lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, nargs="?", metavar="FILE")
    parser.add_argument("--empty", action="store_true", help="nothing is measured")
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "gpu.md")
    arguments = parser.parse_args()
    if (arguments.json is None) != arguments.empty:
        parser.error("give the file of a run, or --empty")
    figures = targets_table(GpuRecord()) if arguments.empty else report_text(read_record(arguments.json))
    arguments.document.write_text(replaced(arguments.document.read_text("utf-8"), figures), "utf-8")


if __name__ == "__main__":
    main()
