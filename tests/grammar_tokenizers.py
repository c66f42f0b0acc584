"""Tokenizers for tests of grammars, and the texts that compiled grammars match."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from eagleray.grammars.llguidance_compiler import LLGuidanceCompiler
from eagleray.grammars.matcher import CompiledGrammar, GrammarCompiler, Matcher, mask_words
from eagleray.messages.grammars import Grammar

TEXTS = [
    '{"a": 1}</tool_call> <function=foo>{"name": "bar", "arguments": {}}\n</function> <parameter=city>\n</parameter>'
]
WHITESPACE = r"[ \n\t]{0,16}"


class Words(NamedTuple):
    """A tokenizer with a compiler of grammars for it."""

    tokenizer: Tokenizer
    compiler: GrammarCompiler
    eos: int

    @classmethod
    def make(cls, *, special: Sequence[str] = (), added: Sequence[str] = ()) -> Words:
        """Train a small tokenizer on `TEXTS`. The added tokens are not special."""
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=400, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
        )
        tokenizer.train_from_iterator(TEXTS * 3, trainer)
        tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in special])
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
        eos = tokenizer.token_to_id("<eos>")
        compiler = LLGuidanceCompiler(tokenizer.to_str(), vocab_size=tokenizer.get_vocab_size(), eos_token_ids=[eos])
        return cls(tokenizer, compiler, eos)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        return self.compiler.compile(grammar)

    def encode(self, text: str, *, by_byte: bool = False) -> list[int]:
        """Return the tokens of a text. `by_byte`: only added tokens have more than a byte each."""
        ids: list[int] = self.tokenizer.encode(text).ids
        added = self.tokenizer.get_added_tokens_decoder()
        if not by_byte:
            return ids
        to_id = self.tokenizer.token_to_id
        return [
            token for id_ in ids for token in ([id_] if id_ in added else map(to_id, self.tokenizer.id_to_token(id_)))
        ]

    def matched(self, compiled: CompiledGrammar, token_ids: Sequence[int]) -> bool:
        """Whether each of the tokens is in the mask at its place, and the end of the sequence after them. Where only
        one text is allowed, masks have the tokens that the tokenizer would choose for it."""
        matcher = compiled.matcher()
        for token_id in token_ids:
            if not self.allows(matcher, token_id):
                return False
            matcher.accept([token_id])
        return self.allows(matcher, self.eos)

    def accepted(self, compiled: CompiledGrammar, token_ids: Sequence[int]) -> bool:
        """Whether the matcher follows the tokens, and the end of the sequence may come after them."""
        matcher = compiled.matcher()
        matcher.accept(token_ids)
        return matcher.failure is None and self.allows(matcher, self.eos)

    def allows(self, matcher: Matcher, token_id: int) -> bool:
        """Whether the token may come next."""
        mask = np.zeros(mask_words(self.tokenizer.get_vocab_size()), dtype=np.int32)
        matcher.fill_mask(mask)
        return bool(mask[token_id // 32] >> (token_id % 32) & 1)
