"""The token embedding and the head that turns hidden states into logits; tied ones share a weight.

A tensor-parallel rank has the rows of some tokens of the vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from eagleray.models.kernels.reference import Kernels, LinearKernel
from eagleray.models.shares import padded_share
from eagleray.models.spec import ModelSpec
from eagleray.models.weights import Cut, Weights
from eagleray.parallel import Group, Mesh

__all__ = ["Embedding", "Head", "load_embedding_and_head"]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class Embedding:
    """`weight` [num_own, hidden_size]: the rows of the tokens from number `first` on."""

    def __init__(self, weight: Tensor, first: int, tp: Group) -> None:
        self._weight = weight
        self._first = first
        self._tp = tp

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden_size]"""
        if self._tp.size == 1:
            return F.embedding(token_ids, self._weight)
        own = token_ids - self._first
        is_others = (own < 0) | (own >= len(self._weight))
        rows = F.embedding(own.masked_fill_(is_others, 0), self._weight)
        return self._tp.all_reduce(rows.masked_fill_(is_others[:, None], 0))


class Head:
    """`product`: hidden states to the logits of the rank's own tokens, as many on every rank; some, at the end of the
    vocabulary, may be of no token."""

    def __init__(self, product: LinearKernel, vocab_size: int, tp: Group) -> None:
        self._product = product
        self._vocab_size = vocab_size
        self._tp = tp

    def __call__(self, hidden: Tensor) -> Tensor | None:
        """[n, hidden_size] -> float32 [n, vocab_size] on rank 0, None on the others"""
        logits = self._tp.gather(self._product(hidden))
        return None if logits is None else logits[:, : self._vocab_size].float().contiguous()


def load_embedding_and_head(
    spec: ModelSpec, weights: Weights, kernels: Kernels, mesh: Mesh, tp: Group
) -> tuple[Embedding | None, Head | None]:
    """The embedding of the first stage, the head of the last one."""
    own = padded_share(spec.vocab_size, tp)
    embedding = _load_rows(EMBEDDING, spec, weights, own) if mesh.is_first_stage else None
    head = None
    if mesh.is_last_stage and spec.tie_embeddings:
        head = _load_rows(EMBEDDING, spec, weights, own) if embedding is None else embedding
    elif mesh.is_last_stage:
        head = _load_rows(HEAD, spec, weights, own)
    return (
        None if embedding is None else Embedding(embedding, own.start, tp),
        None if head is None else Head(kernels.linear(head, None), spec.vocab_size, tp),
    )


def _load_rows(name: str, spec: ModelSpec, weights: Weights, own: range) -> Tensor:
    """[len(own), hidden_size], zeros where the vocabulary has ended"""
    there = range(min(own.start, spec.vocab_size), min(own.stop, spec.vocab_size))
    rows = weights.take(name, (spec.vocab_size, spec.hidden_size), Cut(0, there))
    return rows if len(there) == len(own) else F.pad(rows, (0, 0, 0, len(own) - len(there)))
