"""Grammars by xgrammar, which computes the masks of most states in advance, when it compiles.

Compiled in a process of its own, see `xgrammar_process`. xgrammar is an extra: it imports torch and transformers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import xgrammar

from eagleray.errors import InvalidRequest
from eagleray.grammars.matcher import TokenMask, mask_words
from eagleray.grammars.structural_tags import parse_structural_tag
from eagleray.grammars.xgrammar_process import CompileJob, CompileProcess, TokenVocabulary, tokenizer_info
from eagleray.grammars.xgrammar_schemas import PARAM, check_enforced
from eagleray.messages.grammars import Grammar
from eagleray.messages.structured_outputs import DEFAULT_WHITESPACE, MAX_WHITESPACE


class XGrammarCompiler:
    """`vocab_size` is the model's, which may have more ids than the tokenizer has tokens."""

    def __init__(self, tokenizer_json: str, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Start the process that compiles. `tokenizer_json` is a tokenizer.json."""
        vocabulary = _vocabulary(json.loads(tokenizer_json), vocab_size, eos_token_ids)
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._info = tokenizer_info(vocabulary)
        self._process = CompileProcess(vocabulary)
        self._process.start()

    def compile(self, grammar: Grammar) -> XGrammarGrammar:
        """See `GrammarCompiler.compile`."""
        serialized = self._process.compile(_job(grammar))
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

    def _accepts(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))


def _vocabulary(tokenizer: dict[str, Any], vocab_size: int, eos_token_ids: Sequence[int]) -> TokenVocabulary:
    """Return the vocabulary of a tokenizer.json."""
    model = tokenizer["model"]["vocab"]
    ids = model if isinstance(model, dict) else {entry[0]: number for number, entry in enumerate(model)}
    ids = ids | {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    tokens = [""] * vocab_size
    for token, token_id in ids.items():
        if token_id < vocab_size:
            tokens[token_id] = token
    decoder = tokenizer.get("decoder") or {}
    decoders = {part["type"] for part in decoder.get("decoders", [decoder]) if part}
    kinds = xgrammar.VocabType
    kind = kinds.BYTE_LEVEL if "ByteLevel" in decoders else kinds.RAW
    if "ByteFallback" in decoders:
        kind = kinds.BYTE_FALLBACK
    return TokenVocabulary(tokens=tokens, kind=kind.value, vocab_size=vocab_size, stop_token_ids=list(eos_token_ids))


def _job(grammar: Grammar) -> CompileJob:
    """Return the grammar in the form of the library. Raises `InvalidRequest` for what it does not enforce."""
    source = grammar.source
    match grammar.kind:
        case "json_schema":
            check_enforced(_parse_schema(source))
            return CompileJob(
                method="compile_json_schema", arguments=[source], options=_json_options(grammar.whitespace)
            )
        case "choice":
            texts = [{"type": "const_string", "value": text} for text in json.loads(source)]
            tag = {"type": "structural_tag", "format": {"type": "or", "elements": texts}}
            return CompileJob(method="compile_structural_tag", arguments=[json.dumps(tag)])
        case "regex":
            return CompileJob(method="compile_regex", arguments=[source])
        case "ebnf":
            return CompileJob(method="compile_grammar" if "::=" in source else "compile_lark", arguments=[source])
        case "structural_tag":
            return CompileJob(method="compile_structural_tag", arguments=[_structural_tag(source)])


def _json_options(whitespace: str) -> dict[str, Any]:
    options: dict[str, Any] = {"strict_mode": False}  # other properties are allowed unless the schema forbids them
    match whitespace:
        case "":
            return options | {"any_whitespace": False, "separators": [",", ":"]}
        case str() if whitespace == DEFAULT_WHITESPACE:
            return options | {"max_whitespace_cnt": MAX_WHITESPACE}
    raise InvalidRequest(
        "`whitespace_pattern` is not for the backend xgrammar: leave it out, or use the backend llguidance", param=PARAM
    )


def _structural_tag(source: str) -> str:
    """Return a structural tag in the newer form. Raises `InvalidRequest`."""
    form = msgspec.to_builtins(parse_structural_tag(source, PARAM))
    _check_schemas(form)
    return json.dumps({"type": "structural_tag", "format": form})


def _check_schemas(form: Any) -> None:
    """Raise `InvalidRequest` for a schema in a structural tag that is not enforced."""
    if isinstance(form, list):
        for part in form:
            _check_schemas(part)
    elif isinstance(form, dict):
        if form.get("type") == "json_schema":
            check_enforced(form["json_schema"])
        else:
            _check_schemas([*form.values()])


def _parse_schema(source: str) -> Any:
    try:
        return json.loads(source)
    except ValueError as error:
        raise InvalidRequest(f"the JSON schema is not valid JSON: {error}", param=PARAM) from None
