"""The token embedding, and the head that turns hidden states into logits; if they are tied they share a weight.

A tensor-parallel rank has the weight's rows of some tokens of the vocabulary.
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


def load_embedding_and_head(
    spec: ModelSpec, weights: Weights, kernels: KernelBackend, mesh: Mesh, tp: TensorParallelGroup
) -> tuple[Operation | None, Operation | None]:
    """Return the embedding if this is the first stage, and the head if it is the last.

    The embedding maps token ids to hidden states. The head maps hidden states to the logits of this rank's tokens.
    These are equally many on every rank, so the last ones may be padding beyond the vocabulary.
    """
    own = padded_shard(spec.vocab_size, tp)
    embedding: Operation | None = None
    head: Operation | None = None
    if spec.tie_embeddings and mesh.is_first_stage and mesh.is_last_stage:
        embedding, head = kernels.tied_embedding(_load_rows(EMBEDDING, spec, weights, own), own.start)
    elif mesh.is_first_stage:
        embedding = kernels.embedding(_load_rows(EMBEDDING, spec, weights, own), own.start)
    if mesh.is_last_stage and head is None:
        head = kernels.linear(_load_rows(EMBEDDING if spec.tie_embeddings else HEAD, spec, weights, own), None)
    return None if embedding is None else lambda token_ids: kernels.all_reduce(embedding(token_ids), tp), head


def _load_rows(name: str, spec: ModelSpec, weights: Weights, own: range) -> Tensor:
    """Load the weight's rows [len(own), hidden_size]; those beyond the vocabulary are zeros."""
    present = range(min(own.start, spec.vocab_size), min(own.stop, spec.vocab_size))
    rows = weights.load(name, (spec.vocab_size, spec.hidden_size), Cut(0, present))
    return rows if len(present) == len(own) else F.pad(rows, (0, 0, 0, len(own) - len(present)))
