from __future__ import annotations

import pytest

from eagleray.config.build import build_config
from eagleray.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ssl_keyfile": "k"}, "`ssl_keyfile` is for HTTPS: add `ssl_certfile`"),
        ({"enable_ssl_refresh": True}, "`enable_ssl_refresh` is for HTTPS"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 2}, "add `ssl_ca_certs`"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 3}, "option `ssl_cert_reqs`: expected `int` <= 2"),
        ({"allowed_origins": ["page.example"]}, "an origin is a scheme and a host"),
        ({"allowed_origins": ["https://page.example/path"]}, "an origin is a scheme and a host"),
        ({"allowed_origins": '["https://page.example"'}, "expected a JSON list of texts"),
        ({"allowed_origins": ["[3]"]}, "expected a JSON list of texts"),
        ({"root_path": "llm"}, "begins with a slash"),
        ({"uds_mode": "660"}, "add `uds`"),
        ({"uds": "/tmp/s", "uds_mode": "rw"}, "option `uds_mode`"),
        ({"uds": "/tmp/" + "s" * 110}, "at most 107 bytes, but this one has 115"),
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
