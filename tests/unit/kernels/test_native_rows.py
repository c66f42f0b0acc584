"""Operations on hidden states equal float64, and each row has the same bits alone and in a batch."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)  # a dtype's number is its index
EPS = 1e-6


def normalize(library: ctypes.CDLL, x: Tensor, weight: Tensor, dtype: torch.dtype, threads: int = 1) -> Tensor:
    n, size = x.shape
    out = torch.full((n, size + 3), 7.0, dtype=dtype)
    arguments = x.data_ptr(), x.stride(0), n, size, weight.data_ptr(), EPS, out.data_ptr(), size + 3
    library.er_normalize(*arguments, DTYPES.index(dtype), threads)
    assert (out[:, size:] == 7).all()
    return out[:, :size]


def check_normalize(library: ctypes.CDLL, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    x = (torch.randn(9, size + 5) * torch.logspace(-3, 3, 9)[:, None])[:, :size]
    weight = torch.randn(size)
    out = normalize(library, x, weight, dtype)
    wide = x.double()
    truth = wide / (wide.square().mean(dim=1, keepdim=True) + EPS).sqrt() * weight.double()
    # rounded once: half a unit in the last place of bfloat16
    torch.testing.assert_close(out.double(), truth, rtol=1e-6 if dtype == torch.float32 else 2**-8 * 1.001, atol=0)
    for threads in (2, 3):
        assert torch.equal(normalize(library, x, weight, dtype, threads), out)
    for row in range(len(x)):
        assert torch.equal(normalize(library, x[row : row + 1], weight, dtype, 2)[0], out[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 16, 37, 64, 100, 128, 1030, 2048])
def test_normalize_sizes_equal_float64(library: ctypes.CDLL, size: int, dtype: torch.dtype) -> None:
    check_normalize(library, size, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_normalize_older_processor_equals_float64(other_library: ctypes.CDLL, dtype: torch.dtype) -> None:
    for size in (37, 256):
        check_normalize(other_library, size, dtype)


def test_normalize_in_place_has_the_same_bits(library: ctypes.CDLL) -> None:
    x, weight = torch.randn(4, 100), torch.randn(100)
    expected = normalize(library, x, weight, torch.float32)
    library.er_normalize(x.data_ptr(), 100, 4, 100, weight.data_ptr(), EPS, x.data_ptr(), 100, 0, 2)
    assert torch.equal(x, expected)


def test_normalize_nan_stays_in_its_row(library: ctypes.CDLL) -> None:
    x, weight = torch.randn(3, 50), torch.randn(50)
    expected = normalize(library, x, weight, torch.bfloat16)
    x[1, 7] = torch.nan
    out = normalize(library, x, weight, torch.bfloat16)
    assert torch.equal(out[::2], expected[::2])
    assert out[1].isnan().all()


def check_embed(library: ctypes.CDLL, vocab_size: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    table = torch.randn(vocab_size, size).to(dtype)
    token_ids = torch.randint(vocab_size, (11,), dtype=torch.int32)
    token_ids[:2] = torch.tensor([0, vocab_size - 1])
    expected = table[token_ids.long()].float()
    number = DTYPES.index(dtype)
    packed = torch.empty(library.er_packed_size(vocab_size, size, number), dtype=dtype)
    library.er_pack(table.data_ptr(), size, vocab_size, size, packed.data_ptr(), number, 1)
    for layout, values in enumerate((table, packed)):
        for threads in (1, 2, 3):
            out = torch.full((len(token_ids), size), 7.0)
            ids, share = (token_ids.data_ptr(), len(token_ids)), (size, 0, vocab_size)
            library.er_embed(values.data_ptr(), layout, None, *share, *ids, out.data_ptr(), number, threads)
            assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab_size", "size"), [(37, 21), (100, 64), (32, 1)])
def test_embed_plain_and_packed_rows_equal_the_table(
    library: ctypes.CDLL, vocab_size: int, size: int, dtype: torch.dtype
) -> None:
    check_embed(library, vocab_size, size, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed_older_processor_equals_the_table(other_library: ctypes.CDLL, dtype: torch.dtype) -> None:
    check_embed(other_library, 37, 21, dtype)


def test_embed_shards_of_the_vocabulary_sum_to_all(library: ctypes.CDLL) -> None:
    table = torch.randn(37, 24)
    token_ids = torch.arange(-1, 40, dtype=torch.int32)
    total = torch.zeros(len(token_ids), 24)
    for first, stop in ((0, 20), (20, 37)):
        part, out = table[first:stop].contiguous(), torch.empty(len(token_ids), 24)
        ids = token_ids.data_ptr(), len(token_ids)
        library.er_embed(part.data_ptr(), 0, None, 24, first, stop - first, *ids, out.data_ptr(), 0, 2)
        total += out
    assert torch.equal(total[1:38], table)
    assert (total[[0, 38, 39, 40]] == 0).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_add_threads_equal_torch(library: ctypes.CDLL, threads: int) -> None:
    x, out = torch.randn(5, 45), torch.randn(5, 50)
    expected = out.clone()
    expected[:, :37] += x[:, :37]
    library.er_add(x.data_ptr(), 45, 5, 37, out.data_ptr(), 50, threads)
    assert torch.equal(out, expected)
