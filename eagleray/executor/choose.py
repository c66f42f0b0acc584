"""Which worker group an engine gets. Imports one of them: the others' dependencies are not paid for."""

from __future__ import annotations

from eagleray.config import Config
from eagleray.config.resolve import executor_name
from eagleray.errors import ConfigError
from eagleray.executor.executor import Executor
from eagleray.identity import EngineId

__all__ = ["choose_executor"]


def choose_executor(engine: EngineId, config: Config) -> Executor:
    """The executor that `config` asks for, its workers running."""
    match executor_name(config, in_placement_group=False):
        case "in-process":
            from eagleray.executor.in_process import InProcessGroup

            return Executor(InProcessGroup(engine, config))
        case other:
            raise ConfigError(f"executor {other} is not there yet")
