"""The ways in which byte-level tokenizers divide a text before they merge bytes, by the names that GGUF has for them.

Each is that of the tokenizer.json which the family's authors published.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The parts of tokenizer.json before the merges of a byte-level tokenizer."""

    pre_tokenizer: dict[str, Any]
    normalizer: dict[str, Any] | None = None
    ignores_merges: bool = False
    """Whether a word that is a token is taken without its merges."""
    adds_bos: bool = False
    """Whether a text begins with the token of the beginning if the header does not say it."""


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(regex: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


_GPT2 = PreTokenizer(_byte_level(use_regex=True))
_LLAMA3 = PreTokenizer(_split(LLAMA3), ignores_merges=True, adds_bos=True)
_DIGITS = {"type": "Digits", "individual_digits": True}

PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": PreTokenizer(_split(QWEN2), normalizer={"type": "NFC"}),
    "smollm": PreTokenizer({"type": "Sequence", "pretokenizers": [_DIGITS, _byte_level(use_regex=True)]}),
    "tekken": PreTokenizer(_split(TEKKEN), ignores_merges=True, adds_bos=True),
}
"""The supported ones, by the field `tokenizer.ggml.pre`."""
