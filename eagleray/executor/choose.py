"""Which worker group an engine gets. Imports one of them: the others' dependencies are not paid for."""

from __future__ import annotations

from eagleray.config import Config
from eagleray.executor.executor import Executor
from eagleray.identity import EngineId

__all__ = ["choose_executor"]


def choose_executor(engine: EngineId, config: Config) -> Executor:
    """The executor that `config` asks for, its workers running."""
    match config.execution.executor:
        case "in-process":
            from eagleray.executor.in_process import InProcessGroup

            return Executor(InProcessGroup(engine, config))
