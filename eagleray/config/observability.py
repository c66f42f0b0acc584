"""The section of the configuration for logs, metrics and traces."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class ObservabilityConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Logs, metrics and traces of all processes."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severe message that is logged.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json", "none"],
        Meta(
            description="Form of the log: text, json (one object per line, see docs/serving.md), or none, which leaves "
            "messages to the handlers of Python's root logger."
        ),
    ] = "text"
    log_config_file: Annotated[
        str | None,
        Meta(
            description="JSON file for Python's logging.config.dictConfig, which takes the place of `log_format` in "
            "every process, see docs/serving.md; or the JSON object itself."
        ),
    ] = None
    enable_log_requests: Annotated[
        bool,
        Meta(
            description="Log each request when it comes: id, path, number of prompt tokens and parameters; at the log "
            "level debug its prompt too."
        ),
    ] = False
    enable_log_outputs: Annotated[
        bool, Meta(description="Log each completion at its end, with its text. Needs `enable_log_requests`.")
    ] = False
    max_log_len: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Most characters, or token ids, of a prompt or an output that are logged. Default: all."),
    ] = None
    disable_log_stats: Annotated[
        bool, Meta(description="Log no line of statistics every ten seconds while a server has work.")
    ] = False
    enable_vllm_metrics: Annotated[
        bool,
        Meta(description="Show metrics that vLLM has too under its names (`vllm:…`) as well, for its dashboards."),
    ] = False
    otlp_traces_endpoint: Annotated[
        str | None,
        Meta(
            description="URL of an OpenTelemetry collector that gets a span for each request; needs the extra `otel`. "
            "The variable OTEL_EXPORTER_OTLP_TRACES_PROTOCOL names the protocol: grpc (default) or http/protobuf."
        ),
    ] = None
