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
    ids, values = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
    library.er_argmax(*rows_of(logits), ids.data_ptr(), values.data_ptr(), scratch.data_ptr(), threads)
    return ids, values


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


def random_masks(rows: int, size: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, (rows, -(-size // 32)), dtype=torch.int64).to(torch.int32)


def check_first_allowed(logits: Tensor, rows: Tensor, masks: Tensor, ranking: Ranking) -> None:
    """Compare with plain torch: logits, token ids, their logits, and the highest logits before."""
    kept, expected = logits.clone(), logits.clone()
    ids, values, unmasked = ranking.first_allowed(kept, rows, masks)
    expected_ids, expected_values, expected_unmasked = Ranking().first_allowed(expected, rows, masks)
    assert torch.equal(bits(kept), bits(expected))
    assert torch.equal(ids, expected_ids)
    assert torch.equal(bits(values), bits(expected_values))
    torch.testing.assert_close(unmasked, expected_unmasked, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 4096, 4100, 9001])
def test_first_allowed_kinds_of_rows_equal_plain_torch(library: ctypes.CDLL, size: int) -> None:
    logits = logits_of_all_kinds(size).contiguous()
    all_rows = torch.arange(len(logits))
    masks = random_masks(len(logits), size)
    masks[1], masks[2], masks[3, ::2] = -1, 0, 0
    for threads in (1, 2, 3):
        ranking = NativeRanking(library, num_threads=threads)
        for rows in (all_rows, torch.arange(0, len(logits), 2), all_rows[-1:]):
            check_first_allowed(logits, rows, masks[: len(rows)].contiguous(), ranking)


def test_first_allowed_older_processor_equals_plain_torch(other_library: ctypes.CDLL) -> None:
    logits = logits_of_all_kinds(4100).contiguous()
    rows = torch.arange(1, len(logits), 2)
    check_first_allowed(logits, rows, random_masks(len(rows), 4100), NativeRanking(other_library, num_threads=1))


def test_first_allowed_forbids_the_tokens_without_a_bit(library: ctypes.CDLL) -> None:
    logits = torch.randn(3, 70)
    masks = random_masks(1, 70)
    NativeRanking(library, num_threads=1).first_allowed(logits, torch.tensor([1]), masks)
    allowed = [bool(int(word) >> bit & 1) for word in masks[0] for bit in range(32)][:70]
    assert logits[1].isneginf().logical_not().tolist() == allowed
    assert logits[::2].isfinite().all()
