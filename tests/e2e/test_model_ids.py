"""A model that is served by its id, from a cache of Hugging Face and without a hub."""

from __future__ import annotations

import subprocess
import sys

import httpx
import pytest
from checkpoints import make_checkpoint
from serving import serve

from eagleray import LLM, SamplingParams

COMMIT = "a" * 40
MODEL_ID = "org/tiny"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache with one model, which the environment names; it forbids downloads."""
    directory = tmp_path_factory.mktemp("cache")
    repo = directory / "models--org--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    snapshot = repo / "snapshots" / COMMIT
    snapshot.parent.mkdir()
    make_checkpoint(snapshot, "llama")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_HUB_CACHE", str(directory))
        environment.setenv("HF_HUB_OFFLINE", "1")
        yield directory


def test_serve_id_from_the_cache_with_overrides(cache):
    overrides = ("--hf-overrides", '{"max_position_embeddings": 77}', "--override-generation-config", '{"top_k": 1}')
    with serve(MODEL_ID, "--hf-token", "hf_not_to_be_shown", *overrides) as server:
        (card,) = httpx.get(f"{server.url}/models").json()["data"]
        assert (card["id"], card["root"], card["max_model_len"]) == (MODEL_ID, MODEL_ID, 77)
        body = {"model": MODEL_ID, "prompt": "Hello", "max_tokens": 5}
        texts = {httpx.post(f"{server.url}/completions", json=body).json()["choices"][0]["text"] for _ in range(3)}
        assert len(texts) == 1  # of one candidate each
        info = httpx.get(f"{server.url.removesuffix('/v1')}/server_info").text
        assert "hf_not_to_be_shown" not in info + server.log
    with LLM(MODEL_ID, num_threads=1) as llm:
        (output,) = llm.generate("Hello", SamplingParams(max_tokens=5, top_k=1), use_tqdm=False)
        assert {output.outputs[0].text} == texts
        llm.sleep(level=2)  # drops the weights
        llm.wake_up()  # reads them again
        (again,) = llm.generate("Hello", SamplingParams(max_tokens=5, top_k=1), use_tqdm=False)
        assert again.outputs[0].text == output.outputs[0].text


def test_serve_id_that_is_nowhere_is_one_sentence(cache):
    command = [sys.executable, "-m", "eagleray.cli.main", "serve", "org/tyni"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.startswith("eagleray: error: model 'org/tyni': there is no such directory")
    assert str(cache) in ended.stderr and "(it has org/tiny)" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
