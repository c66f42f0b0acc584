from __future__ import annotations

import importlib.util

import pytest

from eagleray.config.build import build_config
from eagleray.config.traces import TRACES_PROTOCOL
from eagleray.errors import ConfigError

ENDPOINT = "http://localhost:4318/v1/traces"


@pytest.mark.parametrize(
    ("protocol", "endpoint", "message"),
    [
        ("http/json", ENDPOINT, f"variable {TRACES_PROTOCOL} must be grpc or http/protobuf, but it is 'http/json'"),
        ("http/protobuf", "localhost:4318", "expected a URL such as http://localhost:4318/v1/traces, not"),
    ],
)
def test_build_config_traces_that_cannot_be_sent_are_refused(monkeypatch, protocol, endpoint, message):
    monkeypatch.setenv(TRACES_PROTOCOL, protocol)
    with pytest.raises(ConfigError, match=message):
        build_config(otlp_traces_endpoint=endpoint)


@pytest.mark.parametrize("missing", ["opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc"])
def test_build_config_traces_without_package_says_what_to_install(monkeypatch, missing):
    def find(package):
        if package.startswith("opentelemetry.exporter") and missing.startswith("opentelemetry.exporter"):
            raise ModuleNotFoundError("No module named 'opentelemetry.exporter'")
        return None if package == missing else object()

    monkeypatch.delenv(TRACES_PROTOCOL, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", find)
    with pytest.raises(ConfigError, match="needs OpenTelemetry: pip install opentelemetry-sdk opentelemetry-exp"):
        build_config(otlp_traces_endpoint="http://localhost:4317")
    assert build_config(otlp_traces_endpoint="").observability.otlp_traces_endpoint == ""
