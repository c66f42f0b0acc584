"""The results and failures of a run of `benchmarks/gpu.py`, by section."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

TRACEBACK_LINES = 12


@dataclass
class GpuRecord:
    """The content of the JSON file. Each figure is a dictionary with its `name`."""

    machine: dict[str, str] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    targets: list[dict[str, Any]] = field(default_factory=list)
    tests: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, float] = field(default_factory=dict)
    """Seconds of each section."""

    def failures(self) -> list[str]:
        """Return a line for each measurement that failed and for each target that was missed."""
        lines = [f"test: {name}" for name in self.tests.get("failed", [])]
        for figure in [*self.kernels, *self.steps, *self.targets]:
            if figure.get("failure"):
                lines.append(f"{figure['name']}: {figure['failure']}")
            elif (verdict := figure.get("verdict", "")) in ("fails", "implausible"):
                lines.append(f"{figure['name']}: {verdict} with {figure['shown']}; must be {figure['must']}")
        return lines


class TimeIsUp(Exception):
    """A section has used its time."""


@dataclass
class Section:
    """A part of a run with a limit of time. A measurement that fails is recorded, and the others go on."""

    name: str
    seconds: float
    began: float = field(default_factory=time.monotonic)

    @property
    def deadline(self) -> float:
        return self.began + self.seconds

    def attempt(self, figures: list[dict[str, Any]], name: str, measure: Callable[[], dict[str, Any]]) -> bool:
        """Append the figures of a measurement, or its failure, and return whether it succeeded."""
        figure: dict[str, Any] = {"name": name}
        figures.append(figure)
        try:
            if time.monotonic() > self.deadline:
                raise TimeIsUp(f"not begun: section {self.name} has used its {self.seconds:.0f} s")
            figure |= measure()
        except Exception as error:
            figure["failure"] = describe(error)
            if not isinstance(error, TimeIsUp):
                figure["traceback"] = traceback.format_exc().splitlines()[-TRACEBACK_LINES:]
            return False
        return True


def describe(error: BaseException) -> str:
    """Return an error in one line."""
    lines = str(error).splitlines()
    text = lines[0] if lines else ""
    return text if isinstance(error, TimeIsUp) else f"{type(error).__name__}: {text}"[:300]
