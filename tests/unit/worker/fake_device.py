"""A device on a CPU that computes like a GPU: the host sees no result of a step before the step is complete."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eagleray.kernels.ranking import Ranking
from eagleray.kernels.torch.backend import TorchBackend
from eagleray.messages.sampling import Sampling
from eagleray.models.base import Model
from eagleray.worker.downloads import Download, DownloadQueue, HostArray
from eagleray.worker.grammar_rows import GrammarRows, MatchedRows
from eagleray.worker.grammars import WorkerGrammars
from eagleray.worker.logprobs import ScoreKind
from eagleray.worker.sampler import Sampled, SamplingStep, TokenSampler


class FakeDownload(Download):
    """Looks at the tensors when the device completes it and not before, so a tensor that a later step overwrites shows
    that step's values."""

    def __init__(self, tensors: Sequence[Tensor], complete_until: Callable[[FakeDownload], None]) -> None:
        self._tensors = tensors
        self._complete_until = complete_until
        self.arrays: list[HostArray] | None = None

    @property
    def is_done(self) -> bool:
        return self.arrays is not None

    def wait(self) -> list[HostArray]:
        if self.arrays is None:
            self._complete_until(self)
        assert self.arrays is not None
        return self.arrays

    def complete(self) -> None:
        self.arrays = [tensor.numpy().copy() for tensor in self._tensors]


class FakeDevice(DownloadQueue):
    """Completes steps in order: when told by `complete`, or when somebody waits for one, if `may_wait`."""

    def __init__(self, *, may_wait: bool = True) -> None:
        self.may_wait = may_wait
        self.num_waits = 0
        self.pending: deque[FakeDownload] = deque()
        self.most_pending = 0

    def begin(self, tensors: Sequence[Tensor]) -> Download:
        download = FakeDownload(tensors, self._complete_until)
        self.pending.append(download)
        self.most_pending = max(self.most_pending, len(self.pending))
        return download

    def complete(self) -> None:
        self.pending.popleft().complete()

    def _complete_until(self, download: FakeDownload) -> None:
        assert self.may_wait, "the host waits for a step that the device has not completed"
        self.num_waits += 1
        while not download.is_done:
            self.complete()


class ArgmaxSampler(TokenSampler["ArgmaxPlan"]):
    """Samples the likeliest token on the device and keeps it there."""

    def __init__(self, num_rows: int, grammars: GrammarRows | None = None) -> None:
        self.last_tokens = torch.full((num_rows,), -1)
        self.rows: set[int] = set()
        self.grammars = grammars

    def add_row(self, row: int, sampling: Sampling, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        self.rows.add(row)
        if sampling.is_masked:
            self.grammars.add_row(row, sampling, token_ids[num_prompt_tokens:])

    def free_row(self, row: int) -> None:
        self.rows.discard(row)
        if self.grammars is not None:
            self.grammars.free_row(row)

    def warm_up(self, num_rows: int, *, num_logprobs: int) -> None:
        pass

    def prepare(self, rows: np.ndarray, positions: np.ndarray) -> ArgmaxPlan:
        assert set(rows.tolist()) <= self.rows
        matched = None if self.grammars is None else self.grammars.select(rows)
        return ArgmaxPlan(rows, rows.astype(np.int32), matched)

    def launch(self, logits: Tensor, plan: ArgmaxPlan, words: Tensor) -> SamplingStep:
        if plan.matched is not None:
            masks, failures = self.grammars.begin_masks(plan.matched).wait()
            assert not failures
            Ranking().keep_allowed(logits, torch.from_numpy(plan.matched.indices), torch.from_numpy(masks))
        chosen = logits.argmax(dim=-1)
        self.last_tokens[words[: len(chosen)]] = chosen
        return ChosenTokens(plan, [chosen], self.grammars)


@dataclass(frozen=True)
class ArgmaxPlan:
    rows: np.ndarray
    words: np.ndarray
    matched: MatchedRows | None

    @property
    def grammar_rows(self) -> Collection[int]:
        return () if self.matched is None else self.matched.matchers


@dataclass(frozen=True)
class ChosenTokens:
    plan: ArgmaxPlan
    tensors: list[Tensor]
    grammars: GrammarRows | None

    def finish(self, arrays: Sequence[HostArray]) -> Sampled:
        rows, token_ids = self.plan.rows.tolist(), arrays[0].tolist()
        if self.plan.matched is not None:
            self.grammars.accept(self.plan.matched, rows, token_ids)
        return Sampled(rows, token_ids, {}, [], [])


def use_fake_device(patch: pytest.MonkeyPatch, device: FakeDevice, *, depth: int = 2) -> None:
    """Have engines made from now on compute on `device`, with up to `depth` steps in flight."""

    def sampler_of(
        model: Model, num_rows: int, reported_kind: ScoreKind, grammars: WorkerGrammars | None
    ) -> TokenSampler[Any]:
        rows = None if grammars is None else GrammarRows(grammars, vocab_size=model.spec.vocab_size)
        return ArgmaxSampler(num_rows, rows)

    patch.setattr("eagleray.models.registry.choose_backend", lambda *_, **__: TorchBackend())
    patch.setattr("eagleray.worker.worker.downloads_of", lambda _: device)
    patch.setattr("eagleray.worker.worker.sampler_of", sampler_of)
    patch.setattr("eagleray.engine.startup.steps_in_flight", lambda *_, **__: depth)
