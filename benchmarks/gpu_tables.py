"""Tables of a run of `benchmarks/gpu.py`, as Markdown. Pure but for the reading and writing of files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_record import GpuRecord
from gpu_targets import NOT_MEASURED, TARGETS

LIMITS = {
    "read_tb_s": "read bandwidth R, TB/s",
    "copy_tb_s": "copy, read and written, TB/s",
    "product_tflop_s": "bf16 products F, TFLOP/s",
    "graph_kernel_us": "empty kernel in a graph, us",
    "triton_launch_us": "host, launch of a Triton kernel, us",
    "torch_launch_us": "host, launch of a torch operation, us",
    "graph_launch_us": "host, launch of a graph of 200 kernels, us",
    "event_wait_us": "host, launch and wait for its event, us",
    "upload_us": "host, launch of an upload of 64 KiB, us",
}


def write_record(record: GpuRecord, file: Path) -> None:
    file.write_text(json.dumps(asdict(record), indent=1) + "\n", "utf-8")


def read_record(file: Path) -> GpuRecord:
    """Read the file of a run. Fields that this version does not have are ignored."""
    content = json.loads(file.read_text("utf-8"))
    return GpuRecord(**{name: value for name, value in content.items() if name in GpuRecord.__dataclass_fields__})


def report_text(record: GpuRecord) -> str:
    """Return all tables of a run."""
    parts = [
        targets_table(record),
        "### Limits of the device\n\n" + limits_table(record),
        "### Steps\n\n" + steps_table(record),
        "### Kernels\n\n" + kernels_table(record),
        "### The run\n\n" + run_table(record),
    ]
    return "\n\n".join(parts)


def targets_table(record: GpuRecord) -> str:
    """Return a row for each target, measured or not."""
    by_name = {figure["name"]: figure for figure in record.targets}
    rows = []
    for target in TARGETS:
        figure = by_name.get(target.name, {})
        shown = figure.get("shown", NOT_MEASURED)
        note = figure.get("failure") or figure.get("note", "")
        verdict = figure.get("verdict", "")
        rows.append([target.name, target.bound, target.show(target.aim), shown, verdict, note])
    return table(["row", "must", "aim", "measured", "reaches", ""], rows)


def limits_table(record: GpuRecord) -> str:
    return table(["limit", "measured"], [[name, _number(record.limits.get(key))] for key, name in LIMITS.items()])


def steps_table(record: GpuRecord) -> str:
    rows = []
    for figure in record.steps:
        if "load_s" in figure:
            what = f"loaded in {figure['load_s']:.1f} s, largest steps {figure['memory_s']:.1f} s"
            what += f", cache and graphs {figure['capture_s']:.1f} s"
            rows.append([figure["name"], "", "", "", "", "; ".join(part for part in (what, figure["note"]) if part)])
            continue
        share = figure.get("share")
        rows.append(
            [
                figure["name"],
                _number(figure.get("ms")),
                _number(figure.get("floor_ms")),
                "" if share is None else f"{100 * share:.0f} %",
                _number(figure.get("host_us")),
                figure.get("failure", ""),
            ]
        )
    return table(["step", "ms", "floor, ms", "share", "host, us", ""], rows)


def kernels_table(record: GpuRecord) -> str:
    rows = []
    for figure in record.kernels:
        share = figure.get("share")
        rows.append(
            [
                figure["name"],
                _number(figure.get("us")),
                _number(figure.get("floor_us")),
                "" if share is None else f"{100 * share:.0f} %",
                figure.get("bound", ""),
                "" if "error" not in figure else f"{figure['error']:.1e}",
                _number(figure.get("flashinfer_us")),
                figure.get("failure") or figure.get("note", ""),
            ]
        )
    return table(["kernel", "us", "floor, us", "share", "bound by", "error", "FlashInfer, us", ""], rows)


def run_table(record: GpuRecord) -> str:
    rows = [[name, value] for name, value in record.machine.items()]
    if record.tests:
        failed = len(record.tests.get("failed", []))
        rows.append(["tests", f"{record.tests['passed']} passed, {failed} failed, {record.tests['skipped']} skipped"])
    rows += [[f"section {name}", f"{seconds:.0f} s"] for name, seconds in record.sections.items()]
    return table(["", ""], rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown; a bar in a cell would end it."""
    lines = [_line(head), "|" + "---|" * len(head), *(_line(row) for row in rows)]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in cells) + " |"


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
