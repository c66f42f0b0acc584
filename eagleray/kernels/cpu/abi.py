"""The C interface of the CPU kernels as ctypes, derived from its only declaration: the header `csrc/abi.h`.

The header is read when this module is imported, by a reader that accepts the subset of C that the header needs and
raises on everything else, so that nothing is skipped silently.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from ctypes import POINTER, Structure
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagleray.kernels.cpu.build.openmp import NativeUnavailable

SCALARS = {
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
RESULTS = SCALARS | {"void": None, "const char*": ctypes.c_char_p}
DIRECTIVES = {"#pragma once", "#include <stdint.h>"}

DECLARATION = re.compile(r"((?:[^{};]|\{[^{}]*\})+); ?")  # semicolons in braces do not end it
ENUM = re.compile(r"enum \{ (.*?),? \}")
CONSTANT = re.compile(r"(\w+)(?: = (\d+))?")
STRUCT = re.compile(r"typedef struct \{ (.+); \} (\w+)")
FUNCTION = re.compile(r"(\w[\w ]*\*?) (er_\w+)\((.+)\)")
VARIABLE = re.compile(r"(\w[\w *]*) (\w+)")
POINTER_TO = re.compile(r"(?:const )?(\w+)(?:\* const)?\*")


class CStruct(Structure):
    """Base of the structs of a header. Assigning a field that the header does not declare raises `AttributeError`."""

    __slots__ = ()


class CInterface:
    """The constants, structs and functions of a header. Constants and structs are attributes, under their names in C.

    `fingerprint` is the hash of the header, which a library that was compiled with it reports.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, header: bytes) -> None:
        self.fingerprint = fingerprint(header)
        self.structs: dict[str, type[CStruct]] = {}
        self._functions: dict[str, tuple[Any, list[Any]]] = {}
        code = _code(header.decode())
        if not re.fullmatch(f"(?:{DECLARATION.pattern})*", code):
            raise ValueError("the kernels' header does not end with a declaration")
        for declaration in DECLARATION.findall(code):
            self._read(declaration)

    def declare(self, library: ctypes.CDLL) -> ctypes.CDLL:
        """Give the functions of a library their types, and return it.

        Raises `NativeUnavailable` if the library was compiled with another header: its structs may differ, and it would
        read and write the wrong memory.
        """
        found = _reported_fingerprint(library)
        if found != self.fingerprint:
            raise NativeUnavailable(
                f"the kernels were compiled with another version of {HEADER.name} ({found}, this process has "
                f"{self.fingerprint}): restart the process, and if that does not help remove {library._name}"
            )
        for name, (result, arguments) in self._functions.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        return library

    def _read(self, declaration: str) -> None:
        if match := ENUM.fullmatch(declaration):
            self._read_enum(match[1].split(", "))
        elif match := STRUCT.fullmatch(declaration):
            fields = [self._variable(field) for field in match[1].split("; ")]
            struct = type(match[2], (CStruct,), {"__slots__": (), "_fields_": fields})
            self.structs[match[2]] = struct
            setattr(self, match[2], struct)
        elif (match := FUNCTION.fullmatch(declaration)) and match[1] in RESULTS:
            arguments = [] if match[3] == "void" else match[3].split(", ")
            self._functions[match[2]] = RESULTS[match[1]], [self._variable(argument)[1] for argument in arguments]
        else:
            raise _unsupported(declaration)

    def _read_enum(self, constants: list[str]) -> None:
        next_value = 0
        for constant in constants:
            match = CONSTANT.fullmatch(constant)
            if match is None:
                raise _unsupported(constant)
            value = next_value if match[2] is None else int(match[2])
            setattr(self, match[1], value)
            next_value = value + 1

    def _variable(self, text: str) -> tuple[str, Any]:
        match = VARIABLE.fullmatch(text)
        if match is None:
            raise _unsupported(text)
        return match[2], self._type(match[1])

    def _type(self, text: str) -> Any:
        """Return the type of a variable: of a pointer to a struct a typed pointer, of any other pointer an address,
        because that is what tensors and arrays provide."""
        values = SCALARS | self.structs
        if text in values:
            return values[text]
        match = POINTER_TO.fullmatch(text)
        if match and match[1] in SCALARS.keys() | {"void"}:
            return ctypes.c_void_p
        if match and match[1] in self.structs and text.count("*") == 1:
            return POINTER(self.structs[match[1]])
        raise _unsupported(text)


def fingerprint(header: bytes) -> str:
    """Return the hash by which a library and this process compare the headers they have read."""
    return hashlib.sha256(header).hexdigest()[:16]


def _code(header: str) -> str:
    """The declarations of a header in one line with single spaces, without comments and directives."""
    lines = [line.split("//")[0].strip() for line in header.splitlines()]
    return " ".join(" ".join(line for line in lines if line not in DIRECTIVES).split())


def _reported_fingerprint(library: ctypes.CDLL) -> str:
    try:
        report = library.er_abi_fingerprint
    except AttributeError:
        return "none"
    report.restype, report.argtypes = ctypes.c_char_p, []
    reported: bytes = report()
    return reported.decode()


def _unsupported(text: str) -> ValueError:
    return ValueError(f"the reader of the kernels' header does not support `{text}`")


HEADER = Path(__file__).with_name("csrc") / "abi.h"

abi = CInterface(HEADER.read_bytes())
