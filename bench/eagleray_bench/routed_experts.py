"""Cost of reporting which experts compute each token: the same load without and with it, in turn."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec
import numpy as np

from eagleray.client.outputs import RequestOutput
from eagleray.llm import LLM
from eagleray_bench.alternating_runs import AlternatingRuns
from eagleray_bench.lengths import RequestShape
from eagleray_bench.offline import ThroughputFigures, run_all, vocab_size, warm_up
from eagleray_bench.workload import make_requests


class RoutedExpertsFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of both variants, one entry per round: no request asks for routed experts, or every request does."""

    without: list[ThroughputFigures]
    reporting: list[ThroughputFigures]
    ratio: float
    """Output tokens per second with routed experts, divided by those without: median of the rounds."""
    num_rows: int
    """Rows that all requests of a round received: one per token of prompt and answer but the answer's last."""
    bytes_per_row: int


def measure_routed_experts(
    llm: LLM, shapes: Sequence[RequestShape], runs: AlternatingRuns, *, seed: int, detokenize: bool = True
) -> RoutedExpertsFigures:
    """Measure `llm`, which has `enable_return_routed_experts`.

    No prompt is used twice, so that the prefix cache has no hits.
    """
    seeds = np.random.SeedSequence(seed).generate_state(2 * runs.count).tolist()
    figures: dict[bool, list[ThroughputFigures]] = {False: [], True: []}
    num_rows = bytes_per_row = 0
    warm_up(llm)
    for is_reporting in runs.order((False, True)):
        requests = make_requests(shapes, vocab_size=vocab_size(llm), seed=seeds.pop())
        found, outputs = run_all(llm, requests, detokenize=detokenize, routed_experts=is_reporting)
        figures[is_reporting].append(found)
        if is_reporting:
            num_rows, bytes_per_row = _count_rows(outputs)
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


def _count_rows(outputs: Sequence[RequestOutput]) -> tuple[int, int]:
    """Return the number of rows in all outputs and the size of a row in bytes."""
    num_rows = bytes_per_row = 0
    for output in outputs:
        (completion,) = output.outputs
        rows = completion.routed_experts
        assert rows is not None and len(rows) == len(output.prompt_token_ids) + len(completion.token_ids) - 1
        num_rows += len(rows)
        bytes_per_row = rows[0].nbytes if len(rows) else bytes_per_row
    return num_rows, bytes_per_row
