"""The tokenizer.json and the tokenizer_config.json of the tokenizer in a GGUF file's header."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from eagleray.config.json_files import shown
from eagleray.hub.gguf.header import GgufHeader
from eagleray.hub.gguf.pre_tokenizers import PRE_TOKENIZERS
from eagleray.hub.gguf.sentence_pieces import SPACE, merges_of

ADVICE = "give the directory of the tokenizer with the option `tokenizer`"
NAMED_TOKENS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
"""Token that a field of the header has the id of → field of tokenizer_config.json."""
TEMPLATE = "tokenizer.chat_template"


class TokenType(IntEnum):
    """The numbers of the list `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_fields(header: GgufHeader) -> dict[str, Any]:
    """Return the fields of tokenizer.json. Raises `CheckpointError` for a kind of tokenizer that is not supported."""
    kind = header.fields.get("tokenizer.ggml.model")
    if kind not in KINDS:
        header.fail(f"the tokenizer {shown(kind)} is not supported; supported are {' and '.join(KINDS)}; {ADVICE}")
    return KINDS[kind](header)


def tokenizer_config_fields(header: GgufHeader) -> dict[str, Any]:
    """Return the fields of tokenizer_config.json: the texts of named tokens, and the chat template."""
    tokens = header.texts("tokenizer.ggml.tokens")
    fields: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    for theirs, ours in NAMED_TOKENS.items():
        if (token_id := header.fields.get(f"tokenizer.ggml.{theirs}_token_id")) is not None:
            fields[ours] = _token(header, tokens, token_id)
    if (template := header.fields.get(TEMPLATE)) is not None:
        named = {
            name.removeprefix(f"{TEMPLATE}."): text
            for name, text in header.fields.items()
            if name.startswith(f"{TEMPLATE}.")
        }
        entries = [{"name": name, "template": text} for name, text in {"default": template, **named}.items()]
        fields["chat_template"] = entries if named else template
    return fields


def _byte_level(header: GgufHeader) -> dict[str, Any]:
    kind = header.fields.get("tokenizer.ggml.pre")
    if kind not in PRE_TOKENIZERS:
        supported = ", ".join(PRE_TOKENIZERS)
        header.fail(f"the pre-tokenizer {shown(kind)} is not supported; supported are {supported}; {ADVICE}")
    pre = PRE_TOKENIZERS[kind]
    merges = [merge.split(" ") for merge in header.texts("tokenizer.ggml.merges")]
    if wrong := next((merge for merge in merges if len(merge) != 2), None):
        header.fail(f"a merge of the tokenizer must be two tokens, but one is {shown(wrong)}")
    return _tokenizer(
        header,
        normalizer=pre.normalizer,
        pre_tokenizer=pre.pre_tokenizer,
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        adds_bos=pre.adds_bos,
        model={"ignore_merges": pre.ignores_merges, "merges": merges},
    )


def _sentence_pieces(header: GgufHeader) -> dict[str, Any]:
    """Return the tokenizer of SentencePiece's BPE, as published checkpoints have it: spaces become a character of the
    vocabulary, and unknown characters bytes."""
    tokens = header.texts("tokenizer.ggml.tokens")
    types = _types(header, len(tokens))
    scores = header.numbers("tokenizer.ggml.scores", len(tokens))
    pieces = {
        token: score for token, kind, score in zip(tokens, types, scores, strict=True) if kind == TokenType.NORMAL
    }
    has_prefix = header.fields.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [{"type": "Prepend", "prepend": SPACE}] if has_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    to_space = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    from_space = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.UNKNOWN), None)
    return _tokenizer(
        header,
        normalizer={"type": "Sequence", "normalizers": [*prefix, to_space]},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": [from_space, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        adds_bos=True,
        model={
            "merges": merges_of(pieces),
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": TokenType.BYTE in types,
        },
    )


KINDS = {"gpt2": _byte_level, "llama": _sentence_pieces}
"""The kinds of tokenizers that are read, by the field `tokenizer.ggml.model`."""


def _tokenizer(
    header: GgufHeader,
    *,
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    decoder: dict[str, Any],
    adds_bos: bool,
    model: dict[str, Any],
) -> dict[str, Any]:
    """Return the fields of tokenizer.json. All tokens are in the vocabulary, so that each has its own id. `adds_bos`:
    whether the first token is that of the beginning if the header does not say it. `model`: fields of the BPE."""
    tokens = header.texts("tokenizer.ggml.tokens")
    types = _types(header, len(tokens))
    used = [(token_id, token) for token_id, token in enumerate(tokens) if types[token_id] != TokenType.UNUSED]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(token_id, token, types[token_id])
            for token_id, token in used
            if types[token_id] in (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)
        ],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _template(header, tokens, adds_bos=adds_bos),
        "decoder": decoder,
        "model": {"type": "BPE", "vocab": {token: token_id for token_id, token in used}, **model},
    }


def _types(header: GgufHeader, count: int) -> list[int]:
    if "tokenizer.ggml.token_type" not in header.fields:
        return [TokenType.NORMAL] * count
    return header.numbers("tokenizer.ggml.token_type", count)


def _added_token(token_id: int, token: str, kind: int) -> dict[str, Any]:
    """Return a token that is found in a text before it is divided into others."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": token, **flags, "special": kind != TokenType.USER_DEFINED}


def _template(header: GgufHeader, tokens: list[str], *, adds_bos: bool) -> dict[str, Any] | None:
    """Return the processor that puts tokens around a text; None if there are no such tokens."""
    around = {
        name: _token(header, tokens, token_id)
        for name, default in (("bos", adds_bos), ("eos", False))
        if header.fields.get(f"tokenizer.ggml.add_{name}_token", default)
        and (token_id := header.fields.get(f"tokenizer.ggml.{name}_token_id")) is not None
    }
    if not around:
        return None

    def parts(text: str, number: int) -> list[dict[str, Any]]:
        special = {name: [{"SpecialToken": {"id": token, "type_id": number}}] for name, token in around.items()}
        sequence = {"Sequence": {"id": text, "type_id": number}}
        return [*special.get("bos", []), sequence, *special.get("eos", [])]

    ids = {token: header.fields[f"tokenizer.ggml.{name}_token_id"] for name, token in around.items()}
    return {
        "type": "TemplateProcessing",
        "single": parts("A", 0),
        "pair": [*parts("A", 0), *parts("B", 1)],
        "special_tokens": {token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in ids},
    }


def _token(header: GgufHeader, tokens: list[str], token_id: Any) -> str:
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        header.fail(f"the tokenizer names the token {shown(token_id)}, but it has {len(tokens)} tokens")
    return tokens[token_id]
