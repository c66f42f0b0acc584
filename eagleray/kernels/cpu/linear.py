"""Products with weights that are packed for the kernels, as ops of a pass or computed at once."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from eagleray.kernels.cpu.abi import abi
from eagleray.kernels.cpu.program import threads_for
from eagleray.kernels.cpu.recording import Value
from eagleray.kernels.params import ClampedSwiglu


class NativeLinear:
    """A product with a packed weight. Called with a tensor it computes at once; the next call overwrites the result.

    `n` is the number of outputs before gating: if `is_gated`, half of them are gates. `k` is the number of inputs.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        packed: Tensor,
        bias: Tensor | None,
        *,
        n: int,
        k: int,
        is_gated: bool,
        clamp: ClampedSwiglu | None = None,
        num_threads: int,
    ) -> None:
        self.packed = packed
        self.n, self.k = n, k
        self.bias = None if bias is None else bias.float()
        self._library = library
        self._is_gated = is_gated
        self._num_threads = num_threads
        self._size = n // 2 if is_gated else n
        self.swiglu = (
            abi.CClampedSwiglu() if clamp is None else abi.CClampedSwiglu(alpha=clamp.alpha, limit=clamp.limit)
        )
        gated_epilogue = abi.EPILOGUE_SILU if clamp is None else abi.EPILOGUE_CLAMPED_SWIGLU
        self.epilogue = gated_epilogue if is_gated else abi.EPILOGUE_STORE
        self._out = torch.empty(0, self._size, dtype=packed.dtype if is_gated else torch.float32)

    def __call__(self, x: Value | Tensor) -> Value | Tensor:
        weight, bias = self.packed.data_ptr(), None if self.bias is None else self.bias.data_ptr()
        if isinstance(x, Tensor):
            return self._compute(x.contiguous(), weight, bias)
        if self.packed.dtype != torch.float32:
            x = x.recording.rounded(x)
        out = x.another(self._size, is_float=not self._is_gated)
        args = abi.CMultiply(n=self.n, k=self.k, epilogue=self.epilogue, swiglu=self.swiglu, weight=weight, bias=bias)
        x.recording.append(abi.OP_MULTIPLY, args, reads={"x": x}, writes={"out": out})
        return out

    def _compute(self, x: Tensor, weight: int, bias: int | None) -> Tensor:
        dtype = self.packed.dtype
        assert x.dtype == dtype and x.shape[1] == self.k
        if len(x) > len(self._out):
            self._out = torch.empty(len(x), self._size, dtype=self._out.dtype)
        product = abi.CProduct(
            x=x.data_ptr(),
            x_stride=self.k,
            num_rows=len(x),
            weight=weight,
            n=self.n,
            k=self.k,
            bias=bias,
            epilogue=self.epilogue,
            swiglu=self.swiglu,
            y=self._out.data_ptr(),
            y_stride=self._size,
        )
        threads = threads_for(self.n * self.k, dtype, len(x), self._num_threads)
        self._library.er_multiply(product, 1, int(dtype == torch.bfloat16), threads)
        return self._out[: len(x)]
