"""Instruction sets that the processor has and that the system lets a process use."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from eagleray.kernels.cpu.build.matrix_registers import REFUSED_FLAGS, request_matrix_registers
from eagleray.kernels.cpu.build.variants import AMX_FEATURES, NATIVE_FLAGS


def processor_capabilities() -> Mapping[str, object]:
    """Return torch's names of the processor's features, without matrix instructions (AMX) if the system refuses them.

    A process has to ask Linux for the matrix registers before it uses them. The permission is for all of its threads. A
    system that is too old refuses it, and so does one that has a thread with a small stack for signals.
    """
    capabilities = torch.cpu.get_capabilities()
    if capabilities.get("amx_bf16") and not request_matrix_registers():
        return {**capabilities, **dict.fromkeys(AMX_FEATURES, False)}
    return capabilities


def native_flags(capabilities: Mapping[str, object]) -> tuple[str, ...]:
    """Return the compiler's flags for this processor, which compile no instructions that the system refuses."""
    is_refused = torch.cpu.get_capabilities().get("amx_bf16") and not capabilities.get("amx_bf16")
    return (*NATIVE_FLAGS, *REFUSED_FLAGS) if is_refused else NATIVE_FLAGS
