from __future__ import annotations

import pytest
from hub_fakes import FILES, HubRepository, HubServer

VARIABLES = (
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "HF_TOKEN",
    "HUGGINGFACE_HUB_CACHE",
    "TRANSFORMERS_OFFLINE",
    "XDG_CACHE_HOME",
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, which the environment names."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    directory = tmp_path / "cache"
    directory.mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(directory))
    monkeypatch.chdir(tmp_path)
    return directory


@pytest.fixture
def hub(monkeypatch):
    """A hub with the repository `org/model`."""
    from huggingface_hub import close_session

    server = HubServer()
    server.repositories["org/model"] = HubRepository(dict(FILES))
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    yield server
    close_session()
    server.close()
