from __future__ import annotations

import pytest

from eagleray.config.build import build_config
from eagleray.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allowed_origins": ["page.example"]}, "an origin is a scheme and a host"),
        ({"allowed_origins": ["https://page.example/path"]}, "an origin is a scheme and a host"),
        ({"allowed_origins": '["https://page.example"'}, "expected a JSON list of texts"),
        ({"allowed_origins": ["[3]"]}, "expected a JSON list of texts"),
        ({"root_path": "llm"}, "begins with a slash"),
    ],
)
def test_build_config_wrong_http_option_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        build_config(**options)


@pytest.mark.parametrize(
    "given",
    [
        '["https://a.example", "*"]',
        ['["https://a.example", "*"]'],
        ["https://a.example", "*"],
    ],
)
def test_build_config_list_of_origins_may_be_json(given):
    assert build_config(allowed_origins=given).serving.allowed_origins == ["https://a.example", "*"]


def test_url_prefix_has_no_last_slash():
    assert [build_config(root_path=path).serving.url_prefix for path in ("", "/", "/a/b/", "/a")] == [
        "",
        "",
        "/a/b",
        "/a",
    ]
