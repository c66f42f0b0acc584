"""Times of products with packed weights, by format and number of rows, in turn in one process.

python benchmarks/products.py [--shape OUTPUTS INPUTS] [--rows 1 16 32 256] [--formats int8 int4 fp8] [--seconds N]

A figure is the processor time of one thread, in microseconds for a panel of 32 outputs and all rows. A tenth, half and
nine tenths of the runs took no longer: neighbours on the same core slow some runs down. The ratios are those to the
same shares of the runs of bfloat16, which take turns with the others. Weights lie in the second- and third-level
caches; how much of them lies in the second differs from process to process. `EAGLERAY_CPU_KERNELS` chooses the variant
of the kernels.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from eagleray.kernels.cpu.abi import CStruct, abi
from eagleray.kernels.cpu.build.library import native_library
from eagleray.kernels.cpu.grouped import Grouping, in_groups, layout, pack, packed_size, quantize
from eagleray.kernels.cpu.huge_pages import WeightChunk
from eagleray.kernels.grouped import GroupedWeight
from eagleray.kernels.quantized import WeightFormat, quantize_fp8

BF16 = "bf16"
SHARES = (10, 50, 90)
"""Percentiles of the runs that are printed."""
RUN_SECONDS = 0.001
"""Least time of a run, of as many products as that takes."""


class MeasuredProduct:
    """The product of some rows with a weight in one format, and the seconds of its runs."""

    def __init__(self, weight: Tensor, kind: str, rows: Tensor) -> None:
        self.kind, self.num_rows = kind, len(rows)
        self._library = native_library()
        self._memory, grouping = self._pack(weight)
        outputs, inputs = weight.shape
        self._rows, self._results = rows, WeightChunk.allocate(4 * len(rows) * outputs)
        self._product: CStruct = abi.CProduct(
            x=rows.data_ptr(),
            x_stride=inputs,
            num_rows=len(rows),
            weight=self._memory.data_ptr(),
            n=outputs,
            k=inputs,
            epilogue=abi.EPILOGUE_STORE,
            y=self._results.data_ptr(),
            y_stride=outputs,
            grouping=grouping and grouping.pointer,
        )
        self._count = 1
        self.seconds: list[float] = []
        while self._run() * self._count < RUN_SECONDS:
            self._count *= 2

    def _pack(self, weight: Tensor) -> tuple[Tensor, Grouping | None]:
        """Return the packed weight, and the layout of its groups if it has any."""
        outputs, inputs = weight.shape
        if self.kind == BF16:
            memory = WeightChunk.allocate(2 * self._library.er_packed_size(outputs, inputs, 1))
            self._library.er_pack(weight.data_ptr(), inputs, outputs, inputs, memory.data_ptr(), 1, 1)
            return memory, None
        if self.kind == WeightFormat.FP8:
            quantized: GroupedWeight | Tensor | None = in_groups(quantize_fp8(weight))
        else:
            quantized = quantize(self._library, weight, WeightFormat(self.kind))
        if not isinstance(quantized, GroupedWeight):
            raise SystemExit(f"{inputs} inputs cannot be divided into groups of {self.kind}; give a multiple of 32")
        grouping = layout(quantized)
        memory = WeightChunk.allocate(packed_size(self._library, grouping, outputs, inputs))
        pack(self._library, quantized, memory)
        return memory, grouping

    def measure(self) -> None:
        self.seconds.append(self._run())

    def _run(self) -> float:
        began = time.thread_time()
        for _ in range(self._count):
            self._library.er_multiply(self._product, 1, 1, 1)
        return (time.thread_time() - began) / self._count


def lines(products: list[MeasuredProduct], panels: int) -> Iterator[str]:
    """Yield a line for each product. The first one is that of bfloat16."""
    usual = np.percentile(products[0].seconds, SHARES)
    for product in products:
        found = np.percentile(product.seconds, SHARES)
        times = "  ".join(f"{1e6 * seconds / panels:7.2f}" for seconds in found)
        ratios = "  ".join(f"{ratio:.2f}" for ratio in found / usual)
        yield f"{product.num_rows:5} rows  {product.kind}  {times} us   of {BF16}'s: {ratios}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=2, default=(3072, 1024), metavar=("OUTPUTS", "INPUTS"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 256])
    parser.add_argument("--formats", nargs="+", default=["int8", "int4"], choices=["int8", "int4", "fp8"])
    parser.add_argument("--seconds", type=float, default=5, help="of each number of rows")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    weight = (0.02 * torch.randn(*arguments.shape)).bfloat16()
    for count in arguments.rows:
        rows = torch.randn(count, arguments.shape[1]).bfloat16()
        products = [MeasuredProduct(weight, kind, rows) for kind in (BF16, *arguments.formats)]
        end = time.monotonic() + arguments.seconds
        while time.monotonic() < end:
            for product in products:
                product.measure()
        print("\n".join(lines(products, -(-arguments.shape[0] // abi.PANEL_ROWS))), flush=True)


if __name__ == "__main__":
    main()
