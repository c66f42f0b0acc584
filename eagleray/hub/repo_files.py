"""Choice of the files of a repository that are downloaded, by their names alone. Pure.

The names come from a server, so they are not trusted: one that leads out of the directory refuses the repository.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from eagleray.config.json_files import shown
from eagleray.errors import CheckpointError
from eagleray.hub.needs import CONFIG_FILE, NeededFiles

TEXT_PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Configuration, tokenizers and templates."""

FOLDERS = re.compile(r"\d+_\w+|additional_chat_templates")
"""Folders that are read: of modules behind a model, such as 1_Pooling, and of further chat templates."""

MAX_NAME_CHARS = 512


def check_names(repo: str, names: Iterable[str]) -> None:
    """Raise `CheckpointError` if a file would be written outside of its directory."""
    for name in names:
        parts = name.split("/")
        if (
            len(name) > MAX_NAME_CHARS
            or any(part in ("", ".", "..") for part in parts)
            or any(character in name for character in "\\\0:")
        ):
            raise CheckpointError(
                f"model {repo!r}: the repository has a file named {shown(name)}, which could be written outside of "
                "its directory: nothing was written; do not use this repository"
            )


def choose_files(repo: str, names: Sequence[str], needs: NeededFiles, ignore_patterns: Sequence[str]) -> list[str]:
    """Return the names of the files to download, in order.

    Raises `CheckpointError` if a needed file is in a format that is not read, or missing.
    """
    check_names(repo, names)
    kept = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in ignore_patterns)]
    chosen = [name for name in kept if _is_read(name) and _matches(name, TEXT_PATTERNS)]
    if needs.config and CONFIG_FILE not in chosen:
        raise CheckpointError(f"model {repo!r}: the repository has no {CONFIG_FILE}{_advice_without_config(kept)}")
    if needs.weights:
        chosen += _weights(repo, kept)
    return sorted(set(chosen))


def _weights(repo: str, names: Sequence[str]) -> list[str]:
    weights = [name for name in names if _is_read(name) and name.endswith(".safetensors")]
    # Mistral's repositories hold the same weights a second time, under the names of its own format.
    if others := [name for name in weights if not name.startswith("consolidated")]:
        weights = others
    if any("/" not in name for name in weights):
        return weights
    raise CheckpointError(f"model {repo!r}: the repository has no *.safetensors files{_advice_without_weights(names)}")


def _is_read(name: str) -> bool:
    folder, _, rest = name.rpartition("/")
    return not folder or (FOLDERS.fullmatch(folder) is not None and bool(rest))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _advice_without_config(names: Sequence[str]) -> str:
    if "adapter_config.json" in names:
        return ": it is an adapter; serve its base model, with `--enable-lora --lora-modules NAME=DIRECTORY`"
    if any(name.endswith(".gguf") for name in names):
        return _advice_without_weights(names)
    return ", which a checkpoint in Hugging Face format has"


def _advice_without_weights(names: Sequence[str]) -> str:
    if any(name.endswith(".gguf") for name in names):
        return ": GGUF files are not read; take the repository that they were made from"
    if any(name.endswith((".bin", ".pth", ".pt")) for name in names):
        return (
            ", only PyTorch's *.bin files, which are not read because they may run code: convert them, for example "
            "with `AutoModelForCausalLM.from_pretrained(ID).save_pretrained(DIRECTORY)` of transformers, and serve "
            "the directory"
        )
    return "; weights are read from safetensors files only (for random weights: `--load-format dummy`)"
