"""Vectors of prompts for users: the parameters that change them, and the outputs in which they come.

Engines report vectors as the model makes them; activation, cut and similarity are computed here. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from eagleray.config.pooling_spec import GENERATES_ONLY, Activation, PoolingSpec
from eagleray.errors import InvalidRequest
from eagleray.messages.arrays import Array
from eagleray.messages.membership import EngineInfo

PoolingTask = Literal["embed", "classify"]

LEAST_NORM = 1e-12
"""Norm below which a vector is divided by this instead, as torch does."""

REMEDIES = {
    "embed": "this is a classifier: start it with `--convert embed`, or ask for classes or scores",
    "classify": "this is an embedding model: ask for embeddings or scores, or serve a checkpoint with a `score` head",
}
"""Advice for a request that the model cannot fulfil, by its task."""


class PoolingParams(msgspec.Struct, kw_only=True):
    """Parameters of a request to a pooling model, with vLLM's names."""

    use_activation: bool | None = None
    """Whether embeddings are normalized, and classes get probabilities. None: as the checkpoint says, else true."""
    dimensions: int | None = None
    """Number of first features of an embedding to keep, for models that were trained for it. None: all."""
    task: PoolingTask | None = None
    """Kind of vector; None: that of the method that is called."""

    def clone(self) -> PoolingParams:
        """Return a copy."""
        return msgspec.structs.replace(self)


class PooledPrompt(NamedTuple):
    """Vector of a prompt, as its engine reported it."""

    vector: Array
    prompt_token_ids: list[int]
    num_cached_tokens: int


@dataclass(slots=True, eq=False)
class PoolingOutput:
    """Vector of a prompt."""

    data: Array
    """float32 [size]"""


@dataclass(slots=True)
class EmbeddingOutput:
    """Embedding of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Number of features."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """Probabilities of the classes of a prompt, or the head's outputs without activation."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """Score of a pair of texts."""

    score: float


Output = TypeVar("Output")


@dataclass(slots=True, kw_only=True)
class PoolingRequestOutput(Generic[Output]):
    """A finished request to a pooling model."""

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    """Token ids of the prompt; of a pair of texts with embeddings of their own, those of both."""
    num_cached_tokens: int = 0
    """Number of prompt tokens that the prefix cache had."""
    finished: bool = True


def check_pooling(params: PoolingParams, engine: EngineInfo, task: PoolingTask) -> PoolingSpec:
    """Return the pooling of the model. Raises `InvalidRequest` if it cannot fulfil a request of this task."""
    spec = engine.pooling
    if spec is None:
        raise InvalidRequest(GENERATES_ONLY, param="model")
    if spec.kind != task:
        raise InvalidRequest(f"the model does not {task}, because {REMEDIES[task]}", param="model")
    if params.task not in (None, task):
        raise InvalidRequest(f"`task` is {params.task!r}, but the call is for {task}: leave it out", param="task")
    if params.dimensions is not None:
        _check_dimensions(params.dimensions, spec, engine.hidden_size)
    return spec


def _check_dimensions(dimensions: int, spec: PoolingSpec, size: int) -> None:
    if not isinstance(dimensions, int) or not 1 <= dimensions <= size or spec.kind != "embed":
        problem = "is for embeddings only" if spec.kind != "embed" else f"must be between 1 and {size}"
        raise InvalidRequest(f"`dimensions` {problem}, but it is {dimensions}", param="dimensions")
    if dimensions == size:
        return
    if not spec.is_matryoshka:
        raise InvalidRequest(
            f"`dimensions` is {dimensions}, but the model was not trained for embeddings of fewer than {size} "
            "dimensions: leave it out, or if it was, set `is_matryoshka` by the option `hf_overrides`",
            param="dimensions",
        )
    if spec.matryoshka_dimensions and dimensions not in spec.matryoshka_dimensions:
        allowed = ", ".join(map(str, spec.matryoshka_dimensions))
        raise InvalidRequest(
            f"`dimensions` must be one of {allowed} with this model, but it is {dimensions}", param="dimensions"
        )


def finish_vector(vector: Array, spec: PoolingSpec, params: PoolingParams) -> Array:
    """Return the vector, float32, with the cut and the activation that the request asks for."""
    activation = spec.activation
    if params.use_activation is not None:
        activation = _own_activation(spec, len(vector)) if params.use_activation else "none"
    return _activate(vector[: params.dimensions], activation)


def _own_activation(spec: PoolingSpec, size: int) -> Activation:
    """Return the activation of a request that asks for one."""
    if spec.kind == "embed":
        return "normalize"
    return spec.activation if spec.activation != "none" else "softmax" if size > 1 else "sigmoid"


def _activate(vector: Array, activation: Activation) -> Array:
    match activation:
        case "normalize":
            made = vector / max(np.linalg.norm(vector), np.float32(LEAST_NORM))
        case "softmax":
            weights = np.exp(vector - vector.max())
            made = weights / weights.sum()
        case "sigmoid":
            made = (np.tanh(vector / np.float32(2)) + np.float32(1)) / np.float32(2)  # never overflows
        case "none":
            made = vector
    return np.asarray(made, dtype=np.float32)


def cosine(one: Array, other: Array) -> float:
    """Return the cosine of the angle between two vectors."""
    norms = np.linalg.norm(one) * np.linalg.norm(other)
    return float(np.dot(one, other) / max(norms, np.float32(LEAST_NORM)))


def match_pairs(num_first: int, num_second: int, names: tuple[str, str]) -> list[tuple[int, int]]:
    """Return the pairs of indices of texts to score: one text with each of several, or each with its counterpart.

    `names`: the fields with the texts. Raises `InvalidRequest` for other numbers.
    """
    for count, name in zip((num_first, num_second), names, strict=True):
        if count == 0:
            raise InvalidRequest(f"`{name}` is empty, but it needs at least one text", param=name)
    if num_first not in (1, num_second):
        raise InvalidRequest(
            f"`{names[0]}` has {num_first} texts and `{names[1]}` has {num_second}: give one text for all, or as many",
            param=names[0],
        )
    return [(0 if num_first == 1 else index, index) for index in range(num_second)]


def check_scorer(spec: PoolingSpec) -> None:
    """Raise `InvalidRequest` for a classifier with several classes, whose outputs are no score."""
    if spec.kind == "classify" and len(spec.labels) != 1:
        raise InvalidRequest(
            f"scores need an embedding model, or a classifier with one label, but this one has {len(spec.labels)}: "
            "ask for classes",
            param="model",
        )


def pair_messages(query: str, document: str) -> Sequence[dict[str, Any]]:
    """Return the conversation by which a chat template makes one prompt of a pair of texts."""
    return [{"role": "query", "content": query}, {"role": "document", "content": document}]
