"""Share of the memory's speed that products and decode attention of a few rows reach, in bfloat16.

python benchmarks/memory_share.py [--rows 1 16 32] [--context N] [--rounds N]

Products, attention over the cache and plain reads (`read_memory.h`) take turns in one thread, and each takes the next
stretch of memory that is larger than the processor's caches, so what it reads comes from memory. Times are those of the
processor: another program takes none of them, but makes all of them longer while it uses the same core.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forward import BLOCK, make_batch

from eagleray.kernels.cpu.abi import CStruct, abi
from eagleray.kernels.cpu.build.library import build, load, native_library
from eagleray.kernels.cpu.huge_pages import WeightChunk
from eagleray.kernels.forward_batch import ForwardBatch
from eagleray_bench.alternating_runs import AlternatingRuns

MEMORY_BYTES = 768 << 20
STRETCH_BYTES = 24 << 20
SHAPES = ((6144, 1024), (1024, 3072))
"""Outputs and inputs of the products, those of a model of 0.6 billion parameters. Both divide a stretch."""
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 128
BFLOAT16 = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32])
    parser.add_argument("--context", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    memory = WeightChunk.allocate(MEMORY_BYTES)
    memory.view(torch.bfloat16).fill_(0.01)
    readers: dict[str, Callable[[int], int]] = {"read": plain_read()}
    for rows in arguments.rows:
        for n, k in SHAPES:
            readers[f"{rows:3} rows, {n} x {k}"] = product_read(rows, n, k)
        readers[f"{rows:3} rows, attention"] = attention_read(make_batch([1] * rows, arguments.context))
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    at = 0
    for name in AlternatingRuns(count=arguments.rounds).order(list(readers)):
        began = time.thread_time()
        num_bytes = readers[name](memory.data_ptr() + at)
        seconds[name].append((time.thread_time() - began) / num_bytes)
        at = (at + STRETCH_BYTES) % MEMORY_BYTES
    plain = statistics.median(seconds["read"])
    for name, found in seconds.items():
        median = statistics.median(found)
        print(f"{name:<24} {1e-9 / median:6.2f} GB/s {plain / median:6.2f} of reading")


def plain_read() -> Callable[[int], int]:
    """Return a function that reads the stretch at an address, and returns its number of bytes, as the others here."""
    with tempfile.TemporaryDirectory() as directory:
        library: Any = load(build([Path(__file__).with_name("read_memory.cpp")], directory=Path(directory)))
    function = library.bench_read_memory
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_uint64

    def read(address: int) -> int:
        function(address, STRETCH_BYTES)
        return STRETCH_BYTES

    return read


def product_read(rows: int, n: int, k: int) -> Callable[[int], int]:
    """Return a function that multiplies rows with the weights in the stretch at an address.

    Its parameter `kept` holds the memory to which the product has addresses.
    """
    library: Any = native_library()
    x, y = torch.ones(rows, k, dtype=torch.bfloat16), torch.empty(rows, n)
    product: CStruct = abi.CProduct(
        x=x.data_ptr(), x_stride=k, num_rows=rows, n=n, k=k, epilogue=abi.EPILOGUE_STORE, y=y.data_ptr(), y_stride=n
    )
    size = n * k * x.itemsize

    def read(address: int, kept: object = (x, y)) -> int:
        for offset in range(0, STRETCH_BYTES - size + 1, size):
            product.weight = address + offset
            library.er_multiply(product, 1, BFLOAT16, 1)
        return STRETCH_BYTES // size * size

    return read


def attention_read(batch: ForwardBatch) -> Callable[[int], int]:
    """Return a function that attends to the layers of a cache in the stretch at an address.

    Its parameter `kept` holds the memory to which the metadata have addresses.
    """
    library: Any = native_library()
    rows, blocks = batch.block_table.shape
    params: CStruct = abi.CAttentionParams(
        num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK, scale=HEAD_DIM**-0.5
    )
    arrays = {
        name: np.ascontiguousarray(getattr(batch, name))
        for name in ("query_start_loc", "seq_lens", "block_table", "positions", "slot_mapping")
    }
    metadata: CStruct = abi.CAttentionMetadata(
        num_rows=rows,
        num_tokens=rows,
        table_stride=blocks,
        **{name: array.ctypes.data for name, array in arrays.items()},
    )
    queries = torch.ones(rows, NUM_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    out = torch.empty_like(queries)
    size: int = rows * blocks * library.er_block_elements(params) * queries.itemsize
    if size > STRETCH_BYTES:
        raise SystemExit(f"--rows {rows} with --context needs {size >> 20} MiB of {STRETCH_BYTES >> 20}: take fewer")

    def read(address: int, kept: object = (arrays, queries)) -> int:
        for offset in range(0, STRETCH_BYTES - size + 1, size):
            library.er_attend(params, metadata, queries.data_ptr(), address + offset, out.data_ptr(), None, BFLOAT16, 1)
        return STRETCH_BYTES // size * size

    return read


if __name__ == "__main__":
    main()
