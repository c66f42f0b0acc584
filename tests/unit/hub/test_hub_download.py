"""Downloads from a hub on loopback, by the library that users have."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from hub_fakes import COMMIT, CONFIG, FILES, index_of, write_snapshot

from eagleray.config.sections import ModelConfig
from eagleray.errors import CheckpointError, DeadlineExceeded
from eagleray.hub import disk_space, download, prepare
from eagleray.hub.cache import CachedRepo
from eagleray.hub.file_lock import file_lock
from eagleray.hub.locate import checkpoint_dir
from eagleray.hub.options import HubOptions
from eagleray.hub.prepare import fetch_model, prepare_model

READ = {"config.json", "model.safetensors", "tokenizer.json"}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(download, "RETRY_SECONDS", 0.0)


def model(name="org/model", **options):
    return ModelConfig(model=name, **options)


def test_download_fetches_the_files_that_are_read_and_then_asks_no_more(hub, cache):
    prepared = prepare_model(model())
    directory = checkpoint_dir(prepared)
    assert prepared.revision == COMMIT
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == {name: FILES[name] for name in READ}
    assert directory.resolve().is_relative_to(cache)
    assert (directory / "config.json").is_symlink()  # in the layout of the library, which shares the cache
    assert (cache / "models--org--model" / "refs" / "main").read_text() == COMMIT
    hub.requests.clear()
    assert prepare_model(model()) == prepared
    assert not hub.requests


def test_download_revision_and_download_dir(hub, tmp_path):
    hub.repositories["org/model"].commits["v1"] = COMMIT
    prepared = prepare_model(model(revision="v1", download_dir=str(tmp_path / "mine")))
    assert checkpoint_dir(prepared).is_relative_to(tmp_path / "mine")


def test_download_goes_on_with_an_incomplete_snapshot(hub, cache):
    index = index_of("model-1.safetensors", "model-2.safetensors")
    files = {
        "config.json": CONFIG,
        "tokenizer.json": b"{}",
        "model.safetensors.index.json": index,
        "model-1.safetensors": b"1" * 100,
    }
    write_snapshot(cache, files=files)
    hub.repositories["org/model"].files = files | {"model-2.safetensors": b"2" * 100}
    directory = checkpoint_dir(prepare_model(model()))
    assert (directory / "model-2.safetensors").read_bytes() == b"2" * 100
    assert hub.downloads() == {"model-2.safetensors"}


def list_files(cache, names):
    """Leave the listing that huggingface_hub leaves before it downloads a snapshot."""
    tree = cache / "models--org--model" / "trees" / f"{COMMIT}.json"
    tree.parent.mkdir()
    tree.write_text(json.dumps({"format_version": 1, "files": {name: {"size": 1, "blob_id": "0"} for name in names}}))


def test_download_fetches_files_that_another_program_has_listed_and_not_fetched(hub, cache):
    snapshot = write_snapshot(cache)
    names = {*FILES, "tokenizer_config.json"}
    list_files(cache, names)
    hub.repositories["org/model"].files["tokenizer_config.json"] = b"{}"
    assert prepare_model(model()).revision == COMMIT
    assert (snapshot / "tokenizer_config.json").read_bytes() == b"{}"
    assert hub.downloads() == {"tokenizer_config.json"}
    (snapshot / "tokenizer_config.json").unlink()
    hub.failures = [500] * download.ATTEMPTS
    assert prepare_model(model()).revision == COMMIT  # it can be served


def test_download_files_that_are_not_read_are_not_missed(hub, cache):
    write_snapshot(cache, files={name: FILES[name] for name in READ})
    list_files(cache, FILES)
    assert prepare_model(model()).revision == COMMIT
    assert not hub.requests


def test_download_fetches_weights_last(hub):
    hub.repositories["org/model"].absent = ("tokenizer.json",)
    with pytest.raises(CheckpointError, match="lists a file"):
        prepare_model(model())
    assert "model.safetensors" not in hub.downloads()


def test_fetch_model_directory_of_the_same_name_is_not_taken_for_the_model(hub, tmp_path):
    prepared = prepare_model(model())
    elsewhere = msgspec.structs.replace(prepared, download_dir=str(tmp_path / "node"))
    (tmp_path / "org" / "model").mkdir(parents=True)
    fetch_model(elsewhere, timeout=1, with_weights=True)
    assert (checkpoint_dir(elsewhere) / "model.safetensors").is_file()


def test_download_replaces_links_that_lead_nowhere(hub, cache):
    write_snapshot(cache, missing=("model.safetensors",))
    directory = checkpoint_dir(prepare_model(model()))
    assert (directory / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert hub.downloads() == {"model.safetensors"}


def test_download_connection_that_breaks_goes_on_with_a_range(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100)
    hub.repositories["org/model"].files["model.safetensors"] = data = bytes(range(256)) * 8
    hub.cuts = {"model.safetensors": 1000}
    assert (checkpoint_dir(prepare_model(model())) / "model.safetensors").read_bytes() == data
    assert hub.ranges == ["bytes=1000-"]


def test_download_removes_files_of_killed_downloads_alone(hub, cache):
    repo = CachedRepo(cache, "org/model")
    names = ["aa.0123abcd.incomplete", "bb.0123abcd.incomplete", "cc.0123abcd.incomplete", "dd.incomplete", "ee"]
    (repo.path / "blobs").mkdir(parents=True)
    for name in names:
        (repo.path / "blobs" / name).write_bytes(b"part")
    repo.lock_file.with_name("cc.lock").mkdir(parents=True)  # cannot be opened, as one of another user
    with file_lock(repo.lock_file.with_name("bb.lock"), timeout=0, purpose="another download"):
        prepare_model(model())
    assert [name for name in names if (repo.path / "blobs" / name).exists()] == names[1:]


def test_download_fewer_files_with_ignore_patterns_and_without_weights(hub):
    files = hub.repositories["org/model"].files
    for name in ("extra.json", "chat_template.jinja", "original/params.json", "1_Pooling/config.json"):
        files[name] = name.encode()  # equal files are fetched once
    prepared = prepare_model(model(load_format="dummy", ignore_patterns=["extra*"]))
    found = {str(path.relative_to(checkpoint_dir(prepared))) for path in checkpoint_dir(prepared).rglob("*.j*")}
    assert found == {"config.json", "tokenizer.json", "chat_template.jinja", "1_Pooling/config.json"}
    assert hub.downloads() == found


@pytest.mark.parametrize("given", ["option", "environment"])
def test_download_gated_model_needs_a_token(given, hub, monkeypatch):
    hub.repositories["org/model"].token = "hf_secret"
    with pytest.raises(CheckpointError) as caught:
        prepare_model(model())
    message = str(caught.value)
    assert "is gated, and no token was sent" in message
    assert f"{hub.url}/org/model" in message and "HF_TOKEN" in message
    if given == "option":
        prepared = prepare_model(model(hf_token="hf_secret"))
    else:
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        prepared = prepare_model(model())
    assert prepared.revision == COMMIT


def test_download_token_without_access_is_not_shown(hub):
    hub.repositories["org/model"].token = "hf_secret"
    with pytest.raises(CheckpointError, match="the token that was sent has no access") as caught:
        prepare_model(model(hf_token="hf_wrong"))
    assert "hf_wrong" not in str(caught.value)


def test_download_invalid_token_is_named(hub):
    with pytest.raises(CheckpointError, match="refused the token"):
        prepare_model(model(hf_token="hf_invalid"))


def test_download_token_that_no_header_can_hold_is_named(hub):
    with pytest.raises(CheckpointError, match="the token has characters that are not allowed in a token"):
        prepare_model(model(hf_token="hf_tökén"))


def test_download_listed_file_that_is_absent_ends_the_download(hub, cache):
    hub.repositories["org/model"].absent = ("config.json",)
    with pytest.raises(CheckpointError, match="lists a file that it does not have"):
        prepare_model(model())
    hub.repositories["org/model"].absent = ()
    assert prepare_model(model()).revision == COMMIT


def test_download_unknown_id_says_where_it_looked(hub, cache):
    write_snapshot(cache, "org/modle")
    with pytest.raises(CheckpointError) as caught:
        prepare_model(model("org/mode"))
    message = str(caught.value)
    assert "was not found" in message and str(cache) in message and hub.url in message
    assert "org/modle" in message


def test_download_unknown_revision_is_named(hub):
    with pytest.raises(CheckpointError, match="no revision 'v9' of it"):
        prepare_model(model(revision="v9"))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config.json": CONFIG, "pytorch_model.bin": b""}, r"only PyTorch's \*\.bin files.*convert them"),
        ({"model-Q4.gguf": b""}, "GGUF files are not read; take the repository"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b""}, "it is an adapter; serve its base model"),
        ({"config.json": CONFIG}, r"no \*\.safetensors files"),
        ({"README.md": b""}, "no config.json"),
    ],
)
def test_download_repository_without_readable_weights_says_what_helps(files, expected, hub):
    hub.repositories["org/model"].files = files
    with pytest.raises(CheckpointError, match=expected):
        prepare_model(model())
    assert not hub.downloads()


@pytest.mark.parametrize(
    "name", ["../../../outside.json", "/etc/outside.json", "a/../../outside.json", "..\\outside.json", "C:outside.json"]
)
def test_download_hostile_file_names_write_nothing(name, hub, cache, tmp_path):
    hub.repositories["org/model"].files[name] = b"{}"
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="could be written outside of its directory: nothing was written"):
        prepare_model(model())
    assert sorted(tmp_path.rglob("*")) == before


def test_download_hostile_commit_is_refused(hub):
    hub.repositories["org/model"].commits["main"] = "../../../outside"
    with pytest.raises(CheckpointError, match="named no commit"):
        prepare_model(model())


def test_download_full_disk_is_noticed_before_a_byte_is_fetched(hub, cache, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda path: usage(2**40, 2**40 - 2**30, 2**30))
    hub.repositories["org/model"].sizes["model.safetensors"] = 3 * 2**30
    with pytest.raises(CheckpointError) as caught:
        prepare_model(model())
    message = str(caught.value)
    assert "3.00 GiB are needed, but 1.00 GiB are free" in message
    assert str(cache) in message and "--download-dir" in message
    assert not hub.downloads()


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, "is too full: No space left on device"),
        (errno.EFBIG, "may write: raise the limit of `ulimit -f`"),
        (errno.EROFS, "cannot write to .*: Read-only file system"),
    ],
)
def test_download_disk_that_fails_in_the_middle_is_not_taken_for_the_hub(number, expected, hub, cache, monkeypatch):
    def fail(*arguments, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("huggingface_hub.file_download.http_get", fail)
    with pytest.raises(CheckpointError, match=expected) as caught:
        prepare_model(model())
    assert str(cache) in str(caught.value) and "--download-dir" in str(caught.value)


def test_download_file_that_another_program_has_locked_has_a_deadline(hub, tmp_path):
    prepared = msgspec.structs.replace(prepare_model(model()), download_dir=str(tmp_path / "node"))
    blob = hashlib.sha256(FILES["model.safetensors"]).hexdigest()
    lock = CachedRepo(tmp_path / "node", "org/model").lock_file.with_name(f"{blob}.lock")
    expected = "downloading org/model: nothing has arrived for 0 s: another program may hold the lock"
    with (
        file_lock(lock, timeout=0, purpose="another program"),
        pytest.raises(DeadlineExceeded, match=expected),
    ):
        fetch_model(prepared, timeout=0.2, with_weights=True)
    fetch_model(prepared, timeout=10, with_weights=True)
    assert (checkpoint_dir(prepared) / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_download_cache_without_locks_is_named(hub, cache, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("eagleray.hub.file_lock.fcntl.flock", fail)
    with pytest.raises(CheckpointError, match=r"files cannot be locked there .*choose another cache"):
        prepare_model(model())


def test_download_cache_that_cannot_be_written_is_named(hub, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write to .*--download-dir"):
        prepare_model(model(download_dir=str(tmp_path / "file")))


def test_download_unreachable_endpoint_names_it(hub, cache, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("HF_ENDPOINT", url)
    with pytest.raises(CheckpointError) as caught:
        prepare_model(model())
    message = str(caught.value)
    assert f"{url} cannot be reached" in message and str(cache) in message and "HF_ENDPOINT" in message


def test_download_endpoint_that_does_not_answer_is_given_up(cache, monkeypatch):
    monkeypatch.setattr(download, "INFO_TIMEOUT_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(CheckpointError, match=r"cannot be reached .*Timeout"):
            prepare_model(model())
    from huggingface_hub import close_session

    close_session()


def test_download_busy_hub_is_asked_again(hub):
    hub.failures = [503, 429]
    assert prepare_model(model()).revision == COMMIT


def test_download_failing_hub_is_given_up_with_its_status(hub):
    hub.failures = [500] * download.ATTEMPTS
    with pytest.raises(CheckpointError, match="answered with status 500"):
        prepare_model(model())


def test_fetch_model_other_node_fetches_the_pinned_commit(hub, tmp_path):
    prepared = prepare_model(model())
    hub.repositories["org/model"].commits["main"] = "c" * 40  # moved on since
    hub.repositories["org/model"].commits["old"] = COMMIT
    elsewhere = msgspec.structs.replace(prepared, download_dir=str(tmp_path / "node"))
    fetch_model(elsewhere, timeout=10, with_weights=False)
    assert {path.name for path in checkpoint_dir(elsewhere).iterdir()} == {"config.json", "tokenizer.json"}
    fetch_model(elsewhere, timeout=10, with_weights=True)
    assert (checkpoint_dir(elsewhere) / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_fetch_model_outage_of_the_hub_is_waited_for(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "FIRST_PAUSE_SECONDS", 0.01)
    prepared = prepare_model(model())
    elsewhere = msgspec.structs.replace(prepared, download_dir=str(tmp_path / "node"))
    hub.failures = [503] * 2 * download.ATTEMPTS
    fetch_model(elsewhere, timeout=10, with_weights=True)
    assert not hub.failures
    again = msgspec.structs.replace(prepared, download_dir=str(tmp_path / "other"))
    hub.failures = [503] * download.ATTEMPTS
    with pytest.raises(CheckpointError, match="answered with status 503"):
        fetch_model(again, timeout=0, with_weights=True)


def test_fetch_model_processes_of_a_node_download_once(hub, tmp_path):
    prepared = prepare_model(model())
    elsewhere = msgspec.structs.replace(prepared, download_dir=str(tmp_path / "node"))
    hub.requests.clear()
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(fetch_model, elsewhere, timeout=30, with_weights=True) for _ in range(4)]
    assert [call.result() for call in calls] == [None] * 4
    assert hub.requests[f"GET /org/model/resolve/{COMMIT}/model.safetensors"] == 1


def test_file_lock_that_is_held_is_a_named_deadline(cache):
    repo = CachedRepo(cache, "org/model")
    options = HubOptions(cache)
    with (
        file_lock(repo.lock_file, timeout=options.lock_timeout, purpose="first"),
        pytest.raises(DeadlineExceeded, match=r"second: another process has held .*eagleray\.lock for 0 s"),
        file_lock(repo.lock_file, timeout=0.0, purpose="second"),
    ):
        pass
