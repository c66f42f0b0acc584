"""What every test relies on."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Tests do not time: a slow machine is no failure.
settings.register_profile("eagleray", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("eagleray")
