"""Parameters of requests."""

from __future__ import annotations

from typing import Any

from eagleray.errors import InvalidRequest
from eagleray.messages.sampling import RepetitionDetectionParams, RequestOutputKind, SamplingParams

__all__ = ["RepetitionDetectionParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]


class StructuredOutputsParams:
    """A grammar for the output, which is not supported: the constructor raises `InvalidRequest`."""

    def __init__(self, **_: Any) -> None:
        raise InvalidRequest("structured outputs are not supported: leave `structured_outputs` out")
