"""The matrix registers of a processor that has them (AMX): no thread of Python's keeps them after a call."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from eagleray.kernels.cpu.build.library import native_library
from eagleray.kernels.cpu.build.openmp import NativeUnavailable
from eagleray.kernels.cpu.build.processor import processor_capabilities
from eagleray.kernels.cpu.linear import NativeLinear

RETURN = b"\xc3"
LOAD_SIZES = b"\xc4\xe2\x78\x49\x07" + RETURN  # ldtilecfg (%rdi)
STORE_SIZES = b"\xc4\xe2\x79\x49\x07" + RETURN  # sttilecfg (%rdi)
NOT_IN_USE = bytes(64)


@pytest.fixture(scope="module")
def registers():
    """A function that reads the sizes of the calling thread's matrix registers, and one that sets them."""
    if not processor_capabilities().get("amx_bf16"):
        pytest.skip("the processor has no matrix instructions")
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(LOAD_SIZES.ljust(16, RETURN) + STORE_SIZES)
    function, address = ctypes.CFUNCTYPE(None, ctypes.c_void_p), ctypes.addressof(ctypes.c_char.from_buffer(code))
    load, store = function(address), function(address + 16)

    def read() -> bytes:
        sizes = ctypes.create_string_buffer(64)
        store(sizes)
        return sizes.raw

    yield read, load
    del code  # kept until here


@pytest.fixture(scope="module")
def library():
    try:
        return native_library()
    except NativeUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_matrix_registers_after_product_are_not_in_use(registers, library, num_threads):
    read, load = registers
    sizes = bytearray(64)
    sizes[0], sizes[16], sizes[48] = 1, 64, 16  # one register of 16 rows of 64 bytes
    load((ctypes.c_char * 64).from_buffer(sizes))
    assert read() == bytes(sizes)
    load(NOT_IN_USE)

    n, k, rows = 4096, 1024, 20  # enough for two threads
    packed = torch.ones(library.er_packed_size(n, k, 1), dtype=torch.bfloat16)
    product = NativeLinear(
        library, packed, None, dtype=torch.bfloat16, n=n, k=k, is_gated=False, num_threads=num_threads
    )
    assert product(torch.ones(rows, k, dtype=torch.bfloat16)).eq(k).all()
    assert read() == NOT_IN_USE
