"""The system's permission to use the processor's matrix registers (AMX).

Nothing here imports torch, because `scripts/compile_kernels.py` runs before anything is installed.
"""

from __future__ import annotations

import ctypes
import platform
from typing import Final

SYS_ARCH_PRCTL: Final = 158
ARCH_REQ_XCOMP_PERM: Final = 0x1023
XFEATURE_XTILEDATA: Final = 18

REFUSED_FLAGS = ("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")
"""Flags of the compiler for a processor with matrix instructions whose registers the system refuses."""


def request_matrix_registers() -> bool:
    """Ask for the permission to use the matrix registers, and return whether this process has it."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return False
    return ctypes.CDLL(None).syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0
