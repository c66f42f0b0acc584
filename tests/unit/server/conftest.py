from __future__ import annotations

import pytest
from server_fakes import serving, write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("served"))


@pytest.fixture
def api(checkpoint):
    with serving(checkpoint) as api:
        yield api
