"""Compilation of Triton kernels for GPUs that this machine does not have, and what the machine code shows.

A process of its own compiles: where Triton interprets, the functions of its library are interpreted ones too, and the
compiler cannot call them.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import re
import subprocess
import traceback
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

CAPABILITIES = (80, 90, 100)
"""Ampere, Hopper, Blackwell."""

HOPPER_FIRST = [pytest.param(each, marks=() if each == 90 else pytest.mark.grid) for each in CAPABILITIES]
"""All of them, of which `make test` has Hopper: for kernels that differ from others in no feature of a GPU."""

MAX_SHARED_BYTES = 227 * 1024
"""Shared memory that a block may have on Hopper."""

OPCODE = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?(\w+)", re.MULTILINE)
"""The first word of a line of machine code, behind its predicate."""

USAGE = re.compile(r"\b(REG|STACK|LOCAL):(\d+)")
"""Pattern of the registers and the bytes of local memory that a thread of the kernel uses."""

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class CompiledKernel:
    shared_bytes: int
    registers: int
    """Registers of a thread."""
    instructions: frozenset[str]
    """Opcodes of the machine code, without their modifiers: `HGMMA`, `LDGSTS` …; empty if they were not asked for."""
    spills: bool
    """Whether registers are stored in local memory: in the stack of a thread, or beside it."""


def compile_kernel(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    capability: int,
    num_warps: int,
    num_stages: int,
    disassemble: bool = False,
    directory: Path,
) -> CompiledKernel:
    """Compile a kernel for a compute capability (90 is Hopper).

    `signature` has the type of each run-time parameter, such as `*bf16`, `*i32`, `i32` or `fp32`; `constants` has the
    value of each `constexpr`. Pointers are multiples of 16, as torch allocates them. `directory` is for temporary
    files. `disassemble` asks for the opcodes, which takes longer than the rest for a small kernel.
    """
    arguments = dict(signature), dict(constants), capability, num_warps, num_stages, disassemble, directory
    with mock.patch.dict(os.environ):
        os.environ.pop("TRITON_INTERPRET", None)  # for the compiling process, which the first call starts
        future = _compiler().submit(_compile, kernel.fn.__module__, kernel.fn.__name__, *arguments)
    result = future.result()
    assert isinstance(result, CompiledKernel), result
    return result


@functools.cache
def _compiler() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn"))


def _compile(
    module: str,
    name: str,
    signature: dict[str, str],
    constants: dict[str, Any],
    capability: int,
    num_warps: int,
    num_stages: int,
    disassemble: bool,
    directory: Path,
) -> CompiledKernel | str:
    """Return the text of an error in place of the error, which may be none that can be sent."""
    try:
        function = getattr(importlib.import_module(module), name)
        return _compile_function(
            function, signature, constants, capability, num_warps, num_stages, disassemble, directory
        )
    except Exception:
        return traceback.format_exc()


def _compile_function(
    function: JITFunction,
    signature: dict[str, str],
    constants: dict[str, Any],
    capability: int,
    num_warps: int,
    num_stages: int,
    disassemble: bool,
    directory: Path,
) -> CompiledKernel:
    types = {name: signature.get(name, "constexpr") for name in function.arg_names}
    missing = [name for name, kind in types.items() if kind == "constexpr" and name not in constants]
    assert not missing, f"neither a type nor a value was given for {missing}"
    aligned = {(index,): [["tt.divisibility", 16]] for index, kind in enumerate(types.values()) if kind.startswith("*")}
    compiled = triton.compile(
        ASTSource(function, types, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    binary = directory / f"{function.fn.__name__}-{capability}.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    usage = {name: int(number) for name, number in USAGE.findall(_cuobjdump("-res-usage", binary))}
    opcodes: frozenset[str] = frozenset()
    if disassemble:
        opcodes = frozenset(OPCODE.findall(_cuobjdump("-sass", binary)))
        assert "EXIT" in opcodes
    spills = usage["STACK"] > 0 or usage["LOCAL"] > 0
    return CompiledKernel(compiled.metadata.shared, usage["REG"], opcodes, spills)


def _cuobjdump(option: str, binary: Path) -> str:
    return subprocess.run([CUOBJDUMP, option, binary], check=True, capture_output=True, text=True).stdout
