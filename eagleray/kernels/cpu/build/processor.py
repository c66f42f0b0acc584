"""Instruction sets that the processor has and that the system lets a process use."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping
from typing import Final

import torch

from eagleray.kernels.cpu.build.variants import AMX_FEATURES, NATIVE_FLAGS

SYS_ARCH_PRCTL: Final = 158
ARCH_REQ_XCOMP_PERM: Final = 0x1023
XFEATURE_XTILEDATA: Final = 18


def processor_capabilities() -> Mapping[str, object]:
    """Return torch's names of the processor's features, without matrix instructions (AMX) if the system refuses them.

    A process has to ask Linux for the matrix registers before it uses them. The permission is for all of its threads. A
    system that is too old refuses it, and so does one that has a thread with a small stack for signals.
    """
    capabilities = torch.cpu.get_capabilities()
    if capabilities.get("amx_bf16") and not _request_matrix_registers():
        return {**capabilities, **dict.fromkeys(AMX_FEATURES, False)}
    return capabilities


def native_flags(capabilities: Mapping[str, object]) -> tuple[str, ...]:
    """Return the compiler's flags for this processor, which compile no instructions that the system refuses."""
    is_refused = torch.cpu.get_capabilities().get("amx_bf16") and not capabilities.get("amx_bf16")
    without = [f"-mno-{feature.replace('_', '-')}" for feature in AMX_FEATURES]
    return (*NATIVE_FLAGS, *without) if is_refused else NATIVE_FLAGS


def _request_matrix_registers() -> bool:
    """Ask for the permission to use the matrix registers, and return whether this process has it."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return False
    return ctypes.CDLL(None).syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0
