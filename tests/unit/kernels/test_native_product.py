"""Products with packed weights equal float64, and each row has the same bits alone and in a batch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagleray.kernels.cpu.abi import abi

DTYPES = (torch.float32, torch.bfloat16)  # a dtype's number is its index
EPILOGUES = (abi.EPILOGUE_STORE, abi.EPILOGUE_ADD, abi.EPILOGUE_SILU, abi.EPILOGUE_CLAMPED_SWIGLU)
GATED = (abi.EPILOGUE_SILU, abi.EPILOGUE_CLAMPED_SWIGLU)
ALPHA, LIMIT = 1.7, 0.8
NUM_ROWS = (1, 2, 3, 5, 8, 11, 12, 13, 16, 17, 24, 31, 32, 33, 64, 100)
SPARE = 7.0  # the number in memory that must not be written


# ---- making a product


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def number(dtype: torch.dtype) -> int:
    return DTYPES.index(dtype)


def room_for(library: ctypes.CDLL, n: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.full((library.er_packed_size(n, k, number(dtype)),), torch.nan, dtype=dtype)


def random_rows(num_rows: int, k: int, dtype: torch.dtype) -> Tensor:
    """Rows [num_rows, k]: a zero completes each row's last pair, and the rest of the stride is NaN."""
    memory = torch.full((num_rows, k + 5), torch.nan, dtype=dtype)
    memory[:, : k + 1] = 0
    memory[:, :k] = torch.randn(num_rows, k)
    return memory[:, :k]


