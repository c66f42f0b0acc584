"""Parameters of requests."""

from __future__ import annotations

from eagleray.messages.sampling import RepetitionDetectionParams, RequestOutputKind, SamplingParams
from eagleray.messages.structured_outputs import StructuredOutputsParams

__all__ = ["RepetitionDetectionParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
