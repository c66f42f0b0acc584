"""The token embedding and the head that turns hidden states into logits; tied ones share a weight.

A tensor-parallel rank has the rows of some tokens of the vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from eagleray.kernels.backend import KernelBackend, Operation
from eagleray.models.sharding import padded_shard
from eagleray.models.spec import ModelSpec
from eagleray.models.weights import Cut, Weights
from eagleray.parallel.group import TensorParallelGroup
from eagleray.parallel.mesh import Mesh

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class Head:
    """`product`: hidden states to the logits of the rank's own tokens, as many on every rank; some, at the end of the
    vocabulary, may be of no token."""

    def __init__(self, product: Operation, vocab_size: int, tp: TensorParallelGroup) -> None:
        self._product = product
        self._vocab_size = vocab_size
        self._tp = tp

    def __call__(self, hidden: Tensor) -> Tensor | None:
        """[n, hidden_size] -> float32 [n, vocab_size] on rank 0, None on the others"""
        logits = self._tp.gather(self._product(hidden))
        return None if logits is None else logits[:, : self._vocab_size].float().contiguous()


def load_embedding_and_head(
    spec: ModelSpec, weights: Weights, kernels: KernelBackend, mesh: Mesh, tp: TensorParallelGroup
) -> tuple[Operation | None, Head | None]:
    """The embedding of the first stage (token ids to hidden states), the head of the last one."""
    own = padded_shard(spec.vocab_size, tp)
    rows: Operation | None = None
    product: Operation | None = None
    if spec.tie_embeddings and mesh.is_first_stage and mesh.is_last_stage:
        rows, product = kernels.tied_embedding(_load_rows(EMBEDDING, spec, weights, own), own.start)
    elif mesh.is_first_stage:
        rows = kernels.embedding(_load_rows(EMBEDDING, spec, weights, own), own.start)
    if mesh.is_last_stage and product is None:
        product = kernels.linear(_load_rows(EMBEDDING if spec.tie_embeddings else HEAD, spec, weights, own), None)
    return (
        None if rows is None else lambda token_ids: kernels.all_reduce(rows(token_ids), tp),
        None if product is None else Head(product, spec.vocab_size, tp),
    )


def _load_rows(name: str, spec: ModelSpec, weights: Weights, own: range) -> Tensor:
    """[len(own), hidden_size], zeros where the vocabulary has ended"""
    there = range(min(own.start, spec.vocab_size), min(own.stop, spec.vocab_size))
    rows = weights.load(name, (spec.vocab_size, spec.hidden_size), Cut(0, there))
    return rows if len(there) == len(own) else F.pad(rows, (0, 0, 0, len(own) - len(there)))
