"""Options of searches and downloads, from a model's configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from eagleray.config.sections import ModelConfig
from eagleray.hub.cache import cache_dir

LOCK_TIMEOUT_SECONDS = 6 * 3600.0
"""Time for which the start of a program waits while another one downloads the same model."""


@dataclass(frozen=True)
class HubOptions:
    cache: Path
    token: str | None = field(default=None, repr=False)
    """Token of the user; None for the one that the environment or a login has."""
    ignore_patterns: tuple[str, ...] = ()
    lock_timeout: float = LOCK_TIMEOUT_SECONDS

    @classmethod
    def of(cls, model: ModelConfig, *, lock_timeout: float = LOCK_TIMEOUT_SECONDS) -> HubOptions:
        return cls(
            cache_dir(model.download_dir),
            token=model.hf_token or None,
            ignore_patterns=tuple(model.ignore_patterns),
            lock_timeout=lock_timeout,
        )
