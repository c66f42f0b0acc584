"""eagleray: a Ray-native inference engine for large language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eagleray.messages.sampling import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from eagleray.llm import LLM

__all__ = ["LLM", "RequestOutputKind", "SamplingParams", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # LLM pulls in sockets and the tokenizer; `eagleray --help` needs neither.
    if name == "LLM":
        from eagleray.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
