"""Models that are directories, or in a cache that was laid out by hand, without a hub."""

from __future__ import annotations

import sys

import msgspec
import pytest
from hub_fakes import COMMIT, CONFIG, FILES, OTHER_COMMIT, index_of, write_snapshot

from eagleray.config.resolve import DEMO_MODEL_DIR, served_names
from eagleray.config.sections import ModelConfig
from eagleray.errors import CheckpointError, ConfigError
from eagleray.hub import download
from eagleray.hub.cache import cache_dir, nearest_ids
from eagleray.hub.locate import checkpoint_dir, config_dir, model_root, tokenizer_dir, weight_dir
from eagleray.hub.prepare import fetch_model, prepare_model


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    """Fail a test that would ask a hub."""

    def refuse(*arguments):
        raise AssertionError("a hub was asked")

    monkeypatch.setattr(download, "_list_files", refuse)


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def model(name="org/model", **options):
    return ModelConfig(model=name, **options)


def test_prepare_model_without_a_name_is_the_embedded_one():
    prepared = prepare_model(ModelConfig(revision="main"))
    assert checkpoint_dir(prepared) == DEMO_MODEL_DIR
    assert prepared.revision is None


def test_prepare_model_directory_wins_over_the_cache_and_has_no_revision(tmp_path, cache):
    write_snapshot(cache)
    directory = tmp_path / "org" / "model"
    directory.mkdir(parents=True)
    (directory / "config.json").write_bytes(CONFIG)
    prepared = prepare_model(model(revision="v1", tokenizer_revision="v2", skip_tokenizer_init=True))
    assert checkpoint_dir(prepared).resolve() == directory
    assert prepared.revision is prepared.tokenizer_revision is None
    assert model_root(prepared) == "org/model"


def test_prepare_model_directory_imports_no_hub_library(tmp_path):
    (tmp_path / "config.json").write_bytes(CONFIG)
    loaded = {name for name in sys.modules if name.startswith(("huggingface_hub", "fsspec"))}
    prepare_model(model(str(tmp_path)))
    assert {name for name in sys.modules if name.startswith(("huggingface_hub", "fsspec"))} == loaded


def test_prepare_model_in_the_cache_is_pinned_to_its_commit(cache):
    snapshot = write_snapshot(cache)
    prepared = prepare_model(model())
    assert prepared.revision == COMMIT
    assert checkpoint_dir(prepared) == tokenizer_dir(prepared) == config_dir(prepared) == snapshot
    assert served_names(prepared) == ["org/model"]
    assert model_root(prepared) == "org/model"
    assert weight_dir(prepared, "org/model") == str(snapshot)
    assert weight_dir(prepared, "/other") == "/other"
    assert prepare_model(prepared) == prepared
    fetch_model(prepared, timeout=0, with_weights=True)  # asks no hub


def test_prepare_model_revisions_are_branches_tags_and_commits(cache):
    main = write_snapshot(cache)
    other = write_snapshot(cache, commit=OTHER_COMMIT, revision="refs/pr/1")
    found = [checkpoint_dir(prepare_model(model(revision=name))) for name in (None, "main", "refs/pr/1", OTHER_COMMIT)]
    assert found == [main, main, other, other]


def test_prepare_model_id_without_organization(cache):
    snapshot = write_snapshot(cache, "gpt2")
    assert checkpoint_dir(prepare_model(model("gpt2"))) == snapshot


def test_prepare_model_tokenizer_has_an_id_and_a_revision_of_its_own(cache):
    write_snapshot(cache, files={name: data for name, data in FILES.items() if name != "tokenizer.json"})
    files = {"tokenizer.json": b"{}"}
    tokenizer = write_snapshot(cache, "org/tokens", files=files)
    old = write_snapshot(cache, commit=OTHER_COMMIT, revision="old", files=files)
    assert tokenizer_dir(prepare_model(model(tokenizer="org/tokens"))) == tokenizer
    assert tokenizer_dir(prepare_model(model(tokenizer_revision="old"))) == old


def test_prepare_model_config_of_another_id(cache):
    write_snapshot(cache, files={name: data for name, data in FILES.items() if name != "config.json"})
    config = write_snapshot(cache, "org/config", files={"config.json": CONFIG})
    prepared = prepare_model(model(hf_config_path="org/config"))
    assert config_dir(prepared) == config
    assert prepare_model(prepared) == prepared
    fetch_model(prepared, timeout=0, with_weights=True)


def test_prepare_model_generation_config_that_is_no_directory_is_refused(cache, tmp_path):
    write_snapshot(cache)
    with pytest.raises(ConfigError, match="must be auto, none, or a directory"):
        prepare_model(model(generation_config=str(tmp_path / "none")))


