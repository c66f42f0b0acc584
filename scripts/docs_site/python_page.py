"""Reference of the Python API: the public names, with their signatures, fields and docstrings."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from enum import Enum
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any

from docs_site.markdown import code, directive

PACKAGE = "eagleray"
MODULES = (PACKAGE, f"{PACKAGE}.serve", f"{PACKAGE}.data", f"{PACKAGE}.weights", f"{PACKAGE}.errors")
"""Modules whose public names are listed, as far as they exist."""

FIELD_MARKS = ("__dataclass_fields__", "__struct_fields__", "__required_keys__", "__members__")
"""Attributes of the classes whose fields are listed: dataclasses, structs, typed dictionaries, enumerations."""
WRAPPERS = ("Annotated", "Required", "NotRequired")
"""Annotations around a type that are not shown."""


class SourceText:
    """Annotation or default that a signature shows as it is written."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def page() -> str:
    return "# Python\n\n" + "".join(_module(name) for name in MODULES if find_spec(name) is not None)


def _module(name: str) -> str:
    module = importlib.import_module(name)
    entries = "".join(_entry(public, getattr(module, public)) for public in public_names(module))
    return f"## {name}\n\n{directive('py:module', name, '')}{_docstring(module)}\n\n{entries}"


def public_names(module: ModuleType) -> list[str]:
    """Return the public names of a module: `__all__`, or else everything that it defines."""
    defined = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return [name for name in getattr(module, "__all__", defined) if not name.startswith("_")]


def _entry(name: str, value: Any) -> str:
    if inspect.isclass(value) and value.__name__ != name:
        return directive("py:class", name, f"Another name of `{value.__name__}`.")
    if inspect.isclass(value):
        members = "".join(_member(name, member) for name, member in _members(value))
        bases = [code(base.__name__) for base in value.__bases__ if base.__module__.partition(".")[0] == PACKAGE]
        derived = f"Derived from {', '.join(bases)}.\n\n" if bases else ""
        body = f"{_docstring(value)}\n\n{derived}{''.join(_fields(value))}{members}"
        return directive("py:class", f"{name}{_signature(value)}", body)
    if inspect.isfunction(value):
        return directive("py:function", f"{name}{_signature(value)}", _docstring(value))
    return directive("py:data", name, f"`{value}`")


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of a class, including inherited ones of eagleray's classes."""
    seen: set[str] = set()
    for base in kind.__mro__:
        for name, value in vars(base).items() if base.__module__.partition(".")[0] == PACKAGE else ():
            if (
                not name.startswith("_")
                and name not in seen
                and isinstance(value, property | classmethod | FunctionType)
            ):
                seen.add(name)
                yield name, value


def _member(name: str, value: Any) -> str:
    if isinstance(value, property):
        kind = inspect.signature(value.fget).return_annotation
        return directive("py:property", f"{name}\n:type: {kind}\n", _docstring(value))
    function = getattr(value, "__func__", value)
    flags = [":classmethod:"] * isinstance(value, classmethod) + [":async:"] * inspect.iscoroutinefunction(function)
    return directive("py:method", f"{name}{_signature(function)}", "\n".join([*flags, "", _docstring(function)]))


def _fields(kind: type) -> Iterator[str]:
    """Yield the public fields of a dataclass, struct or typed dictionary, or the members of an enumeration, each with
    the text behind it or in its annotation."""
    if not any(hasattr(kind, mark) for mark in FIELD_MARKS):
        return
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    for node, following in zip(body, [*body[1:], None], strict=True):
        text = _string(following.value) if isinstance(following, ast.Expr) else None
        if isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_"):
            yield directive("py:attribute", _field(node), text or _description(node.annotation))
        elif isinstance(node, ast.Assign) and issubclass(kind, Enum):
            yield directive(
                "py:attribute", f"{ast.unparse(node.targets[0])}\n:value: {ast.unparse(node.value)}\n", text or ""
            )


def _field(node: ast.AnnAssign) -> str:
    annotation = node.annotation
    while isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in WRAPPERS:
        inner = annotation.slice
        annotation = inner.elts[0] if isinstance(inner, ast.Tuple) else inner
    options = [f":type: {ast.unparse(annotation)}"]
    if node.value is not None and not isinstance(node.value, ast.Call):
        options.append(f":value: {ast.unparse(node.value)}")
    return "\n".join([ast.unparse(node.target), *options, ""])


def _description(annotation: ast.expr) -> str:
    """Return the description in the `Meta` of an annotation."""
    keywords = (node for node in ast.walk(annotation) if isinstance(node, ast.keyword))
    return next((_string(keyword.value) or "" for keyword in keywords if keyword.arg == "description"), "")


def _string(node: ast.expr) -> str | None:
    return " ".join(node.value.split()) if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _docstring(value: Any) -> str:
    return inspect.cleandoc(value.__doc__ or "")


def _signature(value: Any) -> str:
    """Return the signature as it is written, without `self`, or an empty text if it is not worth showing."""
    if inspect.isclass(value) and (
        hasattr(value, "__struct_fields__") or issubclass(value, BaseException | Enum | dict)
    ):
        return ""
    try:
        signature = inspect.signature(value)
    except ValueError:
        return ""
    parameters = [
        parameter.replace(annotation=_written(parameter.annotation))
        for name, parameter in signature.parameters.items()
        if name not in ("self", "cls")
    ]
    returned = signature.empty if inspect.isclass(value) else _written(signature.return_annotation)
    return str(signature.replace(parameters=parameters, return_annotation=returned))


def _written(annotation: Any) -> Any:
    return SourceText(annotation) if isinstance(annotation, str) else annotation
