from __future__ import annotations

import functools

import pytest
from server_fakes import serving, write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def template(request, tmp_path_factory):
    """The file of the chat template `TEMPLATE` of the module."""
    path = tmp_path_factory.mktemp("template") / "own.jinja"
    path.write_text(request.module.TEMPLATE)
    return path


@pytest.fixture(scope="module")
def served(checkpoint, template):
    """Make applications with the chat template of the module."""
    return functools.partial(serving, checkpoint, chat_template=str(template))


@pytest.fixture(scope="module")
def shared_api(served):
    """An application with that template and room for long answers, for all tests of the module."""
    with served() as api:
        api.join(max_model_len=1024)
        yield api


@pytest.fixture
def api(checkpoint):
    with serving(checkpoint) as api:
        yield api
