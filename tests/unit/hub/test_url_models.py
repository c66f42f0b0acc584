"""Models at URLs, in file systems of fsspec that need no network."""

from __future__ import annotations

import errno
import os
import sys

import fsspec
import msgspec
import pytest
from hub_fakes import FILES

from eagleray.config.resolve import served_names
from eagleray.config.sections import ModelConfig
from eagleray.errors import CheckpointError
from eagleray.hub.locate import checkpoint_dir, model_root
from eagleray.hub.prepare import fetch_model, prepare_model

READ = {"config.json", "model.safetensors", "tokenizer.json"}


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    system.store.clear()
    for name, data in FILES.items():
        system.pipe(f"/bucket/model/{name}", data)
    yield system
    system.store.clear()


def test_prepare_model_url_is_copied_once(memory, cache, monkeypatch):
    prepared = prepare_model(ModelConfig(model="memory://bucket/model"))
    directory = checkpoint_dir(prepared)
    assert {path.name: path.read_bytes() for path in directory.glob("[a-z]*")} == {name: FILES[name] for name in READ}
    assert directory.is_relative_to(cache)
    assert served_names(prepared) == [model_root(prepared)] == ["memory://bucket/model"]

    def refuse(*arguments, **options):
        raise AssertionError("a file was copied again")

    monkeypatch.setattr(type(memory), "get_file", refuse)
    assert prepare_model(ModelConfig(model="memory://bucket/model/")).revision is not None
    assert prepare_model(ModelConfig(model="memory://bucket/model")) == prepared
    memory.store.clear()
    fetch_model(prepared, timeout=0, with_weights=False)
    fetch_model(prepared, timeout=0, with_weights=True)  # the copy serves without its source


def test_prepare_model_url_with_replaced_files_is_copied_again(memory, tmp_path):
    prepared = prepare_model(ModelConfig(model="memory://bucket/model"))
    memory.pipe("/bucket/model/model.safetensors", b"v" * 1000)
    again = prepare_model(ModelConfig(model="memory://bucket/model"))
    assert (checkpoint_dir(again) / "model.safetensors").read_bytes() == b"v" * 1000
    assert (checkpoint_dir(prepared) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    elsewhere = msgspec.structs.replace(prepared, download_dir=str(tmp_path / "node"))
    with pytest.raises(CheckpointError, match="its files were replaced since the deployment started"):
        fetch_model(elsewhere, timeout=1, with_weights=True)


def test_prepare_model_url_that_broke_off_goes_on_with_its_next_file(memory, cache, monkeypatch):
    copy, copied = type(memory).get_file, []

    def break_off(self, source, target):
        copied.append(source.rpartition("/")[2])
        if copied == ["tokenizer.json", "config.json", "model.safetensors"]:
            raise OSError("the connection broke")
        copy(self, source, target)

    monkeypatch.setattr(type(memory), "get_file", break_off)
    with pytest.raises(CheckpointError, match="its file system failed: OSError: the connection broke"):
        prepare_model(ModelConfig(model="memory://bucket/model"))
    prepare_model(ModelConfig(model="memory://bucket/model"))
    assert copied[3:] == ["model.safetensors"]


def test_prepare_model_file_url(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name, data in FILES.items():
        (source / name).write_bytes(data)
    prepared = prepare_model(ModelConfig(model=f"file://{source}"))
    assert {path.name for path in checkpoint_dir(prepared).glob("[a-z]*")} == READ


@pytest.mark.parametrize("page", ["https://huggingface.co/org/demo", "http://localhost:1/org/demo/tree/main"])
def test_prepare_model_url_of_a_page_names_the_id(page, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://localhost:1/")
    with pytest.raises(CheckpointError, match=r"give the id instead: org/demo$"):
        prepare_model(ModelConfig(model=page))


def test_prepare_model_url_of_a_full_disk_says_so(memory, monkeypatch):
    def fail(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(type(memory), "get_file", fail)
    with pytest.raises(CheckpointError, match="is too full: No space left on device"):
        prepare_model(ModelConfig(model="memory://bucket/model"))


def test_prepare_model_url_of_nothing_is_an_error(memory):
    with pytest.raises(CheckpointError, match="there is no such directory, or it is empty"):
        prepare_model(ModelConfig(model="memory://bucket/none"))


@pytest.mark.parametrize("url", ["s3://bucket/model", "nosuch://bucket/model"])
def test_prepare_model_url_without_its_package_says_what_to_install(url, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(CheckpointError, match="pip install fsspec s3fs gcsfs"):
        prepare_model(ModelConfig(model=url))


def test_prepare_model_url_without_fsspec_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(CheckpointError, match="pip install fsspec s3fs gcsfs"):
        prepare_model(ModelConfig(model="memory://bucket/model"))


def test_fetch_model_url_other_node_copies_small_files_before_weights(memory, tmp_path):
    prepared = prepare_model(ModelConfig(model="memory://bucket/model"))
    elsewhere = msgspec.structs.replace(prepared, download_dir=str(tmp_path / "node"))
    fetch_model(elsewhere, timeout=1, with_weights=False)
    assert {path.name for path in checkpoint_dir(elsewhere).glob("[a-z]*")} == {"config.json", "tokenizer.json"}
    fetch_model(elsewhere, timeout=1, with_weights=True)
    assert {path.name for path in checkpoint_dir(elsewhere).glob("[a-z]*")} == READ
