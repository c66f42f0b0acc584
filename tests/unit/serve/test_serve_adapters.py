"""Adapters that requests name: where they are, and how a replica keeps the last ones loaded."""

from __future__ import annotations

import asyncio

import pytest

from eagleray.config.build import build_config
from eagleray.errors import ConfigError, NotFound, UnknownModel
from eagleray.serve.adapter_source import AdapterSource, adapter_capacity, adapter_source

LORA = {"enable_lora": True, "max_loras": 2}


def test_adapter_source_directory_has_an_adapter_in_each_subdirectory(tmp_path):
    (tmp_path / "sql").mkdir()
    source = adapter_source(str(tmp_path), build_config(**LORA))
    assert asyncio.run(source.find("sql")) == str(tmp_path / "sql")
    with pytest.raises(NotFound, match=r"no directory .*/poems with adapter 'poems'"):
        asyncio.run(source.find("poems"))


@pytest.mark.parametrize("name", ["../sql", "/etc", "..", "", "a/b", ".hidden"])
def test_adapter_source_name_that_leaves_the_directory_is_unknown(tmp_path, name):
    with pytest.raises(UnknownModel, match=f"name one of the subdirectories of {tmp_path}"):
        AdapterSource(directory=str(tmp_path)).path_of(name)


def test_adapter_source_paths_are_the_only_adapters():
    source = adapter_source({"sql": "/a", "poems": "/b"}, build_config(**LORA))
    assert source.path_of("sql") == "/a"
    with pytest.raises(UnknownModel, match=r"no adapter 'math'.*name one of sql, poems"):
        source.path_of("math")
    with pytest.raises(UnknownModel, match="built without `adapters`"):
        adapter_source(None, build_config()).path_of("sql")


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        ("/adapters", {}, "needs `enable_lora`"),
        ("/adapters", {**LORA, "lora_modules": ["a=/a", "b=/b"]}, "takes all 2 places of `max_loras`"),
        (3, LORA, "a mapping of names to directories, but got 3"),
        ({"sql": 3}, LORA, "expected a directory"),
        ("", LORA, "expected a directory"),
    ],
)
def test_adapter_source_wrong_argument_is_refused(given, options, said):
    with pytest.raises(ConfigError, match=said):
        adapter_source(given, build_config(**options))


def test_adapter_capacity_leaves_room_for_adapters_of_the_start():
    assert adapter_capacity(build_config(**LORA, lora_modules=["a=/a"])) == 1
