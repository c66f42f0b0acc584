"""`eagleray serve` with HTTPS at a Unix socket, behind a root path, for pages of another origin."""

from __future__ import annotations

import ssl
import tempfile
import time
from pathlib import Path

import httpx
import openai
import pytest
from certificates import install, make_pairs
from serving import END_SECONDS, READY_SECONDS, serve

PAGE = "https://page.example"
CHAT = {"model": "eagleray-demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}


@pytest.fixture
def directory():
    """A directory whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="er-") as directory:
        yield Path(directory)


def open_http(directory: Path, name: str) -> httpx.Client:
    """Return a client that trusts the certificate of this name alone."""
    context = ssl.create_default_context(cafile=directory / f"{name}.pem")
    return httpx.Client(
        transport=httpx.HTTPTransport(uds=str(directory / "s"), verify=context),
        base_url="https://localhost/llm",
        timeout=READY_SECONDS,
    )


def wait_for_certificate(directory: Path, name: str) -> None:
    """Wait until a dozen new connections in a row, over all API servers, get this certificate."""
    deadline, num_in_a_row = time.monotonic() + END_SECONDS, 0
    while num_in_a_row < 12:
        assert time.monotonic() < deadline, "the changed certificate is not used by every API server"
        try:
            with open_http(directory, name) as http:
                num_in_a_row = num_in_a_row + 1 if http.get("/live").status_code == 200 else 0
        except httpx.ConnectError:
            num_in_a_row = 0
            time.sleep(0.1)


def test_serve_https_at_a_unix_socket_with_certificates_that_change(directory):
    make_pairs(directory, "ab")
    install(directory, "a", directory)
    options = ["--uds", str(directory / "s"), "--uds-mode", "600", "--root-path", "/llm", "--api-server-count", "2"]
    options += ["--ssl-certfile", str(directory / "used.pem"), "--ssl-keyfile", str(directory / "used.key")]
    options += ["--enable-ssl-refresh", "--allowed-origins", f'["{PAGE}"]', "--api-key", "secret"]
    with serve(*options) as server, open_http(directory, "a") as http:
        assert server.url == "https://localhost/llm/v1"
        client = openai.OpenAI(base_url="https://localhost/llm/v1", api_key="secret", http_client=http)
        *_, last = client.chat.completions.create(**CHAT, stream=True)
        assert last.choices[0].finish_reason == "length"
        preflight = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        assert http.options("/v1/chat/completions", headers=preflight).status_code == 200
        refused = http.get("/v1/models", headers={"Origin": PAGE})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)

        install(directory, "b", directory)
        wait_for_certificate(directory, "b")
        assert client.models.list().data[0].id == "eagleray-demo", "the open connection goes on"
        assert server.end() == 0
        assert not (directory / "s").exists()
