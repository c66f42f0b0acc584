"""Figures, tables, files and pictures of benchmarks."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from eagleray.errors import UserError
from eagleray_bench.figures import summary
from eagleray_bench.plot import PANEL_WIDTH, Panel, svg, write_plot
from eagleray_bench.report import check_writable, summaries, table, write_json

SVG = "{http://www.w3.org/2000/svg}"


def test_a_summary_is_in_the_unit_that_was_asked_for():
    found = summary([index / 1000 for index in range(101)], scale=1e3)
    assert (found.count, found.lowest, found.highest) == (101, 0.0, 100.0)
    assert (found.mean, found.p50, found.p90, found.p99) == pytest.approx((50, 50, 90, 99))


def test_percentiles_lie_between_measurements():
    assert summary([1.0, 2.0]).p90 == pytest.approx(1.9)
    assert summary([3.0]).p99 == 3.0


def test_there_is_no_summary_of_nothing():
    assert summary([]) is None


def test_a_table_is_aligned():
    lines = table(["name", "n"], [["a", "1"], ["longer", "1,000"]]).splitlines()
    assert lines == ["name        n", "a           1", "longer  1,000"]


def test_a_summary_of_nothing_has_dashes():
    heading, some, none = summaries("ms", {"some": summary([1.5]), "none": None}).splitlines()
    assert heading.split() == ["ms", "mean", "p50", "p90", "p99"]
    assert some.split() == ["some", "1.50", "1.50", "1.50", "1.50"]
    assert none.split() == ["none", "-", "-", "-", "-"]


def test_a_file_says_what_was_measured_and_how(tmp_path):
    path = tmp_path / "figures.json"
    write_json(path, "latency", {"repeat": 3}, {"ttft": summary([1.0])})
    content = json.loads(path.read_text())
    assert (content["benchmark"], content["options"]) == ("latency", {"repeat": 3})
    assert content["figures"]["ttft"]["p50"] == 1.0
    assert {"time", "eagleray", "cores", "load_average"} <= set(content["machine"])


def test_a_file_that_cannot_be_written_is_known_before(tmp_path):
    assert check_writable(None, flag="--json") is None
    assert check_writable(str(tmp_path / "a.json"), flag="--json") == tmp_path / "a.json"
    for path in (tmp_path, tmp_path / "missing" / "a.json"):
        with pytest.raises(UserError, match=r"--json .*: no file can be written there"):
            check_writable(str(path), flag="--json")


def test_only_svg_can_be_drawn(tmp_path):
    with pytest.raises(UserError, match=r"--plot .*\.png: only \.svg is supported; name a file that ends in \.svg"):
        check_writable(str(tmp_path / "a.png"), flag="--plot", suffix=".svg")
    assert check_writable(str(tmp_path / "a.SVG"), flag="--plot", suffix=".svg")


def panel(values, title="time") -> ElementTree.Element:
    (group,) = ElementTree.fromstring(svg("all", [Panel(title, "ms", values)])).iter(f"{SVG}g")
    return group


def test_a_plot_is_a_picture_with_all_its_panels(tmp_path):
    write_plot(tmp_path / "a.svg", "a < b", [Panel("first & last", "ms", [1.0, 2.0]), Panel("none", "ms", [])])
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"a < b", "first & last", "nothing was measured"} <= set(texts)
    assert len(list(root.iter(f"{SVG}g"))) == 2


@pytest.mark.parametrize(
    "values", [[0.0], [5.0], [1.0, 1.0], [1e-6, 2e-6], [1e7, 3e7], np.random.default_rng(0).lognormal(3, 2, 20_000)]
)
def test_a_curve_rises_and_stays_inside_its_panel(values):
    group = panel(values)
    curve = next(path.get("d") for path in group.iter(f"{SVG}path") if path.get("fill") == "none")
    xs = [float(x) for x in re.findall(r"H([\d.]+)", curve)]
    ys = [float(y) for y in re.findall(r"V([\d.]+)", curve)]
    assert xs == sorted(xs) and ys == sorted(ys, reverse=True)
    for circle in group.iter(f"{SVG}circle"):
        xs.append(float(circle.get("cx")))
        ys.append(float(circle.get("cy")))
    assert min(xs) >= 0 and max(xs) <= PANEL_WIDTH
    assert min(ys) >= 0
    assert len(curve) < 20_000, "many values are thinned out"


def test_the_percentiles_of_the_table_are_told_in_the_plot():
    texts = [text.text for text in panel(list(range(1, 102))).iter(f"{SVG}text")]
    assert "p50 51, p90 91, p99 100 ms" in texts


def test_what_lies_far_out_is_told_and_not_drawn():
    texts = [text.text for text in panel([*([1.0] * 999), 500.0]).iter(f"{SVG}text")]
    assert "longest 500 ms, not drawn" in texts
    assert "100" not in texts, "the axis ends near the 99th percentile"
