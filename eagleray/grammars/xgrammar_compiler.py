"""Grammars by xgrammar, which computes the masks of most states in advance, when it compiles.

Compiled in a process of its own, see `xgrammar_process`. xgrammar is an extra: it imports torch and transformers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xgrammar

from eagleray.errors import CheckpointError, InvalidRequest
from eagleray.grammars.matcher import TokenMask, mask_words
from eagleray.grammars.xgrammar_jobs import compile_job
from eagleray.grammars.xgrammar_process import CompileProcess, TokenVocabulary, tokenizer_info
from eagleray.grammars.xgrammar_schemas import PARAM
from eagleray.messages.grammars import Grammar

KINDS = {"ByteLevel": xgrammar.VocabType.BYTE_LEVEL, "ByteFallback": xgrammar.VocabType.BYTE_FALLBACK}
"""Kinds of vocabularies by the decoder of the tokenizer."""


class XGrammarCompiler:
    """`vocab_size` is the model's, which may have more ids than the tokenizer has tokens."""

    def __init__(self, tokenizer_json: str, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Start the process that compiles. `tokenizer_json` is a tokenizer.json. Raises `CheckpointError` for one that
        the library cannot use."""
        vocabulary = _vocabulary(json.loads(tokenizer_json), vocab_size, eos_token_ids)
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._info = tokenizer_info(vocabulary)
        self._process = CompileProcess(vocabulary)
        self._process.start()

    def compile(self, grammar: Grammar) -> XGrammarGrammar:
        """See `GrammarCompiler.compile`."""
        serialized = self._process.compile(compile_job(grammar))
        compiled = xgrammar.CompiledGrammar.deserialize_json(serialized, self._info)
        result = XGrammarGrammar(compiled, self._eos_token_ids)
        mask = np.zeros(mask_words(self._vocab_size), dtype=np.int32)
        result.matcher().fill_mask(mask)
        if not mask.any():
            raise InvalidRequest("the grammar matches no text: no token can come first", param=PARAM)
        return result

    def close(self) -> None:
        """See `GrammarCompiler.close`: end the process that compiles."""
        self._process.close()


class XGrammarGrammar:
    def __init__(self, compiled: xgrammar.CompiledGrammar, eos_token_ids: frozenset[int]) -> None:
        self._compiled = compiled
        self._eos_token_ids = eos_token_ids
        self.num_bytes: int = compiled.memory_size_bytes

    def matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._eos_token_ids)


class XGrammarMatcher:
    def __init__(self, matcher: xgrammar.GrammarMatcher, eos_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self.failure: str | None = None

    @property
    def is_complete(self) -> bool:
        """See `Matcher.is_complete`."""
        return bool(self._matcher.is_completed())

    def fill_mask(self, mask: TokenMask) -> None:
        """See `Matcher.fill_mask`."""
        if self.failure is None:
            self._matcher.fill_next_token_bitmask(torch.from_numpy(mask[None]))

    def accept(self, token_ids: Sequence[int]) -> None:
        """See `Matcher.accept`."""
        for token_id in token_ids:
            if self.failure is None and token_id not in self._eos_token_ids and not self._accepts(token_id):
                self.failure = f"the grammar does not allow the token {token_id} that was generated"

    def copy(self) -> XGrammarMatcher:
        """See `Matcher.copy`."""
        copy = XGrammarMatcher(self._matcher.fork(), self._eos_token_ids)
        copy.failure = self.failure
        return copy

    def _accepts(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))


def _vocabulary(tokenizer: dict[str, Any], vocab_size: int, eos_token_ids: Sequence[int]) -> TokenVocabulary:
    """Return the vocabulary of a tokenizer.json. Raises `CheckpointError` for a kind that the library does not know."""
    model = tokenizer["model"]["vocab"]
    ids = model if isinstance(model, dict) else {entry[0]: number for number, entry in enumerate(model)}
    ids = ids | {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    tokens = [""] * vocab_size
    for token, token_id in ids.items():
        if token_id < vocab_size:
            tokens[token_id] = token
    decoder = tokenizer.get("decoder") or {}
    decoders = {part["type"] for part in decoder.get("decoders", [decoder]) if part}
    kind = next((kind for name, kind in KINDS.items() if name in decoders), None)
    if kind is None:
        known, found = " or ".join(KINDS), ", ".join(sorted(decoders)) or "none"
        raise CheckpointError(
            f"xgrammar cannot use this model's tokenizer: it needs a decoder {known}, but the tokenizer has {found}"
        )
    return TokenVocabulary(tokens=tokens, kind=kind.value, vocab_size=vocab_size, stop_token_ids=list(eos_token_ids))
