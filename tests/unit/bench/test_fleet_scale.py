"""`benchmarks/fleet_scale.py` on a small fleet."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_fleet_scale_trial_reports_each_kind_of_event(monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    level = logging.getLogger("eagleray").level
    importlib.import_module("fleet_scale").main(["--trial"])
    logging.getLogger("eagleray").setLevel(level)
    report = capsys.readouterr().out
    for kind in ("boot:", "run:", "Alive", "CommandDone", "EngineStarted", "Exited", "Knows", "Pause", "Scale"):
        assert kind in report
