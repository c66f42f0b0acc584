"""The choice of the library that compiles grammars."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Sequence
from typing import Literal

from eagleray.errors import ConfigError, EagleRayError, InvalidRequest
from eagleray.grammars.llguidance_errors import GrammarTooLarge
from eagleray.grammars.matcher import CompiledGrammar, GrammarCompiler
from eagleray.grammars.timeouts import LOAD_SECONDS
from eagleray.log import get_logger
from eagleray.messages.grammars import Grammar

logger = get_logger(__name__)

GrammarBackend = Literal["auto", "llguidance", "xgrammar"]
"""Values of the option `structured_outputs_backend`."""


def check_backend(backend: GrammarBackend) -> None:
    """Raise `ConfigError` if the library is not installed."""
    if backend == "xgrammar" and not _has_xgrammar():
        raise ConfigError(
            "`structured_outputs_backend` xgrammar needs the package xgrammar: install eagleray[xgrammar], or use "
            "llguidance"
        )


def load_compiler(
    backend: GrammarBackend, tokenizer_json: str, *, vocab_size: int, eos_token_ids: Sequence[int]
) -> GrammarCompiler:
    """Return a compiler by this library; `auto`: by llguidance, and by xgrammar, if it is installed, where llguidance
    refuses. Raises `CheckpointError` for a tokenizer that the library cannot use."""

    def load_xgrammar() -> GrammarCompiler:
        from eagleray.grammars.xgrammar_compiler import XGrammarCompiler

        return XGrammarCompiler(tokenizer_json, vocab_size=vocab_size, eos_token_ids=eos_token_ids)

    if backend == "xgrammar":
        return load_xgrammar()
    from eagleray.grammars.llguidance_compiler import LLGuidanceCompiler

    first = LLGuidanceCompiler(tokenizer_json, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    if backend == "llguidance" or not _has_xgrammar():
        return first
    from eagleray.grammars.xgrammar_jobs import compile_job

    return FallbackCompiler(first, load_xgrammar, check_second=compile_job)


def max_load_seconds(backend: GrammarBackend) -> float:
    """Return the time that a compilation may take to load a library, besides its own."""
    return LOAD_SECONDS if backend == "auto" and _has_xgrammar() else 0.0


class FallbackCompiler:
    """Has a second compiler try what the first refuses.

    Loading the second takes seconds, so it is done when `check_second` has not refused a grammar, and once.
    """

    def __init__(
        self,
        first: GrammarCompiler,
        load_second: Callable[[], GrammarCompiler],
        *,
        check_second: Callable[[Grammar], object],
    ) -> None:
        self._first = first
        self._load_second = load_second
        self._check_second = check_second
        self._second: GrammarCompiler | EagleRayError | None = None
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """See `GrammarCompiler.compile`. The error is the first compiler's, also if the second cannot be loaded."""
        try:
            return self._first.compile(grammar)
        except GrammarTooLarge:
            raise  # another library would only take longer to find out
        except InvalidRequest as refusal:
            try:
                self._check_second(grammar)
                return self._loaded_second().compile(grammar)
            except EagleRayError:
                raise refusal from None

    def _loaded_second(self) -> GrammarCompiler:
        with self._lock:
            if self._second is None:
                try:
                    self._second = self._load_second()
                except EagleRayError as error:
                    logger.error("grammars that llguidance refuses are not tried with another library: %s", error)
                    self._second = error
        if isinstance(self._second, EagleRayError):
            raise self._second
        return self._second

    def close(self) -> None:
        """See `GrammarCompiler.close`."""
        self._first.close()
        if self._second is not None and not isinstance(self._second, EagleRayError):
            self._second.close()


def _has_xgrammar() -> bool:
    return importlib.util.find_spec("xgrammar") is not None
