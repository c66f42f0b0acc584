"""Sources of the server's API keys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eagleray.config.api_keys import with_api_keys, without_api_keys
from eagleray.config.build import build_config
from eagleray.config.sections import Config
from eagleray.errors import ConfigError


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EAGLERAY_API_KEY", raising=False)


def keys(config: Config) -> list[str]:
    return with_api_keys(config).serving.api_key


def test_with_api_keys_several_sources_joins_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n first \n\nsecond\n#third\n")
    monkeypatch.setenv("EAGLERAY_API_KEY", "fourth, fifth\nsixth,")
    config = build_config(api_key=["zeroth"], api_key_file=str(path))
    assert keys(config) == ["zeroth", "first", "second", "fourth", "fifth", "sixth"]
    assert "EAGLERAY_API_KEY" not in os.environ, "children of this process do not get it"


def test_with_api_keys_no_source_is_none() -> None:
    assert keys(build_config()) == []


def test_without_api_keys_leaves_the_rest() -> None:
    config = build_config(api_key=["a"], port=7)
    assert without_api_keys(config) == build_config(port=7)


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "No such file"), (b"# nothing\n\n", "holds no key"), (b"\xff\xfe\x00", "it is not text")],
)
def test_api_key_file_without_a_key_is_refused(tmp_path: Path, content: bytes | None, said: str) -> None:
    """A server without keys would not be what was meant."""
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"`api_key_file`: .*{said}"):
        keys(build_config(api_key_file=str(path)))


@pytest.mark.parametrize("value", ["", " ", ",\n"])
def test_api_key_variable_without_a_key_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("EAGLERAY_API_KEY", value)
    with pytest.raises(ConfigError, match="EAGLERAY_API_KEY is set but holds no key"):
        keys(build_config())


def test_empty_api_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="`api_key`: a key is empty"):
        keys(build_config(api_key=["a", ""]))