def test_cache_dir_follows_option_and_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    found = [cache_dir("~/given"), cache_dir(None)]
    monkeypatch.delenv("HF_HUB_CACHE")
    found.append(cache_dir(None))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    found.append(cache_dir(None))
    assert found == [
        tmp_path / "given",
        tmp_path / "cache",
        tmp_path / ".cache/huggingface/hub",
        tmp_path / "hf/hub",
    ]


def test_prepare_model_download_dir_is_a_cache(tmp_path):
    snapshot = write_snapshot(tmp_path / "mine")
    assert checkpoint_dir(prepare_model(model(download_dir=str(tmp_path / "mine")))) == snapshot
    assert checkpoint_dir(prepare_model(model(download_dir="mine"))) == snapshot  # absolute, for other processes


@pytest.mark.parametrize(
    ("files", "missing", "named"),
    [
        ({"tokenizer.json": b"{}", "model.safetensors": b"w"}, (), "config.json"),
        ({"config.json": CONFIG, "tokenizer.json": b"{}"}, (), "model.safetensors"),
        (FILES, ("model.safetensors",), "model.safetensors"),
        (FILES, ("tokenizer.json",), "tokenizer.json"),
        (FILES | {"generation_config.json": b"{}"}, ("generation_config.json",), "generation_config.json"),
        (
            {
                "config.json": CONFIG,
                "tokenizer.json": b"{}",
                "model.safetensors.index.json": index_of("model-1.safetensors", "model-2.safetensors"),
                "model-1.safetensors": b"w",
            },
            (),
            "model-2.safetensors",
        ),
    ],
)
def test_prepare_model_offline_incomplete_snapshot_names_file_and_command(files, missing, named, cache, offline):
    snapshot = write_snapshot(cache, files=files, missing=missing)
    with pytest.raises(CheckpointError) as caught:
        prepare_model(model())
    message = str(caught.value)
    assert str(snapshot / named) in message
    assert f"`hf download org/model --cache-dir {cache}`" in message


def test_prepare_model_offline_needs_only_what_is_read(cache, offline):
    write_snapshot(cache, files={"config.json": CONFIG})
    prepared = prepare_model(model(load_format="dummy", skip_tokenizer_init=True))
    assert prepared.revision == COMMIT


def test_prepare_model_offline_unknown_id_says_where_it_looked_and_names_near_ids(cache, offline):
    for name in ("Qwen/Qwen3-0.6B", "other/modle", "zzz/qqq"):
        write_snapshot(cache, name)
    with pytest.raises(CheckpointError) as caught:
        prepare_model(model("Qwen/Qwen3-0.6", revision="v1"))
    message = str(caught.value)
    assert str(cache) in message
    assert "(it has Qwen/Qwen3-0.6B)" in message
    assert "hf download Qwen/Qwen3-0.6 --revision v1" in message
    assert nearest_ids(cache, "mine/Modle") == ["other/modle"]
    assert nearest_ids(cache / "none", "org/model") == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("/no/such/model", "there is no such directory"),
        ("a/b/c", "there is no such directory"),
        ("../up", "there is no such directory"),
        ("org/..", "there is no such directory"),
        ("~nobody-of-this-name/model", "there is no such directory"),
        ("org/a--b", "there is no such directory"),
        ("org/na\0me", "there is no such directory"),
        ("x" * 5000, "there is no such directory"),
        ("model-Q4.gguf", "there is no such file; a GGUF file is given by its path"),
    ],
)
def test_prepare_model_name_that_is_no_id_is_refused(name, expected):
    with pytest.raises(CheckpointError, match=expected):
        prepare_model(model(name))


def test_prepare_model_file_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file; give the directory"):
        prepare_model(model(str(tmp_path / "model.safetensors")))


@pytest.mark.parametrize("revision", ["../../x", "/etc", "a\0b", "", "x" * 500, "a/../b"])
def test_prepare_model_revision_that_leads_elsewhere_is_refused(revision, cache, offline):
    write_snapshot(cache)
    if not revision:
        assert prepare_model(model(revision="")).revision == COMMIT
        return
    with pytest.raises(CheckpointError, match="not a branch, a tag or a commit"):
        prepare_model(model(revision=revision))


def test_find_commit_ref_without_a_commit_is_unknown(cache, offline):
    snapshot = write_snapshot(cache)
    (snapshot.parent.parent / "refs" / "main").write_text("../../../etc")
    with pytest.raises(CheckpointError, match="has no revision 'main'"):
        prepare_model(model())


def test_checkpoint_dir_pinned_commit_that_is_not_on_this_host_is_an_error(cache):
    prepared = msgspec.structs.replace(model(), revision=COMMIT)
    with pytest.raises(CheckpointError, match="there is no such directory"):
        checkpoint_dir(prepared)
