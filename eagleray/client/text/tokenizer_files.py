"""Reads the files of a checkpoint that describe its tokenizer. Pure: a directory in, values out.

tokenizer.json is the tokenizer. The files beside it are of older formats; they may name special tokens, and add tokens
that tokenizer.json lacks. Precedence is as in transformers 5, so that prompts become the tokens that the model was
trained with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from eagleray.config.json_files import read_bounded, read_optional_json_object, shown
from eagleray.errors import CheckpointError

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_TOKENIZER_BYTES = 128 * 2**20
"""Published vocabularies of 256,000 tokens take 35 MiB."""

EXTRA_TOKENS = ("extra_special_tokens", "additional_special_tokens")


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, merged with special_tokens_map.json if it is of the kind that needs that file."""
    config = read_optional_json_object(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= read_optional_json_object(directory / "special_tokens_map.json")
    return config


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of `bos_token`, `eos_token` and so on under these names, which chat templates use."""
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    for name in EXTRA_TOKENS:
        if isinstance(config.get(name), Mapping):
            named |= config[name]
    return {name: _content(value) for name, value in named.items() if _is_token(value)}


def load_backend(directory: Path, config: Mapping[str, Any]) -> Backend:
    """Return the tokenizer of tokenizer.json, with the tokens that only the other files have."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path}: not found, but the tokenizer is read from it. Give the directory of one with the option "
            "`tokenizer`, or set `skip_tokenizer_init` to work with token ids alone"
        )
    backend = _read_backend(path)
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing: dict[str, AddedToken] = {}
    for token in _all_added_tokens(directory, config):
        if token.content and token.content not in known:
            missing.setdefault(token.content, token)
    backend.add_tokens(list(missing.values()))
    return backend


def chat_template_source(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name, empty without any. A single one is named `default`."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return {"default": read_bounded(path).decode("utf-8")}
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path}: is not UTF-8: {error}") from None
    match config.get("chat_template"):
        case None:
            return {}
        case str(template):
            return {"default": template}
        case list(templates):
            named = {entry["name"]: entry["template"] for entry in templates}
            if not all(isinstance(text, str) for pair in named.items() for text in pair):
                raise TypeError("a chat template has a name and a text")
            return named
        case other:
            raise CheckpointError(
                f"{directory / 'tokenizer_config.json'}: chat_template must be a text or a list of named texts, but it "
                f"is a {type(other).__name__}"
            )


def _read_backend(path: Path) -> Backend:
    """Return the tokenizer of a tokenizer.json. Raises `CheckpointError` if it cannot be read, or cannot encode."""
    size = path.stat().st_size
    if size > MAX_TOKENIZER_BYTES:
        raise CheckpointError(
            f"{path}: has {size / 2**20:,.0f} MiB, but no tokenizer needs more than {MAX_TOKENIZER_BYTES // 2**20}; it "
            "may be damaged"
        )
    try:
        backend = Backend.from_file(str(path))
        backend.no_truncation()
        backend.no_padding()
        backend.encode("a", add_special_tokens=False)
    except BaseException as error:  # a panic of the library is no `Exception`
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise CheckpointError(f"{path}: not a tokenizer: {shown(str(error))}") from None
    return backend


def _all_added_tokens(directory: Path, config: Mapping[str, Any]) -> Iterator[AddedToken]:
    """Yield the tokens that the files add, in the order in which missing ones get their ids."""
    special = set(named_tokens(config).values())
    by_id = {_id(index): _added_token(value) for index, value in config.get("added_tokens_decoder", {}).items()}
    if not by_id:
        for content, index in read_optional_json_object(directory / "added_tokens.json").items():
            is_special = content in special
            by_id[_id(index)] = AddedToken(content, normalized=not is_special, special=is_special)
    for _, token in sorted(by_id.items(), key=lambda entry: entry[0]):
        yield token
    for name in NAMED_TOKENS:
        if _is_token(config.get(name)):
            yield _special(config[name])
    for name in EXTRA_TOKENS:
        value = config.get(name) or []
        for token in value.values() if isinstance(value, Mapping) else value:
            yield _special(token)


def _id(value: Any) -> int:
    """Return the token id written as a key or a value of one of the files."""
    try:
        return int(value)
    except (ValueError, OverflowError):
        raise TypeError(f"a token id must be a number, but it is {shown(value)}") from None


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, Mapping) and "content" in value)


def _content(value: str | Mapping[str, Any]) -> str:
    return value if isinstance(value, str) else str(value["content"])


def _special(value: str | Mapping[str, Any]) -> AddedToken:
    return AddedToken(value, special=True) if isinstance(value, str) else _added_token({**value, "special": True})


def _added_token(value: Mapping[str, Any]) -> AddedToken:
    flags = {name: bool(value[name]) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in value}
    return AddedToken(value["content"], special=bool(value.get("special")), **flags)