@dataclass
class Weight:
    """Weight of a linear layer; of a gated one n / 2 rows of gate, then n / 2 rows of up."""

    library: ctypes.CDLL
    plain: Tensor  # [n, k]
    bias: Tensor | None
    epilogue: int
    packed: Tensor = field(init=False)

    def __post_init__(self) -> None:
        n, k = self.plain.shape
        dtype, stride = self.plain.dtype, self.plain.stride(0)
        if self.epilogue in GATED:
            gate, up = self.plain.chunk(2)
            self.packed = room_for(self.library, 2 * -(-n // 32) * 16, k, dtype)
            rows = gate.data_ptr(), up.data_ptr(), stride, n // 2
            self.library.er_pack_gate_up(*rows, k, self.packed.data_ptr(), number(dtype), 2)
        else:
            self.packed = room_for(self.library, n, k, dtype)
            self.library.er_pack(self.plain.data_ptr(), stride, n, k, self.packed.data_ptr(), number(dtype), 2)
        assert not self.packed.isnan().any()

    def truth(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The product in float64, and the sum of its terms' magnitudes."""
        wide_bias = None if self.bias is None else self.bias.double()
        result = F.linear(x.double(), self.plain.double(), wide_bias)
        scale = F.linear(x.double().abs(), self.plain.double().abs(), None if wide_bias is None else wide_bias.abs())
        if self.epilogue not in GATED:
            return result, scale
        (gate, up), (gate_scale, up_scale) = result.chunk(2, dim=1), scale.chunk(2, dim=1)
        if self.epilogue == abi.EPILOGUE_CLAMPED_SWIGLU:
            gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT) + 1
            gated = gate * torch.sigmoid(ALPHA * gate)
            return gated * up, 1.1 * gate_scale * up.abs() + gated.abs() * up_scale
        # the slope of silu is at most 1.1
        return F.silu(gate) * up, 1.1 * gate_scale * up.abs() + F.silu(gate).abs() * up_scale


def random_weight(
    library: ctypes.CDLL, n: int, k: int, dtype: torch.dtype, *, bias: bool = False, epilogue: int = abi.EPILOGUE_STORE
) -> Weight:
    plain = (torch.randn(n, k + 3) / k**0.5).to(dtype)[:, :k]
    return Weight(library, plain, torch.randn(n) if bias else None, epilogue)


class Call:
    """A product and the memory of its results. The space after each row must not be written."""

    def __init__(self, x: Tensor, weight: Weight, *, x_rows: Tensor | None = None, y: Tensor | None = None) -> None:
        n, k = weight.plain.shape
        size = n // 2 if weight.epilogue in GATED else n
        self.num_rows = len(x) if x_rows is None else len(x_rows)
        dtype = weight.plain.dtype if weight.epilogue in GATED else torch.float32
        self.memory = torch.full((self.num_rows, size + 3), SPARE, dtype=dtype)
        if y is not None:
            self.memory[:, :size] = y
        self.y = self.memory[:, :size]
        self.kept = x, weight, x_rows  # the product has only their addresses
        self.product = abi.CProduct(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            x_rows=address(x_rows),
            num_rows=self.num_rows,
            weight=weight.packed.data_ptr(),
            n=n,
            k=k,
            bias=address(weight.bias),
            epilogue=weight.epilogue,
            swiglu=abi.CClampedSwiglu(ALPHA, LIMIT),
            y=self.memory.data_ptr(),
            y_stride=size + 3,
        )


def run(library: ctypes.CDLL, calls: Sequence[Call], dtype: torch.dtype, threads: int = 1) -> list[Tensor]:
    products = (abi.CProduct * len(calls))(*[call.product for call in calls])
    library.er_multiply(products, len(calls), number(dtype), threads)
    for call in calls:
        assert (call.memory[:, call.y.shape[1] :] == SPARE).all()
    return [call.y for call in calls]


def multiply(x: Tensor, weight: Weight, threads: int = 1, *, y: Tensor | None = None) -> Tensor:
    return run(weight.library, [Call(x, weight, y=y)], x.dtype, threads)[0]


def check_close(result: Tensor, weight: Weight, x: Tensor, y: Tensor | None = None) -> None:
    truth, scale = weight.truth(x)
    if y is not None:
        truth, scale = truth + y, scale + y.abs()
    error = (result.double() - truth).abs()
    rounding = 2**-8 if result.dtype == torch.bfloat16 else 2**-22
    assert (error <= 1e-6 * scale + rounding * truth.abs()).all(), (error / scale).max()


def check_product(
    library: ctypes.CDLL, n: int, k: int, dtype: torch.dtype, epilogue: int, num_rows: Sequence[int] = NUM_ROWS
) -> None:
    torch.manual_seed(n * k)
    weight = random_weight(library, n, k, dtype, bias=(n + k) % 2 == 0, epilogue=epilogue)
    x = random_rows(max(num_rows), k, dtype)
    y = torch.randn(len(x), n) if epilogue == abi.EPILOGUE_ADD else None
    full = multiply(x, weight, 2, y=y)
    check_close(full, weight, x, y)
    for i, count in enumerate(num_rows):
        part = multiply(x[:count], weight, 1 + i % 3, y=None if y is None else y[:count])
        assert torch.equal(part, full[:count])
    for row in range(0, len(x), 7):
        alone = slice(row, row + 1)
        assert torch.equal(multiply(x[alone], weight, y=None if y is None else y[alone]), full[alone])


# ---- products


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(2, 1), (6, 3), (32, 64), (34, 7), (100, 130), (128, 256), (258, 1000)])
def test_multiply_sizes_equal_float64(library: ctypes.CDLL, n: int, k: int, dtype: torch.dtype, epilogue: int) -> None:
    check_product(library, n, k, dtype, epilogue)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_multiply_long_k_equals_float64(library: ctypes.CDLL, dtype: torch.dtype, epilogue: int) -> None:
    check_product(library, 210, 4243, dtype, epilogue, (1, 12, 13, 40))


@pytest.mark.parametrize("dtype", DTYPES)
def test_multiply_many_rows_equal_float64(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    check_product(library, 70, 64, dtype, abi.EPILOGUE_STORE, (95, 96, 97, 193, 400))


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_multiply_older_processor_equals_float64(other_library: ctypes.CDLL, dtype: torch.dtype, epilogue: int) -> None:
    check_product(other_library, 98, 131, dtype, epilogue)
    check_product(other_library, 66, 2400, dtype, epilogue, (1, 5, 30))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 30])
def test_multiply_more_threads_than_panels_has_the_same_bits(
    library: ctypes.CDLL, num_rows: int, dtype: torch.dtype
) -> None:
    weight, x = random_weight(library, 90, 50, dtype), random_rows(num_rows, 50, dtype)
    assert torch.equal(multiply(x, weight, 12), multiply(x, weight))


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(1, 120),
    n=st.integers(1, 80),
    k=st.integers(1, 80),
    dtype=st.sampled_from(DTYPES),
    epilogue=st.sampled_from(EPILOGUES),
    threads=st.integers(1, 4),
)
def test_multiply_any_product_equals_float64(
    library: ctypes.CDLL, num_rows: int, n: int, k: int, dtype: torch.dtype, epilogue: int, threads: int
) -> None:
    weight = random_weight(library, 2 * n, k, dtype, bias=True, epilogue=epilogue)
    x = random_rows(num_rows, k, dtype)
    y = torch.randn(num_rows, 2 * n) if epilogue == abi.EPILOGUE_ADD else None
    check_close(multiply(x, weight, threads, y=y), weight, x, y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 9, 30, 150])
