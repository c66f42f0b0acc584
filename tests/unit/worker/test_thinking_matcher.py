"""Thinking before an answer: its markers, its budget, and the grammar that follows."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from eagleray.grammars.matcher import Matcher, TokenMask, mask_words
from eagleray.messages.thinking import Thinking
from eagleray.worker.thinking import ThinkingMatcher

VOCAB_SIZE = 70
START, END, EOS, CALL, NEWLINE, BEGIN = 64, 63, 2, 40, 7, 8
ANSWER = (32, 31, 33)
FREE = set(range(VOCAB_SIZE))


class AnswerMatcher(Matcher):
    """Allows the tokens of `ANSWER` in order, then `EOS`."""

    failure = None

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def fill_mask(self, mask: TokenMask) -> None:
        mask[:] = 0
        token_id = [*ANSWER, EOS][len(self.accepted)]
        mask.view(np.uint32)[token_id // 32] = 1 << token_id % 32

    def accept(self, token_ids: Sequence[int]) -> None:
        self.accepted += [token_id for token_id in token_ids if token_id != EOS]
        assert tuple(self.accepted) == ANSWER[: len(self.accepted)]


def allowed(matcher: Matcher) -> set[int]:
    """Return the tokens of the matcher's mask."""
    mask = np.full(mask_words(VOCAB_SIZE), 0x5A5A5A5A, dtype=np.int32)
    matcher.fill_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    return set(np.flatnonzero(bits).tolist())


def follow(thinking: Thinking, tokens: Sequence[int], answer: Matcher | None = None) -> Matcher:
    """Return a matcher that has accepted these tokens one by one."""
    matcher = ThinkingMatcher(thinking, answer)
    for token_id in tokens:
        matcher.accept([token_id])
    return matcher


OPEN = Thinking(end=(END,), is_open=True, forbidden=(EOS,))
WRITTEN = Thinking(end=(END,), starts=((START,), (NEWLINE, START)), forbidden=(EOS,))


@pytest.mark.parametrize(
    ("thinking", "tokens", "expected"),
    [
        (OPEN, [], FREE - {EOS}),
        (OPEN, [5, ANSWER[0]], FREE - {EOS}),
        (OPEN, [5, END], {ANSWER[0]}),
        (OPEN, [END, *ANSWER], {EOS}),
        (WRITTEN, [], {ANSWER[0], START, NEWLINE}),
        (WRITTEN, [NEWLINE], {START}),
        (WRITTEN, [NEWLINE, START], FREE - {EOS}),
        (WRITTEN, [START, 5, START], FREE - {EOS}),
        (WRITTEN, [START, END], {ANSWER[0]}),
        (WRITTEN, [ANSWER[0]], {ANSWER[1]}),
    ],
)
def test_grammar_begins_after_the_thinking(thinking, tokens, expected):
    assert allowed(follow(thinking, tokens, AnswerMatcher())) == expected


CHANNELS = Thinking(
    end=(END,),
    starts=((BEGIN, 9, 10),),
    is_required=True,
    budget=2,
    forced_end=(END,),
    forbidden=(EOS,),
    answer_header=(11, BEGIN, 12, 10),
)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], {BEGIN}),
        ([BEGIN], {9}),
        ([BEGIN, 9, 10], FREE - {EOS}),
        ([BEGIN, 9, 10, 1, 2], {END}),
        ([BEGIN, 9, 10, 1, END], {11}),
        ([BEGIN, 9, 10, 1, END, 11, BEGIN, 12], {10}),
        ([BEGIN, 9, 10, 1, END, 11, BEGIN, 12, 10], {ANSWER[0]}),
    ],
)
def test_answer_with_a_header_follows_the_thinking(tokens, expected):
    assert allowed(follow(CHANNELS, tokens, AnswerMatcher())) == expected


