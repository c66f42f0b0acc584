from __future__ import annotations

import pytest
from metrics_fakes import instance


@pytest.fixture
def make(tmp_path):
    with instance(tmp_path / "metrics") as make:
        yield make
