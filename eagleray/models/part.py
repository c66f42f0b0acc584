"""The part of a model that a rank has, as its layers need it when they are made."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eagleray.kernels.backend import KernelBackend
from eagleray.models.spec import ModelSpec
from eagleray.models.stored_weights import WeightRules
from eagleray.parallel.group import TensorParallelGroup
from eagleray.parallel.groups import Groups
from eagleray.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelPart:
    spec: ModelSpec
    """The geometry of the whole model."""
    groups: Groups
    kernels: KernelBackend
    rules: WeightRules
    """The forms in which its weights are kept."""

    @property
    def dtype(self) -> torch.dtype:
        return self.rules.dtype

    @property
    def device(self) -> torch.device:
        return self.rules.device

    @property
    def mesh(self) -> Mesh:
        return self.groups.mesh

    @property
    def tp(self) -> TensorParallelGroup:
        return self.groups.tp
