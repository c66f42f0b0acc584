"""Parts of `benchmarks/gpu.py` that need no GPU: its engine, its judgement, its file and its tables."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import gpu_report
import numpy as np
import pytest
import torch
from gpu_engine import BenchmarkEngine, SteadyDecodes, sum_of_spans, time_prompt
from gpu_kernels import CASES, measure_kernel
from gpu_limits import DeviceLimits, measure_limits
from gpu_machine import describe_machine, gpu_test_files, read_test_report
from gpu_models import ModelRun, RunSizes, count_used_experts, measure_30b, measure_small
from gpu_record import GpuRecord, Section
from gpu_shapes import write_config
from gpu_tables import LIMITS as LIMIT_NAMES
from gpu_tables import kernels_table, read_record, report_text, steps_table, table, targets_table, write_record
from gpu_targets import NOT_MEASURED, TARGETS

from eagleray.kernels.cuda.backend import CudaBackend
from eagleray.messages.steps import StepResult
from eagleray.models import registry

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
SMALL = {"num_kv_blocks": 60, "max_num_seqs": 4, "max_model_len": 200, "num_threads": 1}
LIMITS = DeviceLimits(
    read_bytes=1e12,
    copy_bytes=1e12,
    products=1e14,
    graph_kernel=1e-6,
    triton_launch=1e-5,
    torch_launch=5e-6,
    graph_launch=1e-5,
    event_wait=1e-5,
    upload=1e-5,
)


@pytest.fixture
def engine(tmp_path):
    with BenchmarkEngine(write_config(tmp_path, "qwen3-30b-a3b", is_small=True), CPU, **SMALL) as opened:
        yield opened


# ---- engine


def test_steady_decodes_rows_each_sample_in_every_step(engine):
    decodes = SteadyDecodes(engine, 3, 40, 20)
    decodes.start()
    assert decodes.run(7) > 0
    assert sorted(decodes.last_result.rows) == [0, 1, 2]
    assert len(decodes.host_seconds) == 7


def test_steady_decodes_follow_each_other_and_prompts(engine):
    for num_rows in (4, 1, 2):
        decodes = SteadyDecodes(engine, num_rows, 30, 10)
        decodes.start()
        decodes.run(3)
        assert len(decodes.last_result.rows) == num_rows
        assert time_prompt(engine, 50) > 0
    assert engine.generate(num_requests=6, num_prompt=20, num_output=5, deadline=time.monotonic() + 60) > 0


def test_steady_decodes_cache_too_small_is_refused(engine):
    with pytest.raises(RuntimeError, match="4 rows need 160 blocks, the cache has 60"):
        SteadyDecodes(engine, 4, 600, 30).start()


def test_generate_beyond_its_deadline_ends(engine):
    with pytest.raises(TimeoutError, match="tokens after"):
        engine.generate(num_requests=2, num_prompt=20, num_output=50, deadline=time.monotonic())


def test_engine_seconds_of_calls_are_noted(engine):
    assert engine.seconds_of("LoadModel") > 0
    assert engine.seconds_of("AllocateCache") > 0


@pytest.mark.grid
@pytest.mark.parametrize(
    ("shape", "options"),
    [("qwen3-0.6b", {"quantization": "fp8"}), ("gpt-oss-20b", {"enable_return_routed_experts": True})],
)
def test_steady_decodes_run_on_interpreted_kernels_of_gpus(shape, options, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "choose_backend", lambda device, model, *_: CudaBackend(model.dtype))
    sizes = {"num_kv_blocks": 20, "max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 60}
    checkpoint = write_config(tmp_path, shape, is_small=True)
    with BenchmarkEngine(checkpoint, CPU, dtype="float32", num_threads=1, **sizes, **options) as engine:
        decodes = SteadyDecodes(engine, 2, 20, 5, is_traced=shape == "gpt-oss-20b")
        decodes.start()
        decodes.run(2)
    assert sorted(decodes.last_result.rows) == [0, 1]
    assert (decodes.last_result.routed_experts is not None) == decodes.is_traced


def test_count_used_experts_averages_over_layers():
    chosen = np.array([[[0, 1], [4, 5]], [[1, 0], [6, 7]]], dtype=np.uint8)  # [tokens, layers, top_k]
    assert count_used_experts(StepResult(step=1, rows=[], token_ids=[], routed_experts=chosen)) == 3


def test_measure_30b_fills_its_rows_and_counts_experts(tmp_path):
    record = GpuRecord()
    measure_30b(ModelRun(record, LIMITS, CPU, tmp_path, RunSizes(is_small=True)), Section("30b", 60))
    assert [figure.get("failure") for figure in record.targets] == [None] * 3
    assert [figure["key"] for figure in record.targets] == ["30b-1", "30b-32", "routed"]
    steps = [figure for figure in record.steps if "used_experts" in figure]
    assert steps[0]["used_experts"] == 3
    assert 3 <= steps[1]["used_experts"] <= 8


def test_measure_small_fills_its_rows_with_adapters(tmp_path):
    record = GpuRecord()
    measure_small(ModelRun(record, LIMITS, CPU, tmp_path, RunSizes(is_small=True)), Section("0.6b", 60))
    assert [figure.get("failure") for figure in record.targets] == [None] * 3
    assert [figure["key"] for figure in record.targets] == ["0.6b-1", "lora-unused", "lora"]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], (0, 0, 0)),
        ([(0, 4)], (4, 0, 0)),
        ([(5, 7), (0, 4)], (6, 0, 1)),
        ([(0, 4), (14, 15), (15, 16)], (6, 10, 0)),
        ([(0, 10), (2, 3), (5, 12), (30, 31)], (13, 18, 0)),
    ],
)
def test_sum_of_spans_divides_the_time(spans, expected):
    assert sum_of_spans(spans, gap_seconds=2) == expected


# ---- limits and kernels


def test_measure_limits_in_tiny_sizes_gives_every_figure_of_the_report():
    fields = measure_limits(CPU, is_small=True).as_fields()
    assert fields.keys() == LIMIT_NAMES.keys()
    assert fields["read_tb_s"] > 0 and fields["product_tflop_s"] > 0


def test_measure_kernel_share_is_floor_by_time():
    case = next(case for case in CASES if case.kernel == "rms_norm")
    figures = measure_kernel(case, LIMITS, CPU, is_small=True)
    assert figures["share"] == pytest.approx(figures["floor_us"] / figures["us"])
    assert (figures["bound"], figures["floor_us"]) == ("launch", 1.0)


# ---- record and targets


@pytest.mark.parametrize(
    ("key", "values", "verdicts"),
    [
        ("8b-1", (0.9, 0.85, 0.8, 0.7, 1.2), ("aim", "aim", "must", "fails", "implausible")),
        ("0.6b-1", (0.7, 0.9, 1.01), ("aim", "must", "fails")),
        ("routed", (1.01, 0.99, 0.97), ("aim", "must", "fails")),
        ("idle-1", (0.0, 0.02, 0.2), ("aim", "must", "fails")),
    ],
)
def test_target_verdicts(key, values, verdicts):
    target = next(target for target in TARGETS if target.key == key)
    assert tuple(target.verdict(value) for value in values) == verdicts


def test_section_failure_is_recorded_and_the_next_measurement_runs():
    figures, section = [], Section("some", 60)

    def fail():
        raise ValueError("first line\nsecond line")

    assert not section.attempt(figures, "bad", fail)
    assert section.attempt(figures, "good", lambda: {"ms": 1.0})
    section.seconds = -1
    assert not section.attempt(figures, "late", lambda: {"ms": 1.0})
    assert figures[0]["failure"] == "ValueError: first line"
    assert figures[0]["traceback"]
    assert figures[1:] == [
        {"name": "good", "ms": 1.0},
        {"name": "late", "failure": "not begun: section some has used its -1 s"},
    ]


# ---- tables


@pytest.fixture
def record():
    """Figures that were made up."""
    return GpuRecord(
        machine={"date": "2000-01-01", "gpu": "Made Up"},
        limits={"read_tb_s": 4.25, "product_tflop_s": 780.0},
        kernels=[
            {
                "name": "norm, 1 | 2",
                "us": 2.0,
                "floor_us": 1.0,
                "share": 0.5,
                "bound": "read",
                "error": 0.001,
                "note": "",
            },
            {"name": "gate", "failure": "CompilationError: no"},
        ],
        steps=[
            {"name": "8b, start", "note": "", "load_s": 3.0, "memory_s": 4.0, "capture_s": 5.0, "cache_blocks": 9},
            {"name": "8b, 1 row", "ms": 4.5, "floor_ms": 3.6, "share": 0.8, "host_us": 120.0},
        ],
        targets=[
            {"name": TARGETS[0].name, "shown": "80 %", "must": "at least 75 %", "verdict": "must", "note": "4.50 ms"},
            {"name": TARGETS[1].name, "shown": "60 %", "must": "at least 70 %", "verdict": "fails", "note": ""},
        ],
        tests={"passed": 5, "skipped": 1, "failed": ["tests.a"]},
        sections={"kernels": 12.0},
    )


def test_targets_table_without_figures_is_not_measured_in_each_row():
    rows = targets_table(GpuRecord()).splitlines()[2:]
    assert len(rows) == len(TARGETS)
    assert all(f"| {NOT_MEASURED} |" in row for row in rows)


def test_tables_show_figures_and_failures(record):
    assert "| at least 75 % | 85 % | 80 % | must | 4.50 ms |" in targets_table(record)
    assert "| norm, 1 / 2 | 2 | 1 | 50 % | read | 1.0e-03 |" in kernels_table(record)
    assert "| gate |  |  |  |  |  |  | CompilationError: no |" in kernels_table(record)
    assert "| 8b, 1 row | 4.5 | 3.6 | 80 % | 120 |" in steps_table(record)
    assert "loaded in 3.0 s" in steps_table(record)


def test_failures_name_tests_errors_and_missed_targets(record):
    assert record.failures() == [
        "test: tests.a",
        "gate: CompilationError: no",
        f"{TARGETS[1].name}: fails with 60 %; must be at least 70 %",
    ]


def test_record_written_and_read_is_the_same(record, tmp_path):
    write_record(record, tmp_path / "gpu.json")
    content = json.loads((tmp_path / "gpu.json").read_text())
    (tmp_path / "gpu.json").write_text(json.dumps(content | {"of_a_later_version": 1}))
    assert asdict(read_record(tmp_path / "gpu.json")) == asdict(record)


def test_table_lines_are_one_row_each():
    assert table(["a", "b"], [["x\ny", "p|q"]]) == "| a | b |\n|---|---|\n| x y | p/q |"


def test_report_replaces_only_the_part_between_markers(record, tmp_path, monkeypatch):
    document = tmp_path / "gpu.md"
    document.write_text(f"before\n{gpu_report.BEGIN}\n\nold\n\n{gpu_report.END}\nafter\n")
    write_record(record, tmp_path / "gpu.json")
    for _ in range(2):
        monkeypatch.setattr("sys.argv", ["x", str(tmp_path / "gpu.json"), "--document", str(document)])
        gpu_report.main()
        figures = f"{gpu_report.BEGIN}\n\n{report_text(record)}\n\n{gpu_report.END}"
        assert document.read_text() == f"before\n{figures}\nafter\n"
    monkeypatch.setattr("sys.argv", ["x", "--empty", "--document", str(document)])
    gpu_report.main()
    assert targets_table(GpuRecord()) in document.read_text()


def test_report_document_without_markers_is_refused():
    with pytest.raises(ValueError, match="has no lines"):
        gpu_report.replaced("text", "figures")


def test_document_has_the_markers_and_all_targets():
    document = (ROOT / "docs" / "gpu.md").read_text("utf-8")
    assert gpu_report.replaced(document, "figures") != document
    assert all(target.name in document for target in TARGETS)


# ---- machine and tests


def test_describe_machine_names_versions():
    facts = describe_machine(ROOT)
    assert facts["torch"] == torch.__version__
    assert all(facts.values())


def test_gpu_test_files_are_those_with_marked_tests():
    names = {file.name for file in gpu_test_files(ROOT)}
    assert {"test_model_gpu.py", "test_engine_on_device.py", "test_real_shapes.py"} <= names
    assert "test_message_queue_ends.py" not in names


def test_read_test_report_counts_and_names(tmp_path):
    report = tmp_path / "tests.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="ok"/><testcase classname="a" name="bad"><failure/>'
        '</testcase><testcase classname="a" name="broken"><error/></testcase><testcase classname="a" name="left">'
        "<skipped/></testcase></testsuite></testsuites>"
    )
    assert read_test_report(report, {"exit": 1}) == {"passed": 1, "skipped": 1, "failed": ["a.bad", "a.broken"]}
    missing = read_test_report(tmp_path / "none.xml", {"exit": 4})
    assert missing["failed"] == ["pytest left no report (exit 4)"]
