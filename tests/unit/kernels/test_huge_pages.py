"""Chunks of memory exchange their contents while their addresses stay."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from eagleray.kernels.cpu import huge_pages
from eagleray.kernels.cpu.huge_pages import WeightChunk, WeightMemory, exchange
from eagleray.models.staging import StagingMemory

CPU = torch.device("cpu")


def chunk_of(piece: Tensor) -> WeightChunk:
    chunk = WeightChunk.of(piece)
    assert chunk is not None
    return chunk


def test_exchange_two_chunks_swaps_contents_at_fixed_addresses():
    memory = WeightMemory()
    pieces = [memory.allocate(1000, torch.float32), memory.allocate(3 << 20, torch.float32)]
    other = WeightChunk.allocate(chunk_of(pieces[0]).num_bytes)
    addresses = [piece.data_ptr() for piece in pieces]
    other.fill_(7)
    for value, piece in enumerate(pieces, start=1):
        piece.fill_(value)
    for is_swapped in (True, False, True):
        assert exchange(chunk_of(pieces[0]), chunk_of(other))
        assert [piece.data_ptr() for piece in pieces] == addresses
        for value, piece in enumerate(pieces, start=1):
            offset = piece.data_ptr() - chunk_of(piece).address
            mirrored = other[offset : offset + piece.nbytes]
            new, old = (mirrored.view(torch.float32), piece.view(torch.uint8))
            assert (new if is_swapped else piece).eq(value).all()
            assert (old if is_swapped else mirrored).eq(7).all()


@pytest.mark.parametrize("failing", [1, 2])
def test_exchange_the_system_refuses_changes_nothing(failing, monkeypatch):
    moves = []

    def move(source: int, target: int, size: int) -> bool:
        moves.append((source, target))
        return len(moves) != failing and real(source, target, size)

    real = huge_pages._move_pages
    monkeypatch.setattr(huge_pages, "_move_pages", move)
    first, second = WeightChunk.allocate(1), WeightChunk.allocate(1)
    first.fill_(1)
    second.fill_(2)
    assert not exchange(chunk_of(first), chunk_of(second))
    assert first.eq(1).all() and second.eq(2).all()


def test_chunk_no_pieces_left_is_freed():
    piece = WeightMemory().allocate(10, torch.uint8)
    address = piece.untyped_storage().data_ptr()
    assert address in huge_pages._chunks
    del piece
    gc.collect()
    assert address not in huge_pages._chunks


@pytest.mark.parametrize("is_complete", [True, False])
def test_replaceable_chunks_piece_without_new_weights_keeps_the_chunk(is_complete):
    weights, staging = WeightMemory(), StagingMemory(CPU)
    places = [weights.allocate(size, torch.uint8) for size in (100, 200, 100)]
    staged = []
    for place in places if is_complete else places[1:]:
        with staging.mirroring([place]):
            staged.append((place, staging.allocate(len(place), torch.uint8)))
    assert staging.replaceable_chunks(staged) == ({chunk_of(places[0])} if is_complete else set())


def test_mirroring_piece_is_taken_gives_other_memory():
    place, staging = WeightMemory().allocate(100, torch.uint8), StagingMemory(CPU)
    with staging.mirroring([place]):
        first, second = (staging.allocate(100, torch.uint8) for _ in range(2))
        assert first.data_ptr() != second.data_ptr()
        assert staging.replaceable_chunks([(place, second)]) == set()
        staging.release([first])
        assert staging.allocate(100, torch.uint8).data_ptr() == first.data_ptr()
    assert staging.replaceable_chunks([(place, first)]) == {chunk_of(place)}
