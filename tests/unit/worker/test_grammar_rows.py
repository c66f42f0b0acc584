"""Matchers of rows: a row that is added again with its tokens goes on as if it had never left."""

from __future__ import annotations

import random

import numpy as np
import pytest
from grammar_tokenizers import WHITESPACE, Words

from eagleray.messages.grammars import Grammar
from eagleray.messages.sampling import Sampling
from eagleray.worker.grammar_rows import GrammarRows, MatchedRows
from eagleray.worker.grammars import WorkerGrammars

WORDS = Words.make()
VOCAB_SIZE = WORDS.tokenizer.get_vocab_size()
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yz"]}}, "required": ["a"]}'
TAG = '{"format": {"type": "triggered_tags", "triggers": ["<"], "tags": [{"begin": "<a>", "content": {"type": "regex", '
GRAMMARS = [
    Grammar(kind="json_schema", source=SCHEMA, whitespace=WHITESPACE),
    Grammar(kind="regex", source="(a|bc){3,20}"),
    Grammar(kind="structural_tag", source=TAG + '"pattern": "[0-9]+"}, "end": "</a>"}]}}', whitespace=WHITESPACE),
]


def make_rows() -> GrammarRows:
    return GrammarRows(WorkerGrammars(lambda: WORDS.compiler), vocab_size=VOCAB_SIZE)


def select(rows: GrammarRows, *numbers: int) -> MatchedRows:
    matched = rows.select(np.array(numbers))
    assert matched is not None
    return matched


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_grammar_rows_replayed_row_has_the_mask_of_one_that_went_on(grammar: Grammar) -> None:
    rng = random.Random(7)
    sampling = Sampling(seed=0, grammar=grammar)
    going_on, replayed = make_rows(), make_rows()
    going_on.add_row(1, sampling, [])
    tokens: list[int] = []
    for _ in range(40):
        matched = select(going_on, 1)
        masks, failures = going_on.begin_masks(matched).wait()
        replayed.free_row(2)
        replayed.add_row(2, sampling, tokens)
        again, _ = replayed.begin_masks(select(replayed, 2)).wait()
        assert not failures and (masks == again).all()
        bits = np.unpackbits(masks.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
        guessed, token_id = rng.choices(np.flatnonzero(bits).tolist(), k=2)
        going_on.copy_matchers([1, 5])[1].accept([guessed])
        tokens.append(token_id)
        going_on.accept(matched, [1], tokens[-1:])
        ahead = np.empty_like(masks[0])
        going_on.copy_matchers([1])[1].fill_mask(ahead)
        assert (ahead == mask_after(sampling, tokens)).all()


def mask_after(sampling: Sampling, tokens: list[int]) -> np.ndarray:
    """Return the mask of a row that is added with these tokens."""
    rows = make_rows()
    rows.add_row(0, sampling, tokens)
    return rows.begin_masks(select(rows, 0)).wait()[0][0]


def test_grammar_rows_select_the_rows_with_a_grammar() -> None:
    rows = make_rows()
    assert not rows.has_rows and rows.select(np.array([0, 1])) is None
    rows.add_row(3, Sampling(seed=0, grammar=GRAMMARS[1]), [])
    rows.add_row(1, Sampling(seed=0, grammar=GRAMMARS[0]), [])
    assert select(rows, 0, 1, 2, 3).indices.tolist() == [1, 3]
    rows.free_row(3)
    rows.free_row(0)
    assert select(rows, 3, 1).indices.tolist() == [1]
    rows.free_row(1)
    assert not rows.has_rows


def test_grammar_rows_masks_of_changing_rows_are_those_of_each_alone() -> None:
    """Rows come, go, pause and fail to sample: the mask of each depends on its own tokens alone."""
    rng = random.Random(3)
    rows, tokens = make_rows(), {}
    for step in range(60):
        for row in rng.sample(range(12), 3):
            if row in tokens:
                rows.free_row(row)
                del tokens[row]
            else:
                rows.add_row(row, Sampling(seed=0, grammar=GRAMMARS[(row + step) % 3]), [])
                tokens[row] = GRAMMARS[(row + step) % 3], []
        if not tokens:
            continue
        stepped = rng.sample(sorted(tokens), rng.randint(1, len(tokens)))
        matched = select(rows, *stepped)
        masks, failures = rows.begin_masks(matched).wait()
        assert not failures
        chosen = []
        for row, mask in zip(stepped, masks, strict=True):
            grammar, before = tokens[row]
            alone = make_rows()
            alone.add_row(0, Sampling(seed=0, grammar=grammar), before)
            assert (mask == alone.begin_masks(select(alone, 0)).wait()[0][0]).all()
            bits = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE])
            if rng.random() < 0.8 and bits.size:
                chosen.append((row, rng.choice(bits.tolist())))
                before.append(chosen[-1][1])
        rows.accept(matched, [row for row, _ in chosen], [token for _, token in chosen])


def test_grammar_rows_row_of_another_request_does_not_accept_tokens_of_an_earlier_step() -> None:
    rows = make_rows()
    rows.add_row(1, Sampling(seed=0, grammar=GRAMMARS[1]), [])
    earlier = select(rows, 1)
    first, _ = rows.begin_masks(earlier).wait()
    rows.free_row(1)
    rows.add_row(1, Sampling(seed=0, grammar=GRAMMARS[1]), [])
    allowed = int(np.flatnonzero(np.unpackbits(first.view(np.uint8), bitorder="little"))[0])
    rows.accept(earlier, [1], [allowed])
    again, _ = rows.begin_masks(select(rows, 1)).wait()
    assert (first == again).all()
