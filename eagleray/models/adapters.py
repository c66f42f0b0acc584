"""The adapters of a model's part: its products that can have some, and their slots.

Made when the model is loaded, before its first pass. Written by the worker between steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from eagleray.errors import ConfigError
from eagleray.kernels.adapters import AdapterSite, AdapterTable, LowRankFactors
from eagleray.kernels.forward_batch import AdapterGroups
from eagleray.models.layers.layer import WeightGroup
from eagleray.models.part import ModelPart
from eagleray.models.peft_files import AdapterFiles
from eagleray.models.weights import Cut, Param

SUFFIX = ".weight"


class ModelAdapters:
    """The slots for adapters in a model's part. `groups` are its weights on this rank, whose operations are replaced by
    ones with adapters; `declared` are those of the whole model.

    Raises `ConfigError` if this model cannot have adapters.
    """

    def __init__(
        self,
        part: ModelPart,
        groups: Iterable[WeightGroup],
        declared: Iterable[WeightGroup],
        *,
        num_slots: int,
        max_rank: int,
        has_sequence_shards: bool,
    ) -> None:
        _check(part, has_sequence_shards)
        self._params = {param.name.removesuffix(SUFFIX): param for group in declared for param in group.adaptable}
        self._max_rank = max_rank
        self._table = AdapterTable(num_slots, max_rank, part.dtype, part.device)
        self._places: dict[str, tuple[AdapterSite, int, Param]] = {}
        """Site, number of the layer in it, and weight, of each module on this rank."""
        for group in groups:
            if group.adaptable:
                out_features = [param.local_shape[0] for param in group.adaptable]
                site = part.kernels.adapter_site(self._table, group.adaptable[0].local_shape[1], out_features)
                group.operation = part.kernels.adapt(group.operation, site)
                for layer, param in enumerate(group.adaptable):
                    self._places[param.name.removesuffix(SUFFIX)] = site, layer, param

    @property
    def num_bytes(self) -> int:
        """Memory that all slots take when they are full."""
        return sum(memory.nbytes for memory in self.storage())

    def storage(self) -> list[Tensor]:
        """Return the memory of the factors in all slots."""
        return [memory for site in self._sites() for memory in site.storage()]

    def begin_pass(self, groups: AdapterGroups | None) -> None:
        """Set the tokens of the next pass that have adapters."""
        self._table.groups = groups

    @torch.inference_mode()
    def load(self, slot: int, directory: Path) -> str:
        """Put this rank's part of an adapter into a slot that no request uses. Returns a hash of its files.

        Raises `NotFound` or `CheckpointError`, and leaves the slot as it was, if the adapter does not fit the model.
        """
        with AdapterFiles(directory, self._params, max_rank=self._max_rank) as files:
            for site in self._sites():
                site.clear(slot)
            for module, scale in files.modules():
                if module in self._places:
                    site, layer, param = self._places[module]
                    a, b = files.factors(module)
                    if isinstance(param.shard, Cut):
                        a, b = (a, param.shard.of(b)) if param.shard.dim == 0 else (param.shard.of(a), b)
                    site.write(slot, layer, LowRankFactors(a, b, scale))
            return files.digest()

    def _sites(self) -> Iterator[AdapterSite]:
        return iter(dict.fromkeys(site for site, _, _ in self._places.values()))


def _check(part: ModelPart, has_sequence_shards: bool) -> None:
    """Raise `ConfigError` if the model cannot have adapters."""
    if part.spec.mla is not None:
        raise ConfigError(
            f"option `enable_lora`: {part.spec.architecture} has latent attention, for which there are no adapters yet"
        )
    if has_sequence_shards:
        raise ConfigError(
            "option `enable_lora`: adapters and `enable_expert_parallel` with `tensor_parallel_size` above 1 do not go "
            "together yet; leave one of them out"
        )
