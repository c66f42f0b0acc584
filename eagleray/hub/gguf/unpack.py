"""The files of a checkpoint that are made of a GGUF file's header, once for each host.

Other checkpoints have the same files, but for `gguf.json`, which has the place of each tensor in the GGUF file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from eagleray.errors import CheckpointError
from eagleray.hub.disk_space import no_room, unwritable
from eagleray.hub.file_lock import file_lock
from eagleray.hub.gguf.config import config_fields, generation_fields
from eagleray.hub.gguf.files import gguf_directory, key_of
from eagleray.hub.gguf.header import GgufHeader, read_header
from eagleray.hub.gguf.tokenizer import tokenizer_config_fields, tokenizer_fields
from eagleray.hub.needs import CONFIG_FILE, GGUF_FILE, TOKENIZER_FILE, NeededFiles
from eagleray.hub.options import HubOptions
from eagleray.log import get_logger

logger = get_logger(__name__)

TOKENIZER_CONFIG_FILE, GENERATION_FILE = "tokenizer_config.json", "generation_config.json"


def unpack_gguf(name: str, needs: NeededFiles, options: HubOptions, *, key: str | None = None) -> str:
    """Make the files of a GGUF file's header unless they have been made, and return their key. `name`: see
    `is_pinned_gguf`.

    `key`: that of the host which started the deployment; `CheckpointError` is raised if the file is another one here.
    """
    path = Path(name)
    found = key_of(path)
    if key is not None and key != found:
        raise CheckpointError(f"{path}: differs from the file with which the deployment started; restart it")
    directory = gguf_directory(options.cache, name, found)
    wanted = [CONFIG_FILE, *([TOKENIZER_FILE] if needs.tokenizer else [])]
    if not all((directory / each).is_file() for each in wanted):
        purpose = f"model {name!r}"
        with file_lock(directory.parent / "eagleray.lock", timeout=options.lock_timeout, purpose=purpose):
            logger.info("reading the header of %s once, for files in %s", path, directory)
            files = _make_files(read_header(path), needs_tokenizer=needs.tokenizer)
            try:
                _write(directory, files)
            except OSError as error:
                full = no_room(error, directory, name=name)
                raise full or unwritable(purpose, directory, str(error.strerror)) from None
    return found


def _make_files(header: GgufHeader, *, needs_tokenizer: bool) -> dict[str, dict[str, Any]]:
    """Return the fields of each file, without those of a tokenizer that is not needed and not supported. The last one
    is the file that says that all others are there."""
    try:
        config = config_fields(header)
        files = {GENERATION_FILE: generation_fields(header), GGUF_FILE: _table(header, config)}
        try:
            files[TOKENIZER_CONFIG_FILE] = tokenizer_config_fields(header)
            files[TOKENIZER_FILE] = tokenizer_fields(header)
        except CheckpointError:
            if needs_tokenizer:
                raise
            files.pop(TOKENIZER_CONFIG_FILE, None)
    except (TypeError, AttributeError) as error:  # a text in place of a number, or the like
        header.fail(f"a field of the header is of another type than it should be ({error})")
    return {**files, CONFIG_FILE: config}


def _table(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any]:
    """Return the places of the tensors. `permuted_heads`: the number of heads of queries and of keys whose rows are in
    the order of llama.cpp, where features that are rotated together are neighbours; null if rows are not moved."""
    heads = [config["num_attention_heads"], config["num_key_value_heads"]]
    return {
        "file": str(header.path),
        "size": header.path.stat().st_size,
        "permuted_heads": heads if header.architecture == "llama" else None,
        "tensors": {name: [tensor.kind, tensor.shape, tensor.offset] for name, tensor in header.tensors.items()},
    }


def _write(directory: Path, files: dict[str, dict[str, Any]]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, fields in files.items():
        part = directory / f"{name}.incomplete"
        part.write_text(json.dumps(fields, ensure_ascii=False))
        os.replace(part, directory / name)
