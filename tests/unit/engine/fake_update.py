"""A model in memory whose weights can be updated: named tensors, of which some are packed together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from eagleray.errors import WeightsMismatch


class FakeModel:
    """Two weights that are packed together (`q`, `k`), one that another stage has (`far`), and a single one (`up`)."""

    OWN = ("q", "k", "up")
    PACKED = frozenset({"q", "k"})

    def __init__(self, size: int = 4) -> None:
        self.weights = {name: torch.zeros(size) for name in self.OWN}
        self.num_dropped = 0

    def start_update(self, *, in_place: bool) -> FakeUpdate:
        return FakeUpdate(self, in_place)


class FakeUpdate:
    """See `StagedUpdate`."""

    def __init__(self, model: FakeModel, is_in_place: bool) -> None:
        self._model = model
        self._is_in_place = is_in_place
        self.staged: dict[str, Tensor] = {}

    def check(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name not in (*FakeModel.OWN, "far"):
                raise WeightsMismatch(f"the model has no tensor {name!r}")
            if name in self._model.weights and tensor.shape != self._model.weights[name].shape:
                raise WeightsMismatch(f"tensor {name!r} has the shape {list(tensor.shape)}")

    def add(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        names = set()
        for name, tensor in weights:
            names.add(name)
            if name in self._model.weights:
                self.staged[name] = tensor.float().clone()
        if self._is_in_place:
            self.apply()
        return names

    def missing(self) -> list[str]:
        came = FakeModel.PACKED & self.staged.keys()
        return sorted(FakeModel.PACKED - came) if came else []

    def untouched(self) -> list[str]:
        return sorted(self._model.weights.keys() - self.staged.keys())

    def apply(self) -> None:
        for name, tensor in self.staged.items():
            self._model.weights[name].copy_(tensor)

    def drop(self) -> None:
        self.staged.clear()
        self._model.num_dropped += 1
