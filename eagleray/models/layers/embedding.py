"""The token embedding and the head that turns hidden states into logits; tied ones share a weight."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from eagleray.models.kernels.reference import Kernels, LinearKernel
from eagleray.models.spec import ModelSpec
from eagleray.models.weights import Weights

__all__ = ["Embedding", "load_embedding_and_head"]


class Embedding:
    def __init__(self, weight: Tensor) -> None:
        self._weight = weight  # [vocab_size, hidden_size]

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden_size]"""
        return F.embedding(token_ids, self._weight)


def load_embedding_and_head(spec: ModelSpec, weights: Weights, kernels: Kernels) -> tuple[Embedding, LinearKernel]:
    shape = (spec.vocab_size, spec.hidden_size)
    embedding = weights.take("model.embed_tokens.weight", shape)
    head = embedding if spec.tie_embeddings else weights.take("lm_head.weight", shape)
    return Embedding(embedding), kernels.linear(head, None)
