"""Statistics, tables, JSON files and plots of benchmarks."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.axes import Axes

from eagleray.errors import UserError
from eagleray_bench.figures import summarize
from eagleray_bench.plot import MAX_POINTS, Panel, draw, write_plot
from eagleray_bench.report import check_writable, summaries, table, write_json

SVG = "{http://www.w3.org/2000/svg}"


def test_summarize_with_scale_converts_the_unit():
    found = summarize([index / 1000 for index in range(101)], scale=1e3)
    assert (found.count, found.lowest, found.highest) == (101, 0.0, 100.0)
    assert (found.mean, found.p50, found.p90, found.p99) == pytest.approx((50, 50, 90, 99))


def test_summarize_percentiles_interpolate_between_measurements():
    assert summarize([1.0, 2.0]).p90 == pytest.approx(1.9)
    assert summarize([3.0]).p99 == 3.0


def test_summarize_no_values_gives_none():
    assert summarize([]) is None


def test_table_columns_are_aligned():
    lines = table(["name", "n"], [["a", "1"], ["longer", "1,000"]]).splitlines()
    assert lines == ["name        n", "a           1", "longer  1,000"]


def test_summaries_none_becomes_dashes():
    heading, some, none = summaries("ms", {"some": summarize([1.5]), "none": None}).splitlines()
    assert heading.split() == ["ms", "mean", "p50", "p90", "p99"]
    assert some.split() == ["some", "1.50", "1.50", "1.50", "1.50"]
    assert none.split() == ["none", "-", "-", "-", "-"]


def test_write_json_file_has_figures_options_and_machine(tmp_path):
    path = tmp_path / "figures.json"
    write_json(path, "latency", {"repeat": 3}, {"ttft": summarize([1.0])})
    content = json.loads(path.read_text())
    assert (content["benchmark"], content["options"]) == ("latency", {"repeat": 3})
    assert content["figures"]["ttft"]["p50"] == 1.0
    assert {"time", "eagleray", "cores", "load_average"} <= set(content["machine"])


def test_check_writable_impossible_file_raises(tmp_path):
    assert check_writable(None, flag="--json") is None
    assert check_writable(str(tmp_path / "a.json"), flag="--json") == tmp_path / "a.json"
    for path in (tmp_path, tmp_path / "missing" / "a.json"):
        with pytest.raises(UserError, match=r"--json .*: no file can be written there"):
            check_writable(str(path), flag="--json")


def test_check_writable_other_suffix_raises(tmp_path):
    with pytest.raises(UserError, match=r"--plot .*\.png: only \.svg is supported; name a file that ends in \.svg"):
        check_writable(str(tmp_path / "a.png"), flag="--plot", suffix=".svg")
    assert check_writable(str(tmp_path / "a.SVG"), flag="--plot", suffix=".svg")


def axes(values, title="time") -> Axes:
    (found,) = draw("all", [Panel(title, "ms", values)]).axes
    return found


def test_write_plot_several_panels_writes_all_their_texts(tmp_path):
    write_plot(tmp_path / "a.svg", "a < b", [Panel("first & last", "ms", [1.0, 2.0]), Panel("none", "ms", [])])
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert root.tag == f"{SVG}svg"
    assert {"a < b", "first & last", "none", "nothing was measured"} <= texts
    assert len([group for group in root.iter(f"{SVG}g") if (group.get("id") or "").startswith("axes_")]) == 2


def test_write_plot_twice_gives_equal_files(tmp_path):
    for name in ("a.svg", "b.svg"):
        write_plot(tmp_path / name, "title", [Panel("time", "ms", [1.0, 2.0])])
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(
    "values", [[0.0], [5.0], [1.0, 1.0], [1e-6, 2e-6], [1e7, 3e7], np.random.default_rng(0).lognormal(3, 2, 20_000)]
)
def test_draw_any_values_gives_a_rising_curve_from_0_to_1(values):
    curve, marks = axes(values).lines
    xs, ys = curve.get_data()
    assert (np.diff(xs) >= 0).all() and (np.diff(ys) >= 0).all()
    assert (xs[0], ys[0], ys[-1]) == (min(values), 0.0, 1.0)
    assert len(xs) <= MAX_POINTS + 1, "many values are thinned out"
    left, right = axes(values).get_xlim()
    assert left == 0 and max(marks.get_xdata()) <= right


def test_draw_panel_heading_has_the_percentiles_of_the_table():
    assert "p50 51, p90 91, p99 100 ms" in axes(list(range(1, 102))).get_title(loc="left")


def test_draw_far_outlier_is_named_and_not_drawn():
    found = axes([*([1.0] * 999), 500.0])
    assert "longest 500 ms, not drawn" in found.get_title(loc="left")
    assert found.get_xlim()[1] < 2, "the axis ends near the 99th percentile"
