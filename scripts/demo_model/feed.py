"""Batches of token ids: running text, epoch after epoch, and conversations, which are drawn for each step."""

from __future__ import annotations

import random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo_model.checkpoint import ANSWER_START, END_ID, IM_END, render_turn
from demo_model.dialogues import DialogueSampler

IGNORED = -100  # target of a position that is not learned


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[Tensor]:
    """Return each text's token ids and the id that ends a text."""
    return [torch.tensor([*encoding.ids, END_ID]) for encoding in tokenizer.encode_batch(texts)]


def pack(documents: list[Tensor], row_len: int) -> Tensor:
    """Lay documents end to end in rows of `row_len` tokens and the one that follows.  # [num_rows, row_len + 1]

    When a row ends inside a document, a rest shorter than a quarter row is dropped, so that many rows begin as a
    request does, at the start of a document.
    """
    size = row_len + 1
    pieces: list[Tensor] = []
    filled = 0
    for document in documents:
        while True:
            piece = document[: size - filled]
            pieces.append(piece)
            filled = (filled + len(piece)) % size
            document = document[len(piece) :]
            if len(document) < row_len // 4:
                break
    tokens = torch.cat(pieces)
    return tokens[: len(tokens) // size * size].view(-1, size)


class TextFeed:
    """Rows of documents in an order that depends on the epoch's number; three numbers are the position."""

    def __init__(self, documents: list[Tensor]):
        self.documents = documents
        self.position = {"epoch": -1, "row": 0, "row_len": 0}

    def seek(self, *, epoch: int, row: int, row_len: int) -> None:
        """Continue at a position, such as that of a saved run."""
        if (epoch, row_len) != (self.position["epoch"], self.position["row_len"]):
            documents = random.Random(epoch).sample(self.documents, len(self.documents))
            rows = pack(documents, row_len)
            self.rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch))]
        self.position = {"epoch": epoch, "row": row, "row_len": row_len}

    def next_rows(self, num_tokens: int, row_len: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of about `num_tokens` tokens.  # [num_rows, row_len] each"""
        num_rows = num_tokens // row_len
        if row_len != self.position["row_len"] or self.position["row"] + num_rows > len(self.rows):
            self.seek(epoch=self.position["epoch"] + 1, row=0, row_len=row_len)
        row = self.position["row"]
        self.position["row"] += num_rows
        rows = self.rows[row : row + num_rows]
        return rows[:, :-1], rows[:, 1:]


class ChatFeed:
    """Rows of conversations, of which only the answers are targets. The step's number alone determines its rows."""

    def __init__(self, tokenizer: Tokenizer, sampler: DialogueSampler):
        self.tokenizer, self.sampler = tokenizer, sampler

    def rows_of_step(self, step: int, num_tokens: int, row_len: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of about `num_tokens` tokens.  # [num_rows, row_len] each

        Each row begins with a conversation, as a request does; the last one of a row is cut off.
        """
        rng = random.Random(step)
        rows = [self._row(rng, row_len + 1) for _ in range(num_tokens // row_len)]
        ids = torch.tensor([ids for ids, _ in rows])
        is_answer = torch.tensor([flags for _, flags in rows])
        return ids[:, :-1], ids[:, 1:].masked_fill(~is_answer[:, 1:], IGNORED)

    def _row(self, rng: random.Random, size: int) -> tuple[list[int], list[bool]]:
        ids: list[int] = []
        is_answer: list[bool] = []
        while len(ids) < size:
            for role, text in self.sampler.sample(rng):
                if role == "assistant":
                    pieces = [(ANSWER_START, False), (text + IM_END, True), ("\n", False)]
                else:
                    pieces = [(render_turn(role, text), False)]
                for piece, flag in pieces:
                    new = self.tokenizer.encode(piece).ids
                    ids += new
                    is_answer += [flag] * len(new)
            ids.append(END_ID)
            is_answer.append(False)
        return ids[:size], is_answer[:size]
