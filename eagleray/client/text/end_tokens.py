"""Reads the ids of the tokens that end a sequence from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from eagleray.config.json_files import read_optional_json_object, shown
from eagleray.errors import CheckpointError

MAX_TOKEN_ID = 2**31 - 1
"""Token ids have 32 bits."""

MAX_EOS_TOKENS = 1024
"""Published models have up to three."""


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Return the end-of-sequence ids of generation_config.json, or else of config.json; none if neither has any."""
    paths = (directory / name for name in ("generation_config.json", "config.json"))
    return first_eos_token_ids((path, read_optional_json_object(path)) for path in paths)


def first_eos_token_ids(sources: Iterable[tuple[Path, Mapping[str, Any]]]) -> tuple[int, ...]:
    """Return the end-of-sequence ids of the first source that has some; each is a file with its fields."""
    for path, fields in sources:
        match fields.get("eos_token_id"):
            case None:
                pass
            case list(token_ids) if len(token_ids) <= MAX_EOS_TOKENS and all(map(_is_token_id, token_ids)):
                return tuple(token_ids)
            case token_id if _is_token_id(token_id):
                return (token_id,)
            case other:
                raise CheckpointError(
                    f"{path}: eos_token_id must be a token id or a list of up to {MAX_EOS_TOKENS} of them, but it is "
                    f"{shown(other)}"
                )
    return ()


def _is_token_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKEN_ID
