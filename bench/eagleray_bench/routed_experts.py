"""What it costs to report which experts compute each token: the same load without and with it, in turn."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from eagleray.client.outputs import RequestOutput
from eagleray.errors import UserError
from eagleray.llm import LLM
from eagleray_bench.lengths import Shape
from eagleray_bench.offline import ThroughputFigures, answer_all, vocab_size, warm_up
from eagleray_bench.workload import make_jobs

__all__ = ["Rounds", "RoutedExpertsFigures", "measure_routed_experts"]


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """How often each way. Raises `UserError` for a number that makes no sense."""

    count: int = 3
    detokenize: bool = True

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UserError(f"--rounds must be at least 1, but it is {self.count}")


class RoutedExpertsFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Each round is a pair: nobody asks for routed experts, everybody does."""

    without: list[ThroughputFigures]
    reporting: list[ThroughputFigures]
    ratio: float
    """Output tokens a second, reporting over not: median of the rounds."""
    num_rows: int
    """That came in all of a round: one for each token of prompts and answers but the last ones."""
    bytes_per_row: int


def measure_routed_experts(llm: LLM, shapes: Sequence[Shape], rounds: Rounds, *, seed: int) -> RoutedExpertsFigures:
    """`llm` has `enable_return_routed_experts`. Never the same prompt twice: the prefix cache shall not help."""
    seeds = np.random.SeedSequence(seed).generate_state(2 * rounds.count).tolist()
    figures: dict[bool, list[ThroughputFigures]] = {False: [], True: []}
    num_rows = bytes_per_row = 0
    warm_up(llm)
    for place in range(rounds.count):
        for asks in (False, True) if place % 2 == 0 else (True, False):  # whoever comes second finds a warmer machine
            jobs = make_jobs(shapes, vocab_size=vocab_size(llm), seed=seeds.pop())
            found, outputs = answer_all(llm, jobs, detokenize=rounds.detokenize, routed_experts=asks)
            figures[asks].append(found)
            if asks:
                num_rows, bytes_per_row = _rows(outputs)
    ratios = [
        reporting.output_tokens_per_s / without.output_tokens_per_s
        for without, reporting in zip(figures[False], figures[True], strict=True)
    ]
    return RoutedExpertsFigures(
        without=figures[False],
        reporting=figures[True],
        ratio=statistics.median(ratios),
        num_rows=num_rows,
        bytes_per_row=bytes_per_row,
    )


def _rows(outputs: Sequence[RequestOutput]) -> tuple[int, int]:
    """How many came, and the size of one."""
    num_rows = bytes_per_row = 0
    for output in outputs:
        (completion,) = output.outputs
        rows = completion.routed_experts
        assert rows is not None and len(rows) == len(output.prompt_token_ids) + len(completion.token_ids) - 1
        num_rows += len(rows)
        bytes_per_row = rows[0].nbytes if len(rows) else bytes_per_row
    return num_rows, bytes_per_row
