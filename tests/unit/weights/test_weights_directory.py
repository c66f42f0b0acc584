"""Weights in a directory of safetensors files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from received_weights import accept, collect
from safetensors.torch import save_file

from eagleray.errors import CheckpointError, InvalidRequest, NotFound, WeightsMismatch
from eagleray.weights.disk import directory_fingerprint
from eagleray.weights.receiver import ReceiverPosition, WeightReceiver, open_receiver
from eagleray.weights.tensors import SentTensor

SHARDS = {
    "model-00001-of-00002.safetensors": {"a": torch.randn(3, 4), "b": torch.randn(5).to(torch.bfloat16)},
    "model-00002-of-00002.safetensors": {"c": torch.arange(6, dtype=torch.uint8)},
}


@pytest.fixture
def receiver() -> WeightReceiver:
    return open_receiver("disk", {}, ReceiverPosition(0, torch.device("cpu")), 1.0)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name, tensors in SHARDS.items():
        save_file(tensors, tmp_path / name)
    weight_map = {name: shard for shard, tensors in SHARDS.items() for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_disk_receiver_shards_yield_every_tensor(receiver: WeightReceiver, directory: Path) -> None:
    received = dict(collect(receiver, {"weight_dir": str(directory)}))
    expected = {name: tensor for tensors in SHARDS.values() for name, tensor in tensors.items()}
    assert received.keys() == expected.keys()
    assert all(torch.equal(received[name], tensor) for name, tensor in expected.items())


def test_disk_receiver_all_headers_are_checked_before_the_first_tensor(
    receiver: WeightReceiver, directory: Path
) -> None:
    def refuse(tensors: Sequence[SentTensor]) -> None:
        assert {(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors} == {
            ("a", torch.float32, (3, 4)),
            ("b", torch.bfloat16, (5,)),
            ("c", torch.uint8, (6,)),
        }
        raise WeightsMismatch("c: no such weight")

    with pytest.raises(WeightsMismatch, match="c: no such weight"):
        next(receiver.receive({"weight_dir": str(directory)}, refuse))


def test_disk_receiver_truncated_file_is_named(receiver: WeightReceiver, directory: Path) -> None:
    path = directory / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"00002.safetensors: is not a complete safetensors file"):
        next(receiver.receive({"weight_dir": str(directory)}, accept))


def test_disk_receiver_file_replaced_after_the_check_is_named(receiver: WeightReceiver, directory: Path) -> None:
    def replace(tensors: Sequence[SentTensor]) -> None:
        save_file({"c": torch.arange(7, dtype=torch.uint8)}, directory / "model-00002-of-00002.safetensors")

    with pytest.raises(CheckpointError, match=r"00002-of-00002.safetensors: was replaced while it was read"):
        list(receiver.receive({"weight_dir": str(directory)}, replace))


def test_disk_receiver_missing_directory_is_not_found(receiver: WeightReceiver, tmp_path: Path) -> None:
    for name in ("none", "x" * 300, "a\0b"):
        with pytest.raises(NotFound, match="there is no such directory"):
            next(receiver.receive({"weight_dir": str(tmp_path / name)}, accept))


def test_disk_receiver_without_a_directory_says_what_is_needed(receiver: WeightReceiver) -> None:
    with pytest.raises(InvalidRequest, match="`weight_dir` must be the path of a directory"):
        next(receiver.receive({"names": []}, accept))


def test_directory_fingerprint_replaced_file_changes_it(directory: Path) -> None:
    before = directory_fingerprint(str(directory))
    assert directory_fingerprint(str(directory)) == before
    other = directory / "other"
    save_file({"c": torch.arange(6, dtype=torch.uint8)}, other)
    other.rename(directory / "model-00002-of-00002.safetensors")
    assert directory_fingerprint(str(directory)) != before
