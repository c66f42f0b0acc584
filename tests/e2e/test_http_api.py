"""Requests as clients of vLLM's HTTP API send them, against a served model."""

from __future__ import annotations

import httpx
import pytest
from checkpoints import make_checkpoint
from serving import serve


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3")
    with serve(str(checkpoint), "--max-model-len", "512") as server:
        yield server
    assert server.process.returncode == 0, server.log


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url.removesuffix("/v1"), timeout=60) as http:
        yield http


def requests_of_every_kind():
    return {
        "/v1/completions": {"prompt": "The quick", "max_tokens": 2},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2},
        "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}},
    }


@pytest.mark.parametrize("path", requests_of_every_kind())
def test_http_api_rank_header_of_a_missing_rank_is_refused(http, path):
    body = requests_of_every_kind()[path]
    assert http.post(path, json=body, headers={"X-data-parallel-rank": "0"}).status_code == 200
    for rank in ("1", "-1", "first", ""):
        response = http.post(path, json=body, headers={"X-data-parallel-rank": rank})
        assert response.status_code == 400, rank
        error = response.json()["error"]
        assert error["param"] == "X-data-parallel-rank"
        assert "rank 0" in error["message"]


def test_http_api_empty_bad_words_are_accepted(http):
    body = {"prompt": "The quick", "max_tokens": 2, "bad_words": [], "stop": [], "stop_token_ids": []}
    assert http.post("/v1/completions", json=body).status_code == 200
