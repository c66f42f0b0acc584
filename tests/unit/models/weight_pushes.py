"""Pushes of a checkpoint's tensors into a model, and the memory of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from model_runs import load
from safetensors.torch import load_file
from torch import Tensor

from eagleray.models.base import Model
from eagleray.parallel.expert_group import ExpertGroup
from eagleray.parallel.groups import Groups
from eagleray.parallel.mesh import Mesh

Pushes = Sequence[tuple[str, Tensor]]


class LoadingGroup:
    """A group that only loads and never computes."""

    def __init__(self, mesh: Mesh) -> None:
        self.rank, self.size = mesh.tp_rank, mesh.tp_size
        self.bytes_sent: dict[str, int] = {}

    def close(self) -> None:
        pass


def load_rank(checkpoint: Path, mesh: Mesh, **options: object) -> Model:
    """Load one rank's part of a model, alone."""
    tp = LoadingGroup(mesh)
    return load(checkpoint, groups=Groups(mesh, tp, None, ExpertGroup(tp)), **options)  # type: ignore[arg-type]


def tensors_of(checkpoint: Path) -> list[tuple[str, Tensor]]:
    return list(load_file(checkpoint / "model.safetensors").items())


def memory_of_weights(model: Model) -> list[Tensor]:
    """Return the memory of all weights, of every copy of an expert."""
    return [part for group in model.weight_groups() for place in group.places() for part in place]


def copy_of_weights(model: Model) -> list[Tensor]:
    return [part.clone() for part in memory_of_weights(model)]


def have_equal_bytes(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
