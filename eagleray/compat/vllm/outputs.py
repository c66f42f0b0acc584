"""Outputs of requests."""

from eagleray.client.outputs import CompletionOutput, RequestOutput
from eagleray.client.pooling import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
)

ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]

__all__ = [
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
]
