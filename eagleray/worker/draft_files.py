"""The files of a draft model, compared with those of the model before weights are read. Reads no weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagleray.config.json_files import read_json_object, shown
from eagleray.config.sections import ModelConfig
from eagleray.errors import ConfigError
from eagleray.hub.locate import checkpoint_dir, tokenizer_dir
from eagleray.hub.model_json import config_file, read_config

TOKENIZER_FILE = "tokenizer.json"


def check_draft_model(draft: ModelConfig, model: ModelConfig) -> None:
    """Raise `ConfigError` if the draft model has another vocabulary or tokenizer than the model. Both are pinned."""
    num_tokens, num_drafted = read_config(model).get("vocab_size"), read_config(draft).get("vocab_size")
    if num_tokens != num_drafted:
        raise ConfigError(
            f"option `speculative_config`: the draft model must have the vocabulary of the model, but `vocab_size` is "
            f"{shown(num_drafted)} in {config_file(draft)} and {shown(num_tokens)} in {config_file(model)}; take a "
            "draft model of the same family"
        )
    if not model.skip_tokenizer_init:
        _check_tokenizers(checkpoint_dir(draft) / TOKENIZER_FILE, tokenizer_dir(model) / TOKENIZER_FILE)


def _check_tokenizers(draft: Path, own: Path) -> None:
    """Raise `ConfigError` if the tokenizers have other ids for tokens. One that is missing is not compared."""
    if not (draft.is_file() and own.is_file()) or draft.read_bytes() == own.read_bytes():
        return
    if _token_ids(read_json_object(draft)) != _token_ids(read_json_object(own)):
        raise ConfigError(
            f"option `speculative_config`: the draft model must have the tokens of the model, but {draft} and {own} "
            "have different ones; take a draft model of the same family"
        )


def _token_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of all tokens by their text."""
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # of a Unigram model: pairs of a piece and its score
        vocabulary = {piece: index for index, (piece, _) in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}}