def test_multiply_picked_rows_have_the_same_bits(library: ctypes.CDLL, count: int, dtype: torch.dtype) -> None:
    weight, x = random_weight(library, 70, 33, dtype), random_rows(20, 33, dtype)
    x_rows = torch.randint(20, (count,), dtype=torch.int32)
    (picked,) = run(library, [Call(x, weight, x_rows=x_rows)], dtype, 2)
    assert torch.equal(picked, multiply(x, weight)[x_rows.long()])


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [7, 20])
def test_multiply_nan_stays_in_its_row(library: ctypes.CDLL, num_rows: int, dtype: torch.dtype, epilogue: int) -> None:
    weight, x = random_weight(library, 50, 40, dtype, epilogue=epilogue), random_rows(num_rows, 40, dtype)
    y = torch.randn(num_rows, 50) if epilogue == abi.EPILOGUE_ADD else None
    expected = multiply(x, weight, y=y)
    x[2, 5], x[4, 6] = torch.nan, torch.inf
    broken = multiply(x, weight, y=y)
    whole = [row for row in range(num_rows) if row not in (2, 4)]
    assert torch.equal(broken[whole], expected[whole])
    assert broken[2].isnan().all()
    assert not broken[4].isfinite().any() or epilogue in GATED


# ---- several products


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_multiply_several_products_have_the_same_bits(library: ctypes.CDLL, dtype: torch.dtype, threads: int) -> None:
    x = random_rows(64, 96, dtype)
    calls, expected = [], []
    for index, count in enumerate([0, 1, 5, 0, 0, 13, 130, 2, 1, 0]):
        weight = random_weight(library, 60 + 20 * index, 96, dtype, bias=True, epilogue=EPILOGUES[index % 4])
        x_rows = torch.randint(64, (count,), dtype=torch.int32)
        calls.append(Call(x, weight, x_rows=x_rows))
        (alone,) = run(library, [Call(x, weight, x_rows=x_rows)], dtype)
        expected.append(alone)
        check_close(
            alone, weight, x[x_rows.long()], torch.full((1, 1), SPARE) if weight.epilogue == abi.EPILOGUE_ADD else None
        )
    for result, alone in zip(run(library, calls, dtype, threads), expected, strict=True):
        assert torch.equal(result, alone)


def test_multiply_without_products_does_nothing(library: ctypes.CDLL) -> None:
    weight, x = random_weight(library, 40, 8, torch.bfloat16), random_rows(0, 8, torch.bfloat16)
    assert run(library, [], torch.bfloat16, 2) == []
    assert [out.shape for out in run(library, [Call(x, weight), Call(x, weight)], torch.bfloat16, 2)] == [(0, 40)] * 2


# ---- packing


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (32, 8), (33, 9), (100, 150)])
def test_pack_rows_are_unpacked_again(library: ctypes.CDLL, n: int, k: int, dtype: torch.dtype) -> None:
    weight = random_weight(library, n, k, dtype)
    pair = 4 // dtype.itemsize
    padded = torch.zeros(-(-n // 32) * 32, -(-k // pair) * pair, dtype=dtype)
    padded[:n, :k] = weight.plain
    panels = padded.view(-1, 32, padded.shape[1] // pair, pair).transpose(1, 2)
    assert torch.equal(weight.packed, panels.flatten())
    for row in {0, n // 2, n - 1}:
        for out in (torch.empty(k, dtype=dtype), torch.empty(k)):
            as_float = int(out.dtype == torch.float32)
            library.er_unpack_row(weight.packed.data_ptr(), row, k, out.data_ptr(), number(dtype), as_float)
            assert torch.equal(out, weight.plain[row].to(out.dtype))


@pytest.mark.parametrize("inner", [16, 37])
def test_pack_gate_up_pairs_gates_with_ups(library: ctypes.CDLL, inner: int) -> None:
    weight = random_weight(library, 2 * inner, 11, torch.float32, epilogue=abi.EPILOGUE_SILU)
    panels = weight.packed.view(-1, 11, 2, 16)
    for place, plain in enumerate(weight.plain.chunk(2)):
        rows = panels[:, :, place].transpose(1, 2).flatten(0, 1)  # [inner, padded to 16; k]
        assert torch.equal(rows[:inner], plain)
        assert (rows[inner:] == 0).all()
