"""Repeats the engine's decisions to every worker and collects what they answer."""

from eagleray.executor.executor import Executor, PendingStep
from eagleray.executor.group import WorkerGroup

__all__ = ["Executor", "PendingStep", "WorkerGroup"]
