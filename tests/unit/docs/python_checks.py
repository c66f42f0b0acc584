"""Checks of documented Python that execute nothing: it compiles, and the names of eagleray in it exist."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator

import eagleray
from eagleray.config.keywords import LLMKeywords

CLASSES = {"llm": (eagleray.LLM, eagleray.AsyncLLM)}
"""Classes of which variables of these names are."""
OPTIONS = {*LLMKeywords.__annotations__, "model"}
KEYWORDS = {
    "LLM": OPTIONS,
    "AsyncLLM": OPTIONS,
    "EngineArgs": OPTIONS,
    "AsyncEngineArgs": OPTIONS,
    "SamplingParams": {*eagleray.SamplingParams.__struct_fields__},
}
"""Keyword arguments that calls may have, by the name of the class."""


def wrong_names(text: str) -> Iterator[str]:
    """Yield each name that eagleray does not have. Raises `SyntaxError`."""
    code = compile(text, "document", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert isinstance(code, ast.AST)
    for node in ast.walk(code):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "eagleray":
            module = importlib.import_module(node.module or "")
            yield from (f"{node.module}.{name.name}" for name in node.names if not hasattr(module, name.name))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KEYWORDS:
            known = KEYWORDS[node.func.id]
            yield from (f"{node.func.id}({word.arg}=)" for word in node.keywords if word.arg and word.arg not in known)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            classes = CLASSES.get(node.value.id, ())
            if classes and not any(hasattr(kind, node.attr) for kind in classes):
                yield f"{node.value.id}.{node.attr}"
