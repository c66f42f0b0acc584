"""Products with weights of few bits equal float64, and each row has the same bits alone and in a batch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import pytest
import torch
from kernel_numbers import multiplied_numbers
from torch import Tensor

from eagleray.kernels.cpu.abi import abi
from eagleray.kernels.cpu.build.library import native_library
from eagleray.kernels.cpu.grouped import SCALE_KINDS, in_groups, layout, pack, packed_size, quantize
from eagleray.kernels.grouped import Encoding, GroupedWeight, value_table
from eagleray.kernels.quantized import Mxfp4Weight, WeightFormat, quantize_fp8

N, K = 72, 768
NUM_ROWS = (1, 2, 3, 5, 12, 13, 25, 40, 97, 130)
TOLERANCE = 2e-6  # of the sum of the terms' magnitudes
PEAK = 50.0  # an input so large that its block keeps integers of 16 bits


def random_weight(
    encoding: Encoding, size: int, scale_dtype: torch.dtype, *, has_offsets: bool, n: int = N, k: int = K
) -> GroupedWeight:
    num_codes = 16 if encoding.bits == 4 else 256
    codes = torch.randint(0, num_codes, (n, k), dtype=torch.uint8)
    if encoding is Encoding.E4M3:
        codes[codes & 127 == 127] = 0  # NaN
    scales = (torch.rand(n, k // size) * 0.01 + 0.001).to(scale_dtype)
    offsets = (torch.rand(n, k // size) * 0.1 - 0.05).to(scale_dtype) if has_offsets else None
    return GroupedWeight(codes, scales, encoding, offsets)


def weight_with_divisors(n: int = N, k: int = K, columns: int = 128) -> GroupedWeight:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    divisors = torch.randint(65, 128, (n, k // columns, 1)) * 2.0**-17
    scales = (divisors * torch.randint(-15, 16, (n, k // columns, columns // 32))).flatten(1).half()
    return GroupedWeight(codes, scales, Encoding.INT4, columns_per_divisor=columns)


@dataclass
class Packed:
    library: ctypes.CDLL
    weight: GroupedWeight
    inner: int = 0

    def __post_init__(self) -> None:
        n, k = self.weight.shape
        padded = 2 * -(-self.inner // 16) * 16 if self.inner else n
        self.memory = torch.full((packed_size(self.library, layout(self.weight), padded, k),), 255, dtype=torch.uint8)
        pack(self.library, self.weight, self.memory, inner=self.inner)

    def multiply(self, x: Tensor, threads: int = 1, *, epilogue: int = abi.EPILOGUE_STORE) -> Tensor:
        n, k = self.weight.shape
        y = torch.full((len(x), n // 2 if self.inner else n), torch.nan, dtype=x.dtype if self.inner else torch.float32)
        product = abi.CProduct(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            num_rows=len(x),
            weight=self.memory.data_ptr(),
            n=n,
            k=k,
            epilogue=epilogue,
            y=y.data_ptr(),
            y_stride=y.shape[1],
            grouping=layout(self.weight).pointer,
        )
        self.library.er_multiply(product, 1, 1, threads)
        return y


def random_rows(num_rows: int, k: int = K) -> Tensor:
    return torch.randn(num_rows, k).to(torch.bfloat16)


CASES = [
    (Encoding.INT4, 16, torch.float16, True),
    (Encoding.INT4, 32, torch.float16, False),
    (Encoding.INT4, 128, torch.bfloat16, True),
    (Encoding.INT4, 256, torch.float16, False),
    (Encoding.NF4, 64, torch.float32, False),
    (Encoding.E2M1, 32, torch.bfloat16, False),
    (Encoding.INT8, 32, torch.float16, False),
    (Encoding.INT8, 16, torch.float16, True),
    (Encoding.HALF_INT8, 64, torch.float32, True),
    (Encoding.HALF_INT8, 256, torch.float16, True),
    (Encoding.E4M3, 16, torch.float32, False),
    (Encoding.E4M3, 128, torch.float32, False),
]


@pytest.mark.parametrize(("encoding", "size", "scale_dtype", "has_offsets"), CASES)
def test_multiply_equals_float64_and_itself_in_any_batch(library, encoding, size, scale_dtype, has_offsets):
    check_products(library, random_weight(encoding, size, scale_dtype, has_offsets=has_offsets))


@pytest.mark.parametrize("columns", [64, 128, 256])
def test_multiply_scales_with_divisors_equals_float64_and_itself_in_any_batch(library, columns):
    check_products(library, weight_with_divisors(columns=columns))


def check_products(library: ctypes.CDLL, weight: GroupedWeight) -> None:
    packed, x = Packed(library, weight), random_rows(max(NUM_ROWS), weight.shape[1])
    x[[1, 40, 100], 5] = PEAK
    numbers, inputs = used_numbers(library, weight), used_inputs(library, weight, x)
    whole = packed.multiply(x, 2)
    bound = TOLERANCE * (x.double().abs() @ numbers.abs().t() + sum_of_parts(weight, x))
    assert ((whole.double() - inputs @ numbers.t()).abs() <= bound).all()
    for count in NUM_ROWS:
        for threads in (1, 2):
            assert torch.equal(packed.multiply(x[:count].contiguous(), threads), whole[:count])


def test_multiply_older_processor_equals_float64(other_library):
    for encoding, size, scale_dtype, has_offsets in CASES[1::2]:
        check_products(other_library, random_weight(encoding, size, scale_dtype, has_offsets=has_offsets))
    check_products(other_library, weight_with_divisors())


def used_inputs(library: ctypes.CDLL, weight: GroupedWeight, x: Tensor) -> Tensor:
    """The inputs in float64 that products of a library use, see csrc/integer_rows.h."""
    if not library.er_uses_integers(layout(weight).c):
        return x.double()
    blocks = x.float().unflatten(1, (-1, weight.columns_per_divisor or weight.group_size))
    largest = blocks.abs().amax(2, keepdim=True)
    of_8_bits = (blocks * torch.tensor(127.0).div(largest)).round()  # 127 / largest is a product with the reciprocal
    of_16_bits = (blocks * torch.tensor(32512.0).div(largest)).round()
    is_wide = 24 * of_8_bits.abs().mean(2, keepdim=True) < 127
    if weight.encoding.bits == 8:
        is_wide[:] = True
    else:
        assert is_wide.sum() == (x == PEAK).sum()
    integers = torch.where(is_wide, of_16_bits, 256 * of_8_bits)
    return (integers.double() * (largest / 32512).double()).flatten(1)


def used_numbers(library: ctypes.CDLL, weight: GroupedWeight) -> Tensor:
    """The numbers in float64 that products of a library use."""
    numbers = exact_numbers(weight)
    is_rounded = library is native_library() and not library.er_uses_integers(layout(weight).c)
    return multiplied_numbers(numbers) if is_rounded else numbers


def exact_numbers(weight: GroupedWeight) -> Tensor:
    """The numbers in float64: scale times value plus offset, each of which is exact."""
    table = value_table(weight.encoding).double()
    table = torch.cat((table, -table)) if weight.encoding.bits == 8 else table
    numbers = table[weight.codes.int()].unflatten(1, (-1, weight.group_size)) * weight.scales.double()[:, :, None]
    if weight.offsets is not None:
        numbers = numbers + weight.offsets.double()[:, :, None]
    return numbers.flatten(1)


def sum_of_parts(weight: GroupedWeight, x: Tensor) -> Tensor:
    """The magnitudes of what is added up for scales and for offsets, which may cancel each other."""
    scaled = GroupedWeight(weight.codes, weight.scales, weight.encoding).dequantize(torch.float64).abs()
    total = x.double().abs() @ scaled.t()
    if weight.offsets is not None:
        offsets = weight.offsets.double().abs().repeat_interleave(weight.group_size, dim=1)
        total = total + x.double().abs() @ offsets.t()
    return total


def test_multiply_long_inputs_in_parts_equal_the_rows_alone(library):
    weight = random_weight(Encoding.INT4, 32, torch.float16, has_offsets=True, n=40, k=4160)
    packed, x = Packed(library, weight), random_rows(30, 4160)
    whole = packed.multiply(x, 2)
    assert torch.equal(torch.cat([packed.multiply(row[None]) for row in x]), whole)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_multiply_row_that_is_not_finite_leaves_other_rows(library, bad):
    packed, x = Packed(library, weight_with_divisors()), random_rows(20)
    clean = packed.multiply(x)
    x[7, 300] = bad
    found = packed.multiply(x)
    assert not found[7].isfinite().any()
    others = torch.arange(20) != 7
    assert torch.equal(found[others], clean[others])
    assert torch.equal(packed.multiply(x[7:8].contiguous()).isfinite(), found[7:8].isfinite())


def test_multiply_blocks_of_zeros_and_of_tiny_inputs_add_nothing(library):
    weight = weight_with_divisors()
    packed, x = Packed(library, weight), random_rows(6)
    x[:, 128:256] = 0
    expected = packed.multiply(x)
    x[:, 128:256] = 1e-38
    torch.testing.assert_close(packed.multiply(x), expected, rtol=0, atol=1e-30)


def test_multiply_fp8_weight_that_is_nan_has_no_number(library):
    check_nan_weight(library)


def test_multiply_older_processor_fp8_weight_that_is_nan_has_no_number(other_library):
    check_nan_weight(other_library)


def check_nan_weight(library: ctypes.CDLL) -> None:
    weight = random_weight(Encoding.E4M3, 32, torch.float32, has_offsets=False)
    weight.codes[3, 40], weight.codes[50, 41] = 127, 255
    for count in (1, 20):
        outputs = Packed(library, weight).multiply(random_rows(count)).isnan().any(0)
        assert outputs.nonzero().flatten().tolist() == [3, 50]


@pytest.mark.parametrize("inner", [16, 33])
def test_multiply_gated_equals_separate_products(library, inner):
    weight = random_weight(Encoding.INT4, 32, torch.float16, has_offsets=False, n=2 * inner)
    x = random_rows(5)
    gate, up = Packed(library, weight).multiply(x).chunk(2, dim=1)
    gated = Packed(library, weight, inner).multiply(x, epilogue=abi.EPILOGUE_SILU)
    torch.testing.assert_close(gated.float(), torch.nn.functional.silu(gate) * up, rtol=0.005, atol=1e-4)


@pytest.mark.parametrize(("encoding", "size", "scale_dtype", "has_offsets"), CASES)
def test_embed_reads_rows_of_packed_weight(library, encoding, size, scale_dtype, has_offsets):
    weight = random_weight(encoding, size, scale_dtype, has_offsets=has_offsets)
    rows = embedded_rows(library, weight, [0, 71, 35, 16, 100])  # 100 is beyond
    expected = torch.cat((used_numbers(library, weight).float()[[0, 71, 35, 16]], torch.zeros(1, K)))
    torch.testing.assert_close(rows, expected, rtol=1e-6, atol=1e-7)


def test_embed_older_processor_reads_every_code(other_library):
    for encoding in (Encoding.INT4, Encoding.E2M1, Encoding.INT8, Encoding.HALF_INT8, Encoding.E4M3):
        weight = random_weight(encoding, 32, torch.float32, has_offsets=False)
        codes = torch.arange(254 if encoding.bits == 8 else 16, dtype=torch.uint8)
        weight.codes[:] = (codes + (codes >= 127)).repeat(-(-N * K // len(codes)))[: N * K].view(N, K)  # without NaN
        expected = used_numbers(other_library, weight).float()[[0, 71, 35, 16]]
        rows = embedded_rows(other_library, weight, [0, 71, 35, 16])
        torch.testing.assert_close(rows, expected, rtol=1e-6, atol=1e-7)


def embedded_rows(library: ctypes.CDLL, weight: GroupedWeight, ids: list[int]) -> Tensor:
    packed, token_ids = Packed(library, weight), torch.tensor(ids, dtype=torch.int32)
    rows = torch.full((len(ids), K), torch.nan)
    library.er_embed(
        *(packed.memory.data_ptr(), 1, layout(weight).c, K, 0, N),
        *(token_ids.data_ptr(), len(ids), rows.data_ptr(), abi.DTYPE_BFLOAT16, 2),
    )
    return rows


# ---- formats


def test_in_groups_fp8_has_the_same_numbers():
    weight = quantize_fp8(torch.randn(200, 384), (128, 128))
    groups = in_groups(weight)
    assert groups is not None and groups.group_size == 128
    assert torch.equal(groups.dequantize(torch.float32), weight.dequantize(torch.float32))


def test_in_groups_fp8_of_partial_blocks_takes_smaller_groups():
    weight = quantize_fp8(torch.randn(20, 352), (128, 128))  # 352 = 2 * 128 + 96
    groups = in_groups(weight)
    assert groups is not None and groups.group_size == 32
    assert torch.equal(groups.dequantize(torch.float32), weight.dequantize(torch.float32))


def test_in_groups_columns_without_a_group_size_are_not_grouped():
    assert in_groups(quantize_fp8(torch.randn(20, 200), (128, 128))) is None


def test_in_groups_fp8_with_one_scale_takes_groups_of_128():
    weight = quantize_fp8(torch.randn(20, 512), (20, 512))
    groups = in_groups(weight)
    assert groups is not None and groups.group_size == 128
    assert torch.equal(groups.dequantize(torch.float32), weight.dequantize(torch.float32))


def test_in_groups_mxfp4_has_the_same_numbers():
    blocks = torch.randint(0, 256, (24, 4, 16), dtype=torch.uint8)
    weight = Mxfp4Weight(blocks, torch.randint(90, 160, (24, 4), dtype=torch.uint8))
    groups = in_groups(weight)
    assert groups is not None
    assert torch.equal(groups.dequantize(torch.float32), weight.dequantize(torch.float32))


def test_in_groups_scale_for_each_row_is_repeated():
    weight = random_weight(Encoding.INT8, K, torch.float32, has_offsets=True)
    groups = in_groups(weight)
    assert groups is not None and groups.group_size == 256
    assert torch.equal(groups.dequantize(torch.float32), weight.dequantize(torch.float32))


# ---- quantization


def relative_error(weight: Tensor, quantized: GroupedWeight) -> float:
    difference = quantized.dequantize(torch.float32) - weight.float()
    return float(difference.square().sum() / weight.float().square().sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantize_int8_is_within_half_a_step(library, dtype):
    weight = torch.randn(40, 96).to(dtype)
    quantized = quantize(library, weight, WeightFormat.INT8)
    assert isinstance(quantized, GroupedWeight)
    steps = quantized.scales.float().repeat_interleave(32, dim=1)
    error = (quantized.dequantize(torch.float32) - weight.float()).abs()
    assert (error <= 0.5 * steps * (1 + 1e-3) + 127 * 2**-11 * steps).all()  # the scale itself is rounded


def test_quantize_int4_errs_less_than_scales_of_the_largest_number(library):
    weight = torch.randn(256, 256).to(torch.bfloat16)
    quantized = quantize(library, weight, WeightFormat.INT4)
    assert isinstance(quantized, GroupedWeight)
    groups = weight.float().unflatten(1, (-1, 32))
    scales = groups.abs().amax(dim=2, keepdim=True) / 7
    plain = ((groups / scales).round() * scales).flatten(1)
    of_plain = float((plain - weight.float()).square().sum() / weight.float().square().sum())
    assert relative_error(weight, quantized) < 0.75 * of_plain


def test_quantize_numbers_on_a_grid_are_exact(library):
    grid = torch.randint(-8, 8, (16, 64)).float()
    grid[:, ::32] = -8  # so the scale of the largest number is the grid's
    step = 15 / 64  # 15 times the divisor of the scales
    quantized = quantize(library, grid * step, WeightFormat.INT4)
    assert isinstance(quantized, GroupedWeight)
    assert torch.equal(quantized.dequantize(torch.float32), grid * step)


@pytest.mark.parametrize("kind", [WeightFormat.INT4, WeightFormat.INT8])
def test_quantize_zeros_stay_zeros(library, kind):
    quantized = quantize(library, torch.zeros(4, 64), kind)
    assert isinstance(quantized, GroupedWeight)
    assert not quantized.dequantize(torch.float32).any()


def test_quantize_columns_without_groups_stay_plain(library):
    weight = torch.randn(4, 40)
    assert quantize(library, weight, WeightFormat.INT4) is weight


def test_scale_kinds_cover_the_dtypes_of_scales():
    assert set(SCALE_KINDS) == {torch.float16, torch.bfloat16, torch.float32}
