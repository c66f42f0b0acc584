"""Decides what each step computes. Pure: values in, values out; no clock, no socket, no torch."""

from eagleray.scheduler.request import Output
from eagleray.scheduler.scheduler import Scheduler
from eagleray.scheduler.stats import SchedulerStats

__all__ = ["Output", "Scheduler", "SchedulerStats"]
