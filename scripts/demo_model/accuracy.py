"""Share of questions that a model in training answers exactly, without generating: one pass over question and answer.

If the likeliest token at each position of an answer is the answer's own, greedy decoding gives this answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from demo_model.checkpoint import END_ID, IM_END, render_question
from demo_model.dialogues import REFUSAL, held_out_unknown_topics
from demo_model.phrasings import QuestionSplit

PROBES_OF_A_KIND = 150


def held_out_probes(split: QuestionSplit, limit: int = PROBES_OF_A_KIND) -> dict[str, list[tuple[str, str]]]:
    """Return held-out questions with their answers, by kind of phrasing, at most `limit` of each."""
    probes: dict[str, list[tuple[str, str]]] = {}
    for phrasing in split.held_out:
        probes.setdefault(phrasing.kind, []).append((phrasing.text, phrasing.fact.answer))
    probes["unknown topic"] = [(text, REFUSAL) for text in held_out_unknown_topics()]
    return {kind: random.Random(kind).sample(pairs, min(limit, len(pairs))) for kind, pairs in probes.items()}


@torch.no_grad()
def exact_share(
    pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer, logits_of: Callable[[Tensor], Tensor], batch_size: int = 16
) -> float:
    """Return the share of (question, answer) pairs whose answer a model gives by greedy decoding, with its end.

    Args:
        logits_of: from token ids [rows, columns] to logits [rows, columns, vocabulary].
    """
    rows = []
    for question, answer in pairs:
        prompt, rest = tokenizer.encode(render_question(question)).ids, tokenizer.encode(answer + IM_END).ids
        rows.append((torch.tensor(prompt + rest), len(prompt)))
    rows.sort(key=lambda row: len(row[0]))
    num_right = 0
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        ids = pad_sequence([row for row, _ in batch], batch_first=True, padding_value=END_ID)
        likeliest = logits_of(ids[:, :-1]).argmax(-1)
        for (row, prompt_len), found in zip(batch, likeliest, strict=True):
            num_right += bool((found[prompt_len - 1 : len(row) - 1] == row[prompt_len:]).all())
    return num_right / len(rows)