@pytest.mark.parametrize(
    ("thinking", "tokens", "expected"),
    [
        (Thinking(end=(END,), is_open=True, budget=0, forced_end=(END,)), [], {END}),
        (Thinking(end=(END,), is_open=True, budget=0, forced_end=(END,)), [END], FREE),
        (Thinking(end=(END,), is_open=True, budget=2, forced_end=(NEWLINE, END)), [5], FREE),
        (Thinking(end=(END,), is_open=True, budget=2, forced_end=(NEWLINE, END)), [5, 6], {NEWLINE}),
        (Thinking(end=(END,), is_open=True, budget=2, forced_end=(NEWLINE, END)), [5, 6, NEWLINE], {END}),
        (Thinking(end=(END,), is_open=True, budget=2, forced_end=(NEWLINE, END)), [5, 6, NEWLINE, END], FREE),
        # The start marker is not a token of the thinking, whether or not the prompt has one.
        (Thinking(end=(END,), starts=((START,),), budget=1, forced_end=(END,)), [], FREE),
        (Thinking(end=(END,), starts=((START,),), budget=1, forced_end=(END,)), [START], FREE),
        (Thinking(end=(END,), starts=((START,),), budget=1, forced_end=(END,)), [START, START], {END}),
        (Thinking(end=(END,), starts=((START,),), budget=1, forced_end=(END,)), [5, START, 5, 5], FREE),
        (Thinking(end=(END,), starts=((START,),), is_open=True, budget=1, forced_end=(END,)), [START], FREE),
        (Thinking(end=(END,), starts=((START,),), is_open=True, budget=1, forced_end=(END,)), [START, START], {END}),
        (Thinking(end=(END,), starts=((START, 9),), is_open=True, budget=2, forced_end=(END,)), [START, 5], {END}),
        # A tool call ends the thinking.
        (Thinking(end=(END,), is_open=True, budget=2, forced_end=(END,), interrupts=(CALL,)), [CALL, 5], FREE),
        (Thinking(end=(9, END), is_open=True, budget=2, forced_end=(9, END)), [5, 9], {9}),
        (Thinking(end=(9, END), is_open=True, budget=3, forced_end=(9, END)), [5, 9, END], FREE),
        # Tokens of another client go on as this thinking cannot.
        (Thinking(end=(END,), is_open=True, budget=1, forced_end=(END,)), [5, 6], set()),
    ],
)
def test_budget_ends_the_thinking(thinking, tokens, expected):
    assert allowed(follow(thinking, tokens)) == expected


@pytest.mark.parametrize("fields", [{"end": ()}, {"budget": 3}, {"budget": 3, "forced_end": (END, 5)}])
def test_thinking_that_would_not_end_is_refused(fields):
    with pytest.raises(ValueError, match="`end` must have tokens, and with a budget `forced_end` must end with them"):
        Thinking(**{"end": (END,)} | fields)


@pytest.mark.parametrize("thinking", [OPEN, WRITTEN, CHANNELS], ids=["open", "written", "channels"])
@pytest.mark.parametrize("budget", [None, 0, 1, 7])
def test_state_is_a_function_of_the_tokens(thinking, budget):
    rng = random.Random(budget)
    options = {name: getattr(thinking, name) for name in thinking.__struct_fields__}
    thinking = Thinking(**options | {"budget": budget, "forced_end": (NEWLINE, END)})
    for _ in range(20):
        answer = AnswerMatcher()
        matcher, tokens = ThinkingMatcher(thinking, answer), []
        while tokens[-1:] != [EOS] and len(tokens) < 60:
            mask = allowed(matcher)
            # A row that was preempted, or whose engine was killed, accepts its tokens all at once.
            again = ThinkingMatcher(thinking, AnswerMatcher())
            again.accept(tokens)
            assert allowed(again) == mask
            tokens.append(rng.choice(sorted(mask & {START, END, EOS, 5, NEWLINE, *ANSWER} or mask)))
            matcher.accept(tokens[-1:])
        if budget is not None:
            assert tokens[-1] == EOS
            assert tokens.count(END) <= 1
            thought = len(tokens) - len(ANSWER) - 1
            assert thought <= budget + len((NEWLINE, END)) + len((BEGIN, 9, 10)) + len(thinking.answer_header)
        if tokens[-1] == EOS:
            assert answer.accepted == [*ANSWER]
