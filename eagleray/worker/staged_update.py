"""Interface of an update of the weights at one rank, which the model makes, and checks of its directory and tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eagleray.errors import NotFound
from eagleray.weights.disk import directory_fingerprint
from eagleray.weights.tensors import SentTensor


class StagedUpdate(Protocol):
    """The weights of an update at one rank. Made by the model, used by one thread at a time."""

    def check(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raise `WeightsMismatch` unless some rank has a place for tensors of these names, shapes and dtypes. Their
        elements are not read."""
        ...

    def add(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take this rank's shards of whole tensors, which may change after the call. Returns the names that the model
        has. Raises `WeightsMismatch`."""
        ...

    def missing(self) -> Sequence[str]:
        """Return the names without which tensors that came cannot be used. Raises `WeightsMismatch` if tied tensors
        came that differ."""
        ...

    def untouched(self) -> Sequence[str]:
        """Return the names of this rank's weights of which nothing has come."""
        ...

    def apply(self) -> None:
        """Copy the weights to the places where the model reads them."""
        ...

    def drop(self) -> None:
        """Free the memory."""
        ...


class StartStaging(Protocol):
    """Makes the update of a model."""

    def __call__(self, *, in_place: bool) -> StagedUpdate: ...


@dataclass
class OpenUpdate:
    number: int
    is_in_place: bool
    staged: StagedUpdate
    is_broken: bool = False
    """Whether receiving was broken off, so that the update must not be applied."""


def check_fingerprint(directory: str, expected: str) -> str:
    """Return the fingerprint of a directory. Raises `NotFound` if it is not the expected one."""
    found = directory_fingerprint(directory)
    if expected and found != expected:
        raise NotFound(f"{directory}: its files have changed since the weights were read from it")
    return found


def check_tensors(staged: StagedUpdate, sent: Sequence[SentTensor]) -> None:
    """Raise `WeightsMismatch` unless the model has places for these tensors."""
    staged.check((tensor.name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")) for tensor in sent)
