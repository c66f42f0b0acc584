"""A faster interpretation of Triton's kernels, and log lines that tests can see."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from inspect import ismodule
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="session")
def interpreted_language() -> Iterator[None]:
    """Have the functions of Triton's language replaced by interpreted ones once, and not for every launch and every
    call between functions of kernels, which took about a third of the time of interpreted tests. Nothing else in this
    process uses the language."""
    if os.environ.get("TRITON_INTERPRET") != "1":  # kernels run on a GPU
        yield
        return
    from triton.runtime import interpreter

    patched: set[frozenset[str]] = set()
    patch = interpreter._patch_lang

    def patch_once(function: Callable[..., Any]) -> interpreter._LangPatchScope:
        """Return a scope that restores nothing."""
        visible = [value for value in function.__globals__.values() if ismodule(value)]
        seen = frozenset(module.__name__ for module in visible if module in (interpreter.tl, interpreter.tl.core))
        if seen not in patched:
            patch(function)
            patched.add(seen)
        return interpreter._LangPatchScope()

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
        yield


@pytest.fixture(autouse=True)
def visible_log() -> Iterator[None]:
    """Let log lines reach pytest's handler: a program that ran in this process before, such as `LLM`, has installed one
    of its own. Restore the handlers that a test replaces."""
    loggers = [logging.getLogger(name) for name in ("eagleray", "uvicorn")]
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    loggers[0].propagate = True
    loggers[0].setLevel(logging.NOTSET)
    yield
    for logger, handlers, level, propagates in before:
        for handler in set(logger.handlers) - set(handlers):
            handler.close()
        logger.handlers[:], logger.propagate = handlers, propagates
        logger.setLevel(level)
