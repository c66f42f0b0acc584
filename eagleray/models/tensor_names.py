"""The choice of the tensors that a rank reads from a checkpoint, by their names. Pure."""

from __future__ import annotations

import re
from fractions import Fraction

from eagleray.models.moe.layout import ExpertLayout
from eagleray.models.spec import ModelSpec
from eagleray.models.weights import LAYER
from eagleray.parallel.mesh import Mesh

EXPERT = re.compile(r"model\.layers\.(\d{1,9})\..*\.experts\.(\d{1,9})\.")
STACKED_EXPERTS = re.compile(r"model\.layers\.(\d{1,9})\..*\.experts\.(?!\d)")
"""Matches a tensor that holds all experts of a layer."""
SHARED_EXPERTS = ".shared_experts."


def is_elsewhere(name: str, spec: ModelSpec, mesh: Mesh, experts: ExpertLayout | None) -> bool:
    """Whether other ranks have this tensor and this rank has no part of it."""
    if (match := EXPERT.match(name)) is not None and experts is not None and int(match[1]) in experts.layers:
        index, expert = int(match[1]), int(match[2])
        return expert < experts.num_experts and not experts.has_expert(index, expert)
    if (match := LAYER.match(name)) is not None:
        index = int(match[1])
        return index < spec.num_layers and index not in mesh.layers(spec.num_layers)
    if name == "model.embed_tokens.weight":
        return not (mesh.is_first_stage or (mesh.is_last_stage and spec.tie_embeddings))
    return name in ("model.norm.weight", "lm_head.weight") and not mesh.is_last_stage


def is_read_whole(name: str, experts: ExpertLayout | None) -> bool:
    """Whether this rank reads all that it wants of the tensor by itself; of most tensors each tensor-parallel rank
    reads a part."""
    if experts is None:
        return False
    if STACKED_EXPERTS.match(name) is not None:
        return True
    if not experts.is_divided:
        return False
    return EXPERT.match(name) is not None or (experts.dispatcher is not None and SHARED_EXPERTS in name)


def parts_wanted(name: str, experts: ExpertLayout | None) -> Fraction:
    """Return the part that this rank reads of a tensor that holds all experts; of any other tensor, 1."""
    match = STACKED_EXPERTS.match(name)
    if match is None or experts is None or not experts.is_divided or int(match[1]) not in experts.layers:
        return Fraction(1)
    slots = experts.slots(int(match[1]))
    assert slots is not None
    return Fraction(len(set(slots.local_experts)), experts.num_experts)


def is_not_a_weight(name: str, spec: ModelSpec) -> bool:
    """Whether no layer needs the tensor: old checkpoints hold computed tables, some with tied embeddings hold the tied
    weight twice, and some hold draft layers, which are left out."""
    if (match := LAYER.match(name)) is not None and int(match[1]) >= spec.num_layers:
        return int(match[1]) < spec.num_layers + spec.num_draft_layers
    return name.endswith("rotary_emb.inv_freq") or (spec.tie_embeddings and name == "lm_head.weight")
