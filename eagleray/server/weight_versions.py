"""The versions of the weights that made each token, as answers show them. Pure."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from eagleray.client.outputs import CompletionDelta, CompletionOutput, WeightVersionSpan
from eagleray.client.weight_versions import FIRST_VERSION

WeightVersionsField = (
    Annotated[
        list[WeightVersionSpan],
        Meta(description="Versions of the weights that made the tokens of the completion, from `start` to `end` - 1."),
    ]
    | UnsetType
)
"""Type of a choice's field; in a stream, only the last event of a choice has it."""


def weight_versions(part: CompletionDelta | CompletionOutput) -> list[WeightVersionSpan] | UnsetType:
    """Return the versions of a whole completion or of a last delta; UNSET if all tokens come from the weights of the
    checkpoint, so that answers of OpenAI's API have no field of which their users need nothing."""
    spans = part.weight_versions
    return UNSET if not spans or all(span.version == FIRST_VERSION for span in spans) else spans
