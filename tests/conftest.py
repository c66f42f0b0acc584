"""What every test relies on."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from eagleray.config.environment import limit_openmp_spinning

# Tests run side by side on the same cores: threads that spin while they wait for each other made a file of model tests
# take four times the processor time. No test module has imported torch yet.
limit_openmp_spinning()

# Tests do not time: a slow machine is no failure.
settings.register_profile("eagleray", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("eagleray")


class TakingTurns(LoadScopeScheduling):
    """Where tests run side by side, those that start processes take turns, and so do those that start a Ray cluster:
    they share the memory and the cores of the machine, and some look for what others may have left. Unit tests come
    last, on whoever has time."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        if path.startswith("tests/unit/"):
            return path
        return "ray" if path.startswith("tests/ray/") else "processes"


def pytest_xdist_make_scheduler(config, log):
    return TakingTurns(config, log)
