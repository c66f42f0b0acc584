"""Finding or fetching the files of a draft model, as those of the model itself: a directory, the cache, the hub."""

from __future__ import annotations

import msgspec

from eagleray.config.sections import ModelConfig
from eagleray.config.speculation import Speculation
from eagleray.hub.gguf.files import find_gguf
from eagleray.hub.locate import checkpoint_dir
from eagleray.hub.needs import NeededFiles
from eagleray.hub.options import LOCK_TIMEOUT_SECONDS, HubOptions
from eagleray.hub.prepare import pin, retry_while_unreachable


def find_draft_model(
    model: ModelConfig, drafts: Speculation, *, lock_timeout: float = LOCK_TIMEOUT_SECONDS
) -> ModelConfig:
    """Return the pinned configuration of the draft model, whose files are on this host then.

    Two hosts may find different commits of a branch; that changes no token. `lock_timeout`: seconds to wait for another
    process that fetches the files. Raises `CheckpointError`, `ConfigError` and `DeadlineExceeded`.
    """
    gguf = find_gguf(drafts.model)
    draft = msgspec.structs.replace(
        model,
        model=drafts.model if gguf is None else str(gguf),
        revision=drafts.revision,
        quantization=drafts.quantization,
        tokenizer=None,
        tokenizer_revision=None,
        hf_config_path=None,
        hf_overrides={},
    )
    assert draft.model is not None
    needs = NeededFiles(config=True, weights=draft.load_format != "dummy", tokenizer=not draft.skip_tokenizer_init)
    revision = pin(
        draft.model, draft.revision, needs, HubOptions.of(draft, lock_timeout=lock_timeout), kind="draft model"
    )
    draft = msgspec.structs.replace(draft, revision=revision)
    checkpoint_dir(draft)
    return draft


def fetch_draft_model(model: ModelConfig, drafts: Speculation, *, timeout: float) -> ModelConfig:
    """Return what `find_draft_model` does. Waits up to `timeout` seconds for a hub that does not answer."""
    return retry_while_unreachable(lambda: find_draft_model(model, drafts, lock_timeout=timeout), timeout=timeout)
