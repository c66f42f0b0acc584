"""What every test relies on."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Tests do not time: a slow machine is no failure.
settings.register_profile("eagleray", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("eagleray")

UNIT = Path(__file__).parent / "unit"


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run side by side (pytest-xdist), those that start processes take turns: they share the ports, the
    memory and the cores of the machine, and some look for what others may have left. Unit tests run beside them."""
    for item in items:
        if UNIT not in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("processes"))
