"""Ends of completions with a grammar, and grammars together with other sampling parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from grammar_tokenizers import Words
from sampler_launch import launch

from eagleray.grammars.llguidance_compiler import LLGuidanceCompiler
from eagleray.kernels.cpu.build.library import native_library
from eagleray.kernels.cpu.ranking import NativeRanking
from eagleray.kernels.ranking import Ranking
from eagleray.messages.grammars import Grammar
from eagleray.messages.sampling import Sampling
from eagleray.messages.thinking import Thinking
from eagleray.worker.device_sampler import DeviceSampler
from eagleray.worker.grammar_rows import GrammarRows
from eagleray.worker.grammars import WorkerGrammars
from eagleray.worker.sampler import HostSampler, Sampled
from eagleray.worker.sampling_state import SamplingState

CPU = torch.device("cpu")
WORDS = Words.make(special=["<|unused|>"])
VOCAB_SIZE = WORDS.tokenizer.get_vocab_size()
AB = Grammar(kind="regex", source="ab")
MANY = Grammar(kind="regex", source="a*")
A, B = WORDS.encode("a") + WORDS.encode("b")


class Bench:
    """A sampler whose rows have an empty prompt, and the results of its steps."""

    def __init__(self, kind: str, compiler: LLGuidanceCompiler = WORDS.compiler) -> None:
        grammars = GrammarRows(WorkerGrammars(lambda: compiler), vocab_size=VOCAB_SIZE)
        self._sampler: HostSampler | DeviceSampler
        if kind == "device":
            self._sampler = DeviceSampler(
                num_rows=4, vocab_size=VOCAB_SIZE, device=CPU, split_size=64, grammars=grammars
            )
        else:
            state = SamplingState(num_rows=4, vocab_size=VOCAB_SIZE, device=CPU)
            ranking = NativeRanking(native_library(), num_threads=1) if kind == "native" else Ranking()
            self._sampler = HostSampler(state, ranking, grammars=grammars)
        self._rng = np.random.default_rng(5)
        self._num_tokens = 1

    def start(self, row: int, **sampling: Any) -> None:
        self._sampler.add_row(row, Sampling(seed=row, **sampling), [0], 1)

    def step(self, *rows: int, logits: torch.Tensor | None = None) -> Sampled:
        if logits is None:
            logits = torch.from_numpy(self._rng.normal(size=(len(rows), VOCAB_SIZE)).astype(np.float32))
        positions = np.full(len(rows), self._num_tokens)
        step = launch(self._sampler, logits.clone(), np.array(rows), positions)
        self._num_tokens += 1
        return step.finish([tensor.numpy() for tensor in step.tensors])


@pytest.fixture(params=["host", "native", "device"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(request.param)


def test_grammar_that_is_complete_allows_only_the_end_of_the_sequence(bench: Bench) -> None:
    bench.start(0, grammar=AB)
    # Where the end is ignored, it comes again and again.
    assert [bench.step(0).token_ids for _ in range(5)] == [[A], [B], [WORDS.eos], [WORDS.eos], [WORDS.eos]]


def test_grammar_that_is_complete_before_min_tokens_ends_its_row_alone(bench: Bench) -> None:
    bench.start(0, grammar=AB, min_tokens=10, suppressed_token_ids=(WORDS.eos,))
    bench.start(1, grammar=MANY, min_tokens=10, suppressed_token_ids=(WORDS.eos,))
    assert [bench.step(0, 1).token_ids for _ in range(2)] == [[A, A], [B, A]]
    last = bench.step(0, 1)
    assert (last.ended, last.rows, last.token_ids, last.failures) == ([0], [1], [A], [])


@pytest.mark.parametrize("kind", ["host", "device"])
def test_grammar_that_is_complete_ends_a_row_of_a_model_without_an_end_token(kind: str) -> None:
    compiler = LLGuidanceCompiler(WORDS.tokenizer.to_str(), vocab_size=VOCAB_SIZE, eos_token_ids=[])
    bench = Bench(kind, compiler)
    bench.start(0, grammar=AB)
    bench.start(1, grammar=MANY)
    assert [bench.step(0, 1).token_ids for _ in range(2)] == [[A, A], [B, A]]
    last = bench.step(0, 1)
    assert (last.ended, last.rows, last.token_ids, last.failures) == ([0], [1], [A], [])


def test_thinking_ends_by_its_budget_before_a_grammar_or_any_text(bench: Bench) -> None:
    thinking = Thinking(end=(B,), is_open=True, budget=2, forced_end=(B,), forbidden=(B, WORDS.eos))
    bench.start(0, thinking=thinking, grammar=AB)
    bench.start(1, thinking=thinking, temperature=0.5)
    steps = [bench.step(0, 1).token_ids for _ in range(6)]
    assert not {B, WORDS.eos} & {*steps[0], *steps[1]}
    assert steps[2] == [B, B]
    assert [token_id for token_id, _ in steps[3:]] == [A, B, WORDS.eos]


def test_thinking_whose_end_is_forbidden_fails_with_the_names_of_both(bench: Bench) -> None:
    bench.start(0, thinking=Thinking(end=(B,), is_open=True, budget=0, forced_end=(B,)), allowed_token_ids=(A,))
    [failure] = bench.step(0).failures
    assert failure.is_user_error and "allowed_token_ids, bad_words, min_tokens and thinking" in failure.message


@pytest.mark.parametrize("others", [{"allowed_token_ids": (B,)}, {"bad_words": ((A,),)}])
def test_grammar_whose_tokens_are_all_forbidden_fails_with_the_names_of_both(
    bench: Bench, others: dict[str, Any]
) -> None:
    bench.start(0, grammar=AB, **others)
    bench.start(1, grammar=AB)
    sampled = bench.step(0, 1)
    assert (sampled.rows, sampled.token_ids, sampled.ended) == ([1], [A], [])
    [failure] = sampled.failures
    assert failure.row == 0 and failure.is_user_error
    assert "structured_outputs, allowed_token_ids, bad_words" in failure.message


def test_grammar_that_meets_a_forbidden_token_fails_with_a_sentence_alone(bench: Bench) -> None:
    bench.start(0, grammar=AB, forced_token_ids=(B,))
    bench.start(1, grammar=AB)
    assert bench.step(0, 1).token_ids == [B, A]
    sampled = bench.step(0, 1)
    assert (sampled.rows, sampled.token_ids) == ([1], [B])
    [failure] = sampled.failures
    assert failure.row == 0 and failure.message.startswith("the grammar of the completion failed: ")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_grammar_row_with_broken_logits_of_a_forbidden_token_fails_alone(bench: Bench, bad: float) -> None:
    bench.start(0, grammar=AB)
    bench.start(1, temperature=0.0)
    bench.start(2, grammar=AB, logprobs=1)
    bench.start(3, grammar=AB, logprobs=1)
    logits = torch.zeros(4, VOCAB_SIZE)
    logits[0, B] = logits[3, B] = bad
    logits[1, B] = 1
    sampled = bench.step(0, 1, 2, 3, logits=logits)
    assert (sampled.rows, sampled.token_ids, list(sampled.logprobs)) == ([1, 2], [B, A], [2])
    assert [(failure.row, failure.is_user_error) for failure in sampled.failures] == [(0, False), (3, False)]
    assert all("no finite logits" in failure.message for failure in sampled.failures)


def test_grammar_leaves_the_reported_log_probabilities_unchanged(bench: Bench) -> None:
    bench.start(0, grammar=AB, logprobs=3)
    bench.start(1, logprobs=3, allowed_token_ids=(A,))
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(1, VOCAB_SIZE)).astype(np.float32)).repeat(2, 1)
    reports = bench.step(0, 1, logits=logits).logprobs
    assert reports[0] == reports[1]


def test_rows_of_one_request_follow_the_grammar_each_by_itself(bench: Bench) -> None:
    grammar = Grammar(kind="choice", source='["ab", "ba"]')
    for row in range(4):
        bench.start(row, grammar=grammar)
    first, second = bench.step(0, 1, 2, 3).token_ids, bench.step(0, 1, 2, 3).token_ids
    assert set(first) == {A, B}
    assert second == [A + B - token for token in first]


def test_steps_report_the_time_for_masks_if_a_row_has_a_grammar(bench: Bench) -> None:
    bench.start(0)
    bench.start(1, grammar=MANY)
    assert bench.step(0).mask_seconds == 0
    assert bench.step(0, 1).mask_seconds > 0
