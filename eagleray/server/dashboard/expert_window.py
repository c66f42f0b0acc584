"""Load of the experts that fades with time, from the counts that engines report. Pure: times are passed in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from eagleray.identity import EngineId
from eagleray.messages.outputs import ExpertLoad
from eagleray.server.dashboard.state import ExpertHeat

HALF_LIFE_SECONDS = 30.0


class ExpertWindow:
    """Adds up the reports of all engines. The first report of an engine counts whole, so that there is something to
    see at once."""

    def __init__(self) -> None:
        self._reports: dict[EngineId, ExpertLoad] = {}
        """The last report of each engine."""
        self._load: np.ndarray[Any, np.dtype[np.float64]] = np.zeros((0, 0))
        self._updated_at = 0.0
        self.version = 0
        """Number of changes of `heat`."""

    def update(self, now: float, reports: Iterable[ExpertLoad]) -> None:
        """Add what was computed since the last call, at a time of any steady clock."""
        before, self._reports = self._reports, {report.engine: report for report in reports}
        added = [
            report.counts - before[engine].counts if engine in before else report.counts
            for engine, report in self._reports.items()
            if before.get(engine) is not report
        ]
        if not added:
            return
        if self._load.shape != added[0].shape:
            self._load = np.zeros(added[0].shape)
        self._load *= 0.5 ** ((now - self._updated_at) / HALF_LIFE_SECONDS)
        self._load += sum(added)
        self._updated_at = now
        self.version += 1

    def heat(self) -> ExpertHeat | None:
        """Return the load of every expert, or None before the first report."""
        if not self._load.size:
            return None
        means = self._load.mean(axis=1, keepdims=True)
        most = self._load.max(axis=1, keepdims=True)
        is_idle = most == 0
        percent = np.where(is_idle, 0, 100 * self._load / np.where(is_idle, 1, means))
        balance = np.where(is_idle, 1.0, means / np.where(is_idle, 1, most))
        return ExpertHeat(load=percent.round().astype(int).tolist(), balance=balance[:, 0].round(3).tolist())
