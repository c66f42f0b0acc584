"""Weights in shared memory of the node, and refusals before anything is received."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from received_weights import collect

from eagleray.errors import EagleRayError, InvalidRequest, NotFound, WeightsMismatch
from eagleray.weights import SharedMemorySender
from eagleray.weights.receiver import ReceiverPosition, open_receiver
from eagleray.weights.shared_memory_sender import SHARED_MEMORY_DIR
from eagleray.weights.tensors import SentTensor

WEIGHTS = [
    ("scale", torch.tensor(1.5)),
    ("embed", torch.randn(7, 3).to(torch.bfloat16)),
    ("empty", torch.empty(0, 4)),
    ("blocks", torch.arange(9, dtype=torch.uint8)),
    ("transposed", torch.randn(4, 6).T),
]


@pytest.fixture
def sender() -> Iterator[SharedMemorySender]:
    with SharedMemorySender() as sender:
        yield sender


def receive(update_info: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    receiver = open_receiver("shm", {}, ReceiverPosition(0, torch.device("cpu")), 1.0)
    receiver.connect()
    return collect(receiver, update_info)


def test_shm_receiver_tensors_of_a_grown_segment_are_equal(sender: SharedMemorySender) -> None:
    for weights in (WEIGHTS[:2], WEIGHTS, [("large", torch.randn(300, 300))]):
        received = receive(sender.write(weights))
        assert [name for name, _ in received] == [name for name, _ in weights]
        assert all(torch.equal(found, sent) for (_, found), (_, sent) in zip(received, weights, strict=True))


def num_private_mappings(name: str) -> int:
    """Return the number of mappings of a segment that only this process may write to: those of receivers."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(name in line and line.split()[1] == "rw-p" for line in lines)


def test_shm_receiver_connected_keeps_the_last_segment_mapped(sender: SharedMemorySender) -> None:
    receiver = open_receiver("shm", {}, ReceiverPosition(0, torch.device("cpu")), 1.0)
    receiver.connect()
    with SharedMemorySender() as other:
        names = [each.write([("weight", torch.zeros(5000))])["name"] for each in (sender, other)]
        for index, value in [(0, 1), (0, 2), (1, 3), (0, 4)]:
            received = collect(receiver, (sender, other)[index].write([("weight", torch.full((5000,), value))]))
            assert [(name, weight.unique().tolist()) for name, weight in received] == [("weight", [value])]
            assert [num_private_mappings(name) for name in names] == [1 - index, index]
    receiver.close()
    assert num_private_mappings(names[0]) == 0


def test_shm_receiver_not_connected_keeps_nothing_mapped(sender: SharedMemorySender) -> None:
    receiver = open_receiver("shm", {}, ReceiverPosition(0, torch.device("cpu")), 1.0)
    info = sender.write(WEIGHTS)
    collect(receiver, info)
    assert num_private_mappings(info["name"]) == 0


def test_shm_receiver_of_a_file_reads_it_by_its_path(sender: SharedMemorySender, tmp_path: Path) -> None:
    info = sender.write(WEIGHTS)
    path = tmp_path / "weights.bin"
    path.write_bytes((SHARED_MEMORY_DIR / info["name"]).read_bytes())
    received = receive({**info, "name": str(path)})
    assert torch.equal(received[1][1], WEIGHTS[1][1])


def test_shm_sender_closed_removes_the_segment(sender: SharedMemorySender) -> None:
    info = sender.write(WEIGHTS)
    sender.close()
    assert not (SHARED_MEMORY_DIR / info["name"]).exists()
    with pytest.raises(NotFound, match="cannot be opened"):
        receive(info)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"node": "another"}, NotFound, "is on another node than this worker"),
        ({"name": "../etc/passwd"}, InvalidRequest, "neither the name of a POSIX segment nor an absolute path"),
        ({"name": ""}, InvalidRequest, "neither the name of a POSIX segment"),
        ({"name": "a\0b"}, NotFound, "cannot be opened \\(embedded null byte\\)"),
        ({"name": "/proc/self/fd"}, WeightsMismatch, "/proc/self/fd is neither a POSIX segment nor a file"),
        ({"size": -1}, InvalidRequest, "`size`: expected `int` >= 0"),
        ({"size": 2**40}, WeightsMismatch, "but update_info says 1099511627776"),
        ({"offsets": [0, 2**41, 0, 0, 0]}, WeightsMismatch, "embed: 42 bytes at offset 2199023255552 are not inside"),
        ({"offsets": [0, -2, 0, 0, 0]}, WeightsMismatch, "embed: 42 bytes at offset -2 are not inside"),
        ({"offsets": [0]}, WeightsMismatch, "5 `names`, but 1 `offsets`"),
        ({"offsets": "x"}, InvalidRequest, "`offsets`: expected `array`, got `str`"),
        ({"names": ["a"]}, WeightsMismatch, "1 `names`, 5 `dtype_names`"),
        ({"names": None}, WeightsMismatch, "`names` must be a list"),
        ({"names": [1] * 5}, WeightsMismatch, "an entry of `names` is 1"),
        ({"dtype_names": ["complex64"] * 5}, WeightsMismatch, "scale: dtype 'complex64' cannot be received"),
        ({"shapes": [[-1]] * 5}, WeightsMismatch, "scale: \\[-1\\] is no shape"),
        ({"shapes": [[True]] * 5}, WeightsMismatch, "scale: \\[True\\] is no shape"),
        ({"shapes": [[2**40, 2**40]] * 5}, WeightsMismatch, "scale: .* are not inside"),
    ],
)
def test_shm_receiver_wrong_update_info_is_refused(
    sender: SharedMemorySender, changes: dict[str, Any], kind: type[EagleRayError], message: str
) -> None:
    info = {**sender.write(WEIGHTS), **changes}
    with pytest.raises(kind, match=message):
        receive(info)


def test_shm_receiver_of_a_pipe_is_refused_without_a_wait(sender: SharedMemorySender, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WeightsMismatch, match="pipe is neither a POSIX segment nor a file"):
        receive({**sender.write(WEIGHTS), "name": str(tmp_path / "pipe")})


def test_shm_receiver_refused_tensor_yields_none(sender: SharedMemorySender) -> None:
    def refuse(tensors: Sequence[SentTensor]) -> None:
        assert [tensor.name for tensor in tensors] == [name for name, _ in WEIGHTS]
        raise WeightsMismatch("scale: no such weight")

    receiver = open_receiver("shm", {}, ReceiverPosition(0, torch.device("cpu")), 1.0)
    with pytest.raises(WeightsMismatch, match="no such weight"):
        next(receiver.receive(sender.write(WEIGHTS), refuse))
