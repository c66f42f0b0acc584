"""Middleware of users: classes and functions, their order, and names that cannot be used."""

from __future__ import annotations

import pytest
from server_fakes import serving

from eagleray.config.build import build_config
from eagleray.errors import ConfigError
from eagleray.server.user_middleware import with_middleware

MODULE = """
class Outer:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def mark(message):
            if message["type"] == "http.response.start":
                message["headers"].append((b"x-seen", b"outer"))
            await send(message)

        await self.app(scope, receive, mark)


async def inner(request, call_next):
    if request.headers.get("x-stop"):
        from starlette.responses import Response
        return Response("stopped", 418)
    response = await call_next(request)
    response.headers.append("x-seen", "inner")
    return response


class Fails:
    def __init__(self, app):
        raise RuntimeError("because")


number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_middleware.py").write_text(MODULE)
    (tmp_path / "broken_middleware.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)


def test_middleware_is_around_the_server_and_the_last_is_outermost(module, checkpoint):
    with serving(checkpoint) as api:
        api.app = with_middleware(api.app, ["my_middleware.inner", "my_middleware:Outer"])
        assert api.get("/live").headers.get_list("x-seen") == ["inner", "outer"]
        answer = api.get("/live", headers={"X-Stop": "1"})
        assert (answer.status_code, answer.text, answer.headers.get_list("x-seen")) == (418, "stopped", ["outer"])
        events = api.events("/v1/completions", {"prompt": "hello", "max_tokens": 3})
        assert events[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.Thing", "cannot import 'nowhere': ModuleNotFoundError: No module named 'nowhere'"),
        ("broken_middleware.Thing", "cannot import 'broken_middleware': ZeroDivisionError"),
        ("my_middleware.Missing", "there is no 'Missing' in .*my_middleware.py"),
        ("my_middleware.number", "is neither a class nor an async function, but int"),
        ("my_middleware.Fails", r"my_middleware.Fails\(app\) failed: RuntimeError: because"),
        ("plain", "expected a name such as package.module.Name"),
        (":x", "expected a name such as package.module.Name"),
    ],
)
def test_middleware_that_cannot_be_used_is_refused(module, name, message):
    with pytest.raises(ConfigError, match=message):
        with_middleware(lambda *_: None, [name])


def test_middleware_option_is_a_list():
    assert build_config(middleware="a.b").serving.middleware == ["a.b"]
