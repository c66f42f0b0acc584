"""A small driver that runs a model over a paged cache as a worker does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagleray.kernels.forward_batch import AdapterGroups, ForwardBatch
from eagleray.kernels.kv_cache import KVCache
from eagleray.models.base import Model
from eagleray.models.registry import load_model


def load(directory: Path, **options: Any) -> Model:
    defaults = {"dtype": "auto", "load_format": "auto", "device": torch.device("cpu"), "seed": None}
    return load_model(directory, **{**defaults, "on_progress": None, **options})


class PagedRun:
    """Sequences that share a cache. Their blocks are neither in order nor adjacent."""

    def __init__(self, model: Model, *, block_size: int = 8, num_blocks: int = 400) -> None:
        self.model = model
        self.block_size = block_size
        self.cache = KVCache.allocate(
            model.cache_shape(block_size), num_blocks=num_blocks, dtype=model.cache_dtype, device=model.device
        )
        self._free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
        self._tokens: dict[str, list[int]] = {}
        self._blocks: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}
        self._adapters: dict[str, int] = {}

    def add(self, name: str, tokens: Sequence[int], *, adapter: int = -1) -> None:
        """Add a sequence. `adapter`: the slot of its adapter, -1 for none."""
        self._adapters[name] = adapter
        self._tokens[name] = list(tokens)
        self._computed[name] = 0
        self._blocks[name] = [self._free.pop() for _ in range(-(-len(tokens) // self.block_size))]

    def step(self, counts: dict[str, int]) -> dict[str, Tensor]:
        """Compute the next `counts[name]` tokens of each sequence. Return logits [count, vocab_size] by name, or
        nothing on a rank that has no logits. Without counts, the step serves other engines that are busy, if any."""
        names = sorted(counts, key=lambda name: counts[name] != 1)
        if not self.model.begin_step(not counts, sum(counts.values())):
            return {}
        hidden = self.model.forward(self._batch(names, counts), self.cache)
        assert len(hidden) == sum(counts.values())
        has_logits = self.model.groups.mesh.is_last_stage and len(hidden) > 0
        logits = self.model.logits(hidden) if has_logits else None
        self.model.rebalance_if_due()
        for name in names:
            self._computed[name] += counts[name]
        if logits is None:
            return {}
        logits = logits.cpu().clone()
        return dict(zip(names, logits.split([counts[name] for name in names]), strict=True))

    def run(self, name: str, chunk: int) -> Tensor:
        """Compute the rest of one sequence, `chunk` tokens at a time, and return logits [tokens, vocab_size] (see
        `step`)."""
        pieces = []
        while (left := len(self._tokens[name]) - self._computed[name]) > 0:
            pieces += self.step({name: min(chunk, left)}).values()
        return torch.cat(pieces) if pieces else torch.empty(0)

    def _batch(self, names: list[str], counts: dict[str, int]) -> ForwardBatch:
        token_ids, positions, slots = [], [], []
        contexts = [self._computed[name] + counts[name] for name in names]
        for name, end in zip(names, contexts, strict=True):
            span = range(self._computed[name], end)
            token_ids += self._tokens[name][span.start : span.stop]
            positions += span
            slots += [self._blocks[name][p // self.block_size] * self.block_size + p % self.block_size for p in span]
        width = -(-max(contexts, default=0) // self.block_size)
        table = [(self._blocks[name] + [0] * width)[:width] for name in names]
        return ForwardBatch(
            token_ids=np.array(token_ids, np.int32),
            positions=np.array(positions, np.int32),
            slot_mapping=np.array(slots, np.int32),
            block_table=np.array(table, np.int32).reshape(len(names), width),
            seq_lens=np.array(contexts, np.int32),
            query_start_loc=np.cumsum([0, *(counts[name] for name in names)], dtype=np.int32),
            num_decodes=sum(counts[name] == 1 for name in names),
            adapters=AdapterGroups.of(
                np.repeat([self._adapters[name] for name in names], [counts[name] for name in names]).astype(np.int32)
            ),
        )


def logits_in_chunks(model: Model, tokens: Sequence[int], chunk: int, **options: Any) -> Tensor:
    """Return logits [tokens, vocab_size]."""
    run = PagedRun(model, **options)
    run.add("only", tokens)
    return run.run("only", chunk)
