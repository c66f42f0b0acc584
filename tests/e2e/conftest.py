from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def forks(forked_programs):
    """Have engines, workers and servers of these tests forked."""
