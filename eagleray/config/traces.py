"""The protocol of traces, and the check that its packages are there. Nothing here imports them."""

from __future__ import annotations

import importlib.util
import os

from eagleray.config.observability import ObservabilityConfig
from eagleray.errors import ConfigError

TRACES_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
"""Variable of OpenTelemetry that names the protocol of `otlp_traces_endpoint`."""

TRACES_PACKAGES = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http",
}
"""The protocols, and the package that sends traces by each."""


def traces_protocol() -> str:
    """Return the protocol that the environment names; gRPC by default, as in vLLM."""
    return os.environ.get(TRACES_PROTOCOL) or "grpc"


def check_traces(options: ObservabilityConfig) -> None:
    """Raise `ConfigError` for an option of traces that cannot be used."""
    endpoint, protocol = options.otlp_traces_endpoint, traces_protocol()
    if not endpoint:
        return
    if protocol not in TRACES_PACKAGES:
        raise ConfigError(f"variable {TRACES_PROTOCOL} must be {' or '.join(TRACES_PACKAGES)}, but it is {protocol!r}")
    if protocol == "http/protobuf" and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"option `otlp_traces_endpoint`: expected a URL such as http://localhost:4318/v1/traces, not {endpoint!r}"
        )
    if not (_is_installed("opentelemetry.sdk") and _is_installed(TRACES_PACKAGES[protocol])):
        raise ConfigError(
            "option `otlp_traces_endpoint` needs OpenTelemetry: pip install opentelemetry-sdk "
            "opentelemetry-exporter-otlp"
        )


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:  # a package that contains it is missing
        return False
