"""Weights that are packed for the kernels: arguments of ops of a pass, and products that are computed at once."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from eagleray.kernels.cpu.abi import CStruct, abi
from eagleray.kernels.cpu.adapters import NativeAdapterSite
from eagleray.kernels.cpu.grouped import Grouping
from eagleray.kernels.params import ClampedSwiglu
from eagleray.kernels.recording import EmbeddingTable, LinearWeight
from eagleray.kernels.storage import memory_of

SINGLE_THREAD_SECONDS = 150e-6
"""Work that takes one thread less than this is not worth waking another."""
BYTES_PER_SECOND = 60e9
"""Rough memory bandwidth of one thread."""
OPERATIONS_PER_SECOND = 400e9
"""Rough arithmetic rate of one thread."""


def threads_for(num_weights: int, num_bytes: int, num_rows: int, num_threads: int) -> int:
    """Return the number of threads, at most `num_threads`, that multiply `num_rows` with `num_weights` fastest, which
    take `num_bytes`."""
    seconds = max(num_bytes / BYTES_PER_SECOND, 2 * num_rows * num_weights / OPERATIONS_PER_SECOND)
    return 1 if seconds < SINGLE_THREAD_SECONDS else num_threads


def weight_bits(dtype: torch.dtype, grouping: ctypes._Pointer[CStruct] | None) -> int:
    """Return the bits of a packed number. `grouping`: the layout of a weight of few bits, or null."""
    bits: int = grouping.contents.bits if grouping else 8 * dtype.itemsize
    return bits


class NativeLinear(LinearWeight):
    """A packed weight of a product with rows of `dtype`. `grouping`: the layout of a weight of few bits.

    `n` is the number of outputs before gating: if `is_gated`, half of them are gates. `k` is the number of inputs.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        packed: Tensor,
        bias: Tensor | None,
        *,
        dtype: torch.dtype,
        grouping: Grouping | None = None,
        n: int,
        k: int,
        is_gated: bool,
        clamp: ClampedSwiglu | None = None,
        num_threads: int,
    ) -> None:
        self.packed = packed
        self.dtype = dtype
        self.grouping = grouping
        self.n, self.k = n, k
        self.bias = None if bias is None else bias.float().contiguous()
        self._library = library
        self._num_threads = num_threads
        self.is_gated = is_gated
        self.is_float32 = not is_gated
        self.size = n // 2 if is_gated else n
        self.swiglu = (
            abi.CClampedSwiglu() if clamp is None else abi.CClampedSwiglu(alpha=clamp.alpha, limit=clamp.limit)
        )
        gated_epilogue = abi.EPILOGUE_SILU if clamp is None else abi.EPILOGUE_CLAMPED_SWIGLU
        self.epilogue = gated_epilogue if is_gated else abi.EPILOGUE_STORE
        self._out = torch.empty(0, self.size, dtype=dtype if is_gated else torch.float32)
        self._num_out = 0
        """Rows of `_out`."""
        self._out_address = 0
        self._product = abi.CProduct(
            x_stride=k,
            n=n,
            k=k,
            epilogue=self.epilogue,
            swiglu=self.swiglu,
            y_stride=self.size,
            grouping=None if grouping is None else grouping.pointer,
        )

    def storage(self) -> list[Tensor]:
        return memory_of(self.packed, self.bias)

    def c_multiply(self, *, adds: bool, adapters: NativeAdapterSite | None = None) -> CStruct:
        """Return the arguments of an op, which point into this object and into `adapters`. `adds`: it adds the product
        to its output."""
        assert not (adds and self.is_gated)
        return abi.CMultiply(
            n=self.n,
            k=self.k,
            epilogue=abi.EPILOGUE_ADD if adds else self.epilogue,
            swiglu=self.swiglu,
            weight=self.packed.data_ptr(),
            bias=self._bias_address,
            grouping=None if self.grouping is None else self.grouping.pointer,
            adapters=None if adapters is None else ctypes.pointer(adapters.c_site()),
        )

    @property
    def _bias_address(self) -> int | None:
        return None if self.bias is None else self.bias.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        x, dtype = x.contiguous(), self.dtype
        assert x.dtype == dtype and x.shape[1] == self.k
        num_rows = x.shape[0]
        product = self.c_product()
        product.x, product.num_rows, product.y = x.data_ptr(), num_rows, self.reserve(num_rows)
        self._library.er_multiply(product, 1, int(dtype == torch.bfloat16), self.threads(num_rows))
        return self._out if num_rows == self._num_out else self._out[:num_rows]

    def c_product(self) -> CStruct:
        """Return the arguments of a product that is computed at once. Its inputs are to be set, and `reserve`d memory
        for its result. They point into this object and are overwritten by its next product."""
        self._product.weight, self._product.bias = self.packed.data_ptr(), self._bias_address
        return self._product

    def reserve(self, num_rows: int) -> int:
        """Return the address of memory for the result of `num_rows` rows, which the next product overwrites."""
        if num_rows > self._num_out:
            self._num_out, self._out = num_rows, torch.empty(num_rows, self.size, dtype=self._out.dtype)
            self._out_address = self._out.data_ptr()
        return self._out_address

    def threads(self, num_rows: int) -> int:
        """Return the number of threads that compute the product of `num_rows` rows."""
        return threads_for(self.n * self.k, self.packed.nbytes, num_rows, self._num_threads)


class NativeEmbedding(EmbeddingTable):
    """The vectors [num_own, size] of the tokens from id `first` on, plain or packed as the weight of a product.
    `grouping`: the layout of a packed weight of few bits."""

    def __init__(
        self,
        values: Tensor,
        *,
        size: int,
        num_own: int,
        first: int,
        is_packed: bool,
        grouping: Grouping | None = None,
    ) -> None:
        self.size = size
        self._values = values.contiguous()
        self._num_own = num_own
        self._first = first
        self._is_packed = is_packed
        self._grouping = grouping

    def storage(self) -> list[Tensor]:
        return memory_of(self._values)

    def c_embed(self) -> CStruct:
        """Return the arguments of an op, which point into this object."""
        return abi.CEmbed(
            values=self._values.data_ptr(),
            is_packed=self._is_packed,
            grouping=None if self._grouping is None else self._grouping.pointer,
            size=self.size,
            first=self._first,
            num_own=self._num_own,
        )
