"""The kernels rank the logits of rows as plain torch does."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eagleray.kernels.cpu.ranking import NativeRanking
from eagleray.kernels.ranking import Ranking

KINDS: dict[str, Callable[[int], Tensor]] = {
    "random": lambda size: torch.randn(size) * 5,
    "ties": lambda size: torch.randint(-2, 3, (size,)).float(),
    "equal": lambda size: torch.full((size,), -3.5),
    "ascending": lambda size: torch.arange(size) / 7 - 100,
    "descending": lambda size: -torch.arange(size) / 7,
    "zeros": lambda size: torch.where(torch.randn(size) > 0, 0.0, -0.0),
    "infinite": lambda size: torch.randn(size).masked_fill_(torch.rand(size) < 0.5, -torch.inf),
    "forbidden": lambda size: torch.full((size,), -torch.inf),
    "overflow": lambda size: torch.randn(size).masked_fill_(torch.rand(size) < 0.2, torch.inf),
    "broken": lambda size: torch.randn(size).masked_fill_(torch.rand(size) < 0.2, torch.nan),
    "negative nan": lambda size: torch.randn(size).index_fill_(0, torch.tensor([size // 2]), -torch.nan),
    "tiny": lambda size: torch.randn(size) * 1e-41,
}


def rows_of(logits: Tensor) -> tuple[int, int, int, int]:
    return logits.data_ptr(), logits.stride(0), *logits.shape


def scratch_for(library: ctypes.CDLL, logits: Tensor) -> Tensor:
    return torch.empty(library.er_ranking_scratch_size(*logits.shape), dtype=torch.uint8)


def argmax(library: ctypes.CDLL, logits: Tensor, threads: int = 1) -> tuple[Tensor, Tensor]:
    scratch = scratch_for(library, logits)
    ids, values = torch.empty(len(logits), dtype=torch.int32), torch.empty(len(logits))
    library.er_argmax(*rows_of(logits), ids.data_ptr(), values.data_ptr(), scratch.data_ptr(), threads)
    return ids.long(), values


def top_k(library: ctypes.CDLL, logits: Tensor, k: int, threads: int = 1) -> tuple[Tensor, Tensor]:
    scratch = scratch_for(library, logits)
    ids, values = torch.empty(len(logits), k, dtype=torch.int32), torch.empty(len(logits), k)
    library.er_top_k(*rows_of(logits), k, ids.data_ptr(), values.data_ptr(), scratch.data_ptr(), threads)
    return ids.long(), values


def bits(x: Tensor) -> Tensor:
    """Bits of x, which are equal for equal NaN too."""
    return x.view(torch.int32)


def logits_of_all_kinds(size: int) -> Tensor:
    """Rows [kinds, size] that are not contiguous."""
    torch.manual_seed(size)
    return torch.stack([torch.cat([kind(size), torch.zeros(3)]) for kind in KINDS.values()])[:, :size]


def check(library: ctypes.CDLL, size: int) -> None:
    logits = logits_of_all_kinds(size)
    for threads in (1, 2, 3):
        ids, values = argmax(library, logits, threads)
        assert torch.equal(ids, logits.argmax(dim=1))
        assert torch.equal(bits(values), bits(logits.gather(1, ids[:, None])[:, 0]))
        for k in {min(k, size) for k in (1, 5, 64, 256)}:
            ids, values = top_k(library, logits, k, threads)
            assert torch.equal(ids, Ranking().top(logits, k))
            assert torch.equal(bits(values), bits(logits.gather(1, ids)))


@pytest.mark.parametrize("size", [1, 2, 15, 37, 63, 64, 65, 1000, 4096, 4097, 10007, 32000])
def test_ranking_kinds_of_rows_equal_plain_torch(library: ctypes.CDLL, size: int) -> None:
    check(library, size)


def test_ranking_older_processor_equals_plain_torch(other_library: ctypes.CDLL) -> None:
    for size in (37, 1000, 4097):
        check(other_library, size)


def test_ranking_large_vocabulary_equals_plain_torch(library: ctypes.CDLL) -> None:
    logits = torch.randn(2, 151936, generator=torch.Generator().manual_seed(0))
    assert torch.equal(argmax(library, logits, 2)[0], logits.argmax(dim=1))
    assert torch.equal(top_k(library, logits, 256, 2)[0], Ranking().top(logits, 256))


def test_ranking_without_rows_does_nothing(library: ctypes.CDLL) -> None:
    assert top_k(library, torch.empty(0, 100), 5, 2)[0].shape == (0, 5)
    assert argmax(library, torch.empty(0, 100), 2)[0].shape == (0,)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 4096, 4100, 9001])
def test_keep_allowed_masks_of_some_rows_as_torch(library: ctypes.CDLL, size: int) -> None:
    torch.manual_seed(size)
    logits = torch.randn(6, size)
    rows = torch.tensor([4, 0, 5])
    masks = torch.randint(-(2**31), 2**31, (3, -(-size // 32)), dtype=torch.int64).to(torch.int32)
    masks[1] = -1
    masks[2, ::2] = 0
    expected = logits.clone()
    Ranking().keep_allowed(expected, rows, masks)
    raw = logits.clone()
    library.er_keep_allowed(logits.data_ptr(), size, rows.data_ptr(), 3, size, masks.data_ptr(), 2)
    assert torch.equal(logits, expected)
    ids, values = NativeRanking(library, num_threads=2).first_allowed(raw, rows, masks)
    assert torch.equal(raw, expected)
    assert torch.equal(ids, expected[rows].argmax(dim=1))
    assert torch.equal(values, expected[rows].amax(dim=1))
    allowed = [[bool(int(word) >> bit & 1) for word in masks[0] for bit in range(32)][:size]]
    assert torch.equal(logits[4].isneginf().logical_not(), torch.tensor(allowed)[0])
