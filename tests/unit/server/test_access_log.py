"""The line of the log for each HTTP request."""

from __future__ import annotations

import logging
import re

import pytest
from server_fakes import serving


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="eagleray.server.access_log")

    def pop():
        found = [record.getMessage() for record in caplog.records if record.name == "eagleray.server.access_log"]
        caplog.clear()
        return found

    return pop


@pytest.mark.parametrize("stream", [False, True])
def test_access_log_shows_tokens_and_id_and_no_prompt(checkpoint, lines, stream):
    with serving(checkpoint) as api:
        body = {"prompt": "a secret text", "max_tokens": 3, "stream": stream}
        api.post("/v1/completions?key=hidden", body, headers={"X-Request-Id": "mine"})
    [line] = lines()
    assert re.fullmatch(r"POST /v1/completions 200 \d+\.\d ms \d+\+3 tokens mine", line)


def test_access_log_record_has_the_values_of_its_line(checkpoint, caplog):
    caplog.set_level(logging.INFO, logger="eagleray.server.access_log")
    with serving(checkpoint) as api:
        api.post("/v1/completions", {"prompt": "text", "max_tokens": 3}, headers={"X-Request-Id": "mine"})
    [record] = (record for record in caplog.records if record.name == "eagleray.server.access_log")
    assert (record.request_id, record.method, record.path, record.status) == ("mine", "POST", "/v1/completions", 200)
    assert f" 200 {record.milliseconds:.1f} ms {record.prompt_tokens}+3 tokens" in record.getMessage()
    assert record.completion_tokens == 3


def test_access_log_shows_errors_and_not_successful_probes(checkpoint, lines):
    with serving(checkpoint) as api:
        api.get("/live")
        api.get("/metrics")
        assert lines() == []
        api.post("/live", {})
        api.get("/no/such/route")
        api.get("/v1/models")
    texts = [" ".join(line.split()[:3]) for line in lines()]
    assert texts == ["POST /live 405", "GET /no/such/route 404", "GET /v1/models 200"]


def test_access_log_is_one_line_of_bounded_length(checkpoint, lines):
    with serving(checkpoint) as api:
        api.get("/a%0Ab%1b[31m")
        api.get("/" + "x" * 5000)
    first, second = lines()
    assert first.isprintable()
    assert len(second) < 300


def test_access_log_named_endpoints_have_no_lines(checkpoint, lines):
    with serving(checkpoint, disable_access_log_for_endpoints="/v1/models, /load/") as api:
        for path in ("/v1/models", "/load", "/server_info"):
            api.get(path)
    assert [line.split()[1] for line in lines()] == ["/server_info"]


def test_access_log_off_has_no_lines(checkpoint, lines):
    with serving(checkpoint, disable_uvicorn_access_log=True) as api:
        api.get("/v1/models")
    assert lines() == []
