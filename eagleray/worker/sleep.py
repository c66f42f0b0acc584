"""Sleep of a worker: the memory of its weights and of its cache is returned to the system, and later taken back.

Owned by the serving worker, which takes no steps meanwhile. All ranks of an engine sleep and wake together.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from eagleray.kernels.forward_batch import PassLimits
from eagleray.kernels.kv_cache import KVCache
from eagleray.kernels.memory_release import ReleasableMemory, releasable_memory
from eagleray.messages.control import SleepTag
from eagleray.models.base import Model
from eagleray.process.malloc import malloc_trim
from eagleray.worker.memory import out_of_memory

KEEPING_LEVEL = 1
"""Highest level at which weights can be woken without a source: on a CPU they stay, on a GPU they are on the host."""


MEMORY_TAGS: frozenset[SleepTag] = frozenset(("weights", "kv_cache"))


class SleepableMemory:
    """The weights of a model and its cache. `limits` and `last_tokens` are those of its steps, see `Model.warm_up`.
    `draft_cache`: the cache of a draft model, which sleeps with the model's; the weights of a draft model stay."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        limits: PassLimits,
        last_tokens: Tensor | None,
        *,
        draft_cache: KVCache | None = None,
    ) -> None:
        self._model = model
        self._draft_cache = draft_cache
        self._cache = cache
        self._limits = limits
        self._last_tokens = last_tokens
        self._asleep: dict[SleepTag, ReleasableMemory] = {}
        self.is_awake = True
        """Whether the model can compute with the cache."""

    @property
    def has_weights(self) -> bool:
        """Whether the weights are awake."""
        return "weights" not in self._asleep

    @torch.inference_mode()
    def sleep(self, tags: Collection[SleepTag], level: int) -> int:
        """Return the memory of these parts to the system, and return the number of bytes. Their contents are lost, and
        are zeros when they are awake again, except for weights at level 1 and adapters, which sleep with the weights.
        Parts that are asleep may go deeper."""
        if not MEMORY_TAGS.intersection(tags):
            return 0
        self._model.close()  # graphs hold the addresses of the weights and of the cache
        num_bytes = 0
        if "weights" in tags:
            num_bytes += self._memory_of("weights").release(keeps=level <= KEEPING_LEVEL)
        if "kv_cache" in tags:
            num_bytes += self._memory_of("kv_cache").release(keeps=False)
        self._return_freed()
        return num_bytes

    @torch.inference_mode()
    def wake_up(self, tags: Collection[SleepTag]) -> None:
        """Take back the memory of these parts, and prepare passes when all parts are awake. Weights that were dropped
        are zeros until they are written through `Model.storage`.

        If a GPU has too little memory, the parts stay asleep on all tensor-parallel ranks, and this raises
        `ConfigError` on those that lack it.
        """
        waking = [tag for tag in self._asleep if tag in tags]
        if not waking:
            return
        flag = torch.zeros((1, 1), device=self._model.device)
        lack = self._restore(waking)
        # before passes are prepared, whose sums would wait for a rank that lacks memory
        if self._model.groups.tp.all_reduce(flag + (lack is not None)).item():
            self._model.close()
            for tag in waking:
                self._asleep[tag].release(keeps=tag == "weights")
            self._return_freed()
            if lack is not None:
                advice = "free what other programs have taken since it was put to sleep, and wake it again"
                raise out_of_memory("a worker that wakes", advice, self._model.device) from lack
            return
        for tag in waking:
            del self._asleep[tag]
        self.is_awake = not self._asleep
        if self.is_awake:
            self._model.warm_up(self._cache, self._limits, self._last_tokens)

    def _restore(self, waking: Sequence[SleepTag]) -> torch.OutOfMemoryError | None:
        """Take back the memory of these parts and, if all are awake then, that of passes on a GPU. Returns the error if
        there is too little."""
        try:
            for tag in waking:
                self._asleep[tag].restore()
            if len(waking) == len(self._asleep) and self._model.device.type == "cuda":
                self._model.reserve(self._cache, self._limits)
        except torch.OutOfMemoryError as error:
            return error
        return None

    def _return_freed(self) -> None:
        """Return memory that allocators keep after it was freed."""
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        malloc_trim()

    def _cache_layers(self) -> list[Tensor]:
        return self._cache.layers + ([] if self._draft_cache is None else self._draft_cache.layers)

    def _memory_of(self, tag: Literal["weights", "kv_cache"]) -> ReleasableMemory:
        """Return the memory of a part, which counts as asleep from now on."""
        if tag not in self._asleep:
            model = self._model
            tensors = model.storage() if tag == "weights" else self._cache_layers()
            memory = releasable_memory(tensors, model.device)
            if tag == "weights" and model.adapters is not None:
                memory = WeightsAndAdapters(memory, releasable_memory(model.adapters.storage(), model.device))
            self._asleep[tag] = memory
            self.is_awake = False
        return self._asleep[tag]


@dataclass(frozen=True, slots=True)
class WeightsAndAdapters(ReleasableMemory):
    """The memory of weights, and that of adapters, whose contents are always kept: no update brings them back."""

    weights: ReleasableMemory
    adapters: ReleasableMemory

    def release(self, *, keeps: bool) -> int:
        return self.weights.release(keeps=keeps) + self.adapters.release(keeps=True)

    def restore(self) -> None:
        """See `ReleasableMemory`. If there is too little for the adapters, the weights have been restored."""
        self.weights.restore()
        self.adapters.restore()
