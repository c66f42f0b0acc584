"""The answers of the routes of pooling models."""

from __future__ import annotations

import base64
import sys
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from eagleray.messages.arrays import Array
from eagleray.server.http_responses import ENCODER

Data = TypeVar("Data")

Vector = Annotated[
    Any,
    Meta(
        description="A list of numbers, or with `encoding_format` base64 a text.",
        extra_json_schema={"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]},
    ),
]


class PoolingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: None = None
    completion_tokens_details: None = None


class PoolingList(msgspec.Struct, Generic[Data], kw_only=True):
    """The answers for the texts of a request, in their order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Data]
    usage: PoolingUsage


class EmbeddingData(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["embedding"] = "embedding"
    embedding: Vector


class EmbeddingResponse(PoolingList[EmbeddingData], kw_only=True):
    pass


class PoolingData(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["pooling"] = "pooling"
    data: Vector


class PoolingResponse(PoolingList[PoolingData], kw_only=True):
    pass


class ClassificationData(msgspec.Struct, kw_only=True):
    index: int
    label: str | None
    """Name of the likeliest class."""
    probs: list[float]
    num_classes: int


class ClassificationResponse(PoolingList[ClassificationData], kw_only=True):
    pass


class ScoreData(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(PoolingList[ScoreData], kw_only=True):
    pass


class RankedDocument(msgspec.Struct, kw_only=True):
    text: str
    multi_modal: None = None


class RerankResult(msgspec.Struct, kw_only=True):
    index: int
    """Index of the document in the request."""
    document: RankedDocument | UnsetType = UNSET
    relevance_score: float


class RerankUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class RerankResponse(msgspec.Struct, kw_only=True):
    id: str
    model: str
    usage: RerankUsage
    results: list[RerankResult]
    """The documents from the most relevant to the least."""


def encode_as_json(vector: Array) -> msgspec.Raw:
    """Return the vector as JSON."""
    return msgspec.Raw(ENCODER.encode(vector.tolist()))


def encode_as_base64(vector: Array, *, dtype_name: str | None, endianness: str | None) -> str:
    """Return the base64 text of the vector's numbers, by default float32 in little-endian order."""
    is_big = endianness == "big" or (endianness == "native" and sys.byteorder == "big")
    dtype = np.dtype(dtype_name or "float32").newbyteorder(">" if is_big else "<")
    return base64.b64encode(vector.astype(dtype).tobytes()).decode()
