"""The names of the tensors that an update of a model's weights may have."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches

import torch
from torch import Tensor

from eagleray.errors import WeightsMismatch
from eagleray.models.stored_weights import SCALES_SUFFIX
from eagleray.models.weights import Alias

CACHE_SCALE = re.compile(
    r"model\.layers\.\d+\.self_attn\.((attn\.|[qkv]_proj\.)?(k|v|kv|q|prob)_scale|[qkv]_proj\.output_scale)"
)
"""Name of a number by which queries, keys, values or probabilities of 8 bits are scaled."""


def is_cache_scale(name: str) -> bool:
    """Whether a tensor of a checkpoint is a scale for caches of 8 bits. Nothing here uses these."""
    return CACHE_SCALE.fullmatch(name) is not None


class TensorNames:
    """Names of the tensors that an update of a model may have.

    `has_scales`: weights in FP8 have scales. `tied`: two names of one tensor, of which the model has the first; the
    second one is dropped if its numbers are the same.
    """

    def __init__(
        self,
        names: Iterable[str],
        aliases: Iterable[Alias],
        *,
        has_scales: bool,
        may_be_dropped: Callable[[str], bool],
        tied: tuple[str, str] | None = None,
    ) -> None:
        self._names = frozenset(names)
        self._has_scales = has_scales
        self.tied = tied
        self._aliases = {alias.name: alias for alias in aliases}
        self._may_be_dropped = may_be_dropped

    def resolve(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the checkpoint for which a pushed tensor stands, or nothing if it is dropped. Raises
        `WeightsMismatch`."""
        if (alias := self._aliases.get(name)) is not None:
            if tuple(tensor.shape) != alias.shape:
                raise wrong_shape(name, tensor, alias.shape)
            yield from alias.split(tensor)
        elif name in self._names or (self._has_scales and name.removesuffix(SCALES_SUFFIX) in self._names):
            yield name, tensor
        elif not self._may_be_dropped(name):
            nearest = self._nearest(name)
            hint = f"; the nearest names are {', '.join(nearest)}" if nearest else ""
            raise WeightsMismatch(f"the model has no tensor {name!r}{hint}")

    def _nearest(self, name: str) -> list[str]:
        known = [*self._names, *self._aliases]
        layer = name.split(".")[:3]
        same_layer = [each for each in known if each.split(".")[:3] == layer]
        # there may be tens of thousands of experts, and comparing texts is slow
        return get_close_matches(name, same_layer or [each for each in known if ".experts." not in each])

    def check_tied(self, batch: Mapping[str, Tensor]) -> None:
        """Raise `WeightsMismatch` if a batch has both tied tensors and they differ."""
        if self.tied is None or any(name not in batch for name in self.tied):
            return
        first, second = (batch[name] for name in self.tied)
        if not torch.equal(first, second.to(first)):
            raise self.tied_mismatch()

    def tied_mismatch(self) -> WeightsMismatch:
        """Return the error for tied tensors that differ."""
        assert self.tied is not None
        first, second = self.tied
        return WeightsMismatch(
            f"{second!r} differs from {first!r}, to which config.json ties it: push the same numbers under both names, "
            f"{first!r} first, or {first!r} alone"
        )


def wrong_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> WeightsMismatch:
    """Return the error for a tensor of another shape than the model's."""
    return WeightsMismatch(f"tensor {name!r} has the shape {list(tensor.shape)}, but the model's has {list(expected)}")
