"""Weights that come by broadcasts of gloo: ranks are threads of this process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from received_weights import accept, collect
from torch.distributed.distributed_c10d import _new_process_group_helper, rendezvous

from eagleray.errors import DeadlineExceeded, InvalidRequest, TransferBroken, WeightsMismatch
from eagleray.weights import Sender
from eagleray.weights.receiver import ReceiverPosition, open_receiver
from eagleray.weights.tensors import SentTensor

Weights = list[tuple[str, torch.Tensor]]

CPU = torch.device("cpu")
TIMEOUT = 30.0

WEIGHTS: Weights = [
    (f"layers.{index}.weight", torch.randn(5 * index + 1, 3).to(dtype))
    for index, dtype in enumerate([torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float64] * 3)
]


def receiver_of(sender: Sender, rank: int) -> Any:
    return open_receiver("gloo", sender.init_info, ReceiverPosition(rank, CPU), TIMEOUT)


def assert_equal(received: Weights, sent: Weights) -> None:
    assert [name for name, _ in received] == [name for name, _ in sent]
    for (name, found), (_, expected) in zip(received, sent, strict=True):
        assert found.dtype == expected.dtype, name
        assert torch.equal(found, expected), name


def receive_twice(sender: Sender, rank: int, weights: Weights, *, check: Callable[..., None] = accept) -> list[Weights]:
    receiver = receiver_of(sender, rank)
    receiver.connect()
    info = sender.update_info(weights)
    received = [collect(receiver, info, check) for _ in range(2)]
    receiver.close()
    return received


@pytest.mark.parametrize("bucket_bytes", [1, 100, 2**20])
@pytest.mark.parametrize("is_packed", [True, False])
def test_gloo_receivers_two_updates_of_any_buckets_get_equal_tensors(is_packed: bool, bucket_bytes: int) -> None:
    sender = Sender(2, is_packed=is_packed, bucket_bytes=bucket_bytes, timeout=TIMEOUT)
    with ThreadPoolExecutor() as pool:
        ranks = [pool.submit(receive_twice, sender, rank, WEIGHTS) for rank in range(2)]
        sender.connect()
        for _ in range(2):
            sender.send(WEIGHTS)
        for rank in ranks:
            for received in rank.result(TIMEOUT):
                assert_equal(received, WEIGHTS)
    sender.close()


def test_gloo_receiver_refused_tensor_breaks_the_broadcast_of_the_sender() -> None:
    def refuse(tensors: Sequence[SentTensor]) -> None:
        raise WeightsMismatch(f"{tensors[0].name}: the model has no such weight")

    sender = Sender(1, timeout=TIMEOUT)
    with ThreadPoolExecutor() as pool:
        rank = pool.submit(receive_twice, sender, 0, WEIGHTS, check=refuse)
        sender.connect()
        with pytest.raises(WeightsMismatch, match=r"layers.0.weight: the model has no"):
            rank.result(TIMEOUT)
        large = [("a", torch.zeros(2**22))]  # more than the buffers of a connection hold
        with pytest.raises(TransferBroken, match="the connection to the workers broke"):
            sender.send(large)


def test_gloo_receiver_sender_leaves_in_an_update_names_the_trainer() -> None:
    sender = Sender(2, timeout=TIMEOUT)
    with ThreadPoolExecutor() as pool:
        ranks = [pool.submit(receive_twice, sender, rank, WEIGHTS) for rank in range(2)]
        sender.connect()
        sender.send(WEIGHTS)
        sender.close()
        for rank in ranks:
            with pytest.raises(TransferBroken, match="the connection to the trainer broke"):
                rank.result(TIMEOUT)


def test_gloo_receiver_closed_while_it_waits_for_a_tensor_ends_the_wait() -> None:
    sender = Sender(1, timeout=TIMEOUT)
    checked = threading.Event()
    with ThreadPoolExecutor() as pool:
        receiver = open_receiver("gloo", sender.init_info, ReceiverPosition(0, CPU), 100 * TIMEOUT)
        connected = pool.submit(receiver.connect)
        sender.connect()
        connected.result(TIMEOUT)
        received = pool.submit(collect, receiver, Sender.update_info(WEIGHTS), lambda sent: checked.set())
        assert checked.wait(TIMEOUT)
        receiver.close()
        with pytest.raises(TransferBroken, match="the group was closed"):
            received.result(TIMEOUT)
        with pytest.raises(TransferBroken, match="the connection to the workers broke"):
            sender.send([("a", torch.zeros(2**22))])


def test_gloo_receiver_without_a_trainer_stops_at_the_deadline() -> None:
    sender = Sender(1)
    info = {**sender.init_info}
    sender.close()  # nobody listens on its port
    receiver = open_receiver("gloo", info, ReceiverPosition(0, CPU), 0.2)
    with pytest.raises(DeadlineExceeded, match=r"the trainer was not reached at 127\.0\.0\.1"):
        receiver.connect()


def test_gloo_receiver_closed_while_it_waits_for_the_trainer_stops_waiting() -> None:
    sender = Sender(1)
    info = {**sender.init_info}
    sender.close()
    receiver = open_receiver("gloo", info, ReceiverPosition(0, CPU), TIMEOUT)
    outcome: Future[None] = Future()

    def connect() -> None:
        try:
            receiver.connect()
        except TransferBroken as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=connect)
    thread.start()
    receiver.close()
    with pytest.raises(TransferBroken, match="was closed while the trainer"):
        outcome.result(TIMEOUT)
    thread.join()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"master_port": 1, "world_size": 2}, "missing required field `master_address`"),
        ({"master_address": "h", "master_port": "x", "world_size": 2}, "`master_port`: expected `int`"),
        ({"master_address": "h", "master_port": 65536, "world_size": 2}, "`master_port`: expected `int` <= 65535"),
        ({"master_address": "h", "master_port": 1, "world_size": 2, "packed_num_buffers": 0}, "`packed_num_buffers`"),
        ({"master_address": "h", "master_port": 1, "world_size": 1}, "rank 1 in a group of `world_size` 1"),
        ({"master_address": "h", "master_port": 1, "world_size": 9, "rank_offset": 0}, "rank 0 in a group"),
    ],
)
def test_open_receiver_wrong_init_info_names_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        open_receiver("gloo", fields, ReceiverPosition(0, CPU), TIMEOUT)


def test_gloo_receiver_address_that_no_host_can_have_is_refused() -> None:
    fields = {"master_address": "h" * 70, "master_port": 1, "world_size": 2}
    with pytest.raises(InvalidRequest, match="is no name of a host"):
        open_receiver("gloo", fields, ReceiverPosition(0, CPU), TIMEOUT).connect()


def test_open_receiver_unknown_backend_lists_those_there_are() -> None:
    with pytest.raises(
        InvalidRequest, match="no weight transfer backend 'mpi'; there are gloo, nccl, torch_nccl, shm, ipc, disk"
    ):
        open_receiver("mpi", {}, ReceiverPosition(0, CPU), TIMEOUT)


def test_gloo_receiver_group_of_torch_distributed_gets_its_broadcasts() -> None:
    """A trainer that makes its group as SGLang's clients do, with functions of torch alone."""
    probe = Sender(1)  # finds a free port
    port = probe.init_info["master_port"]
    probe.close()
    name, limit = "update_group", timedelta(seconds=TIMEOUT)

    def train() -> None:
        store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=limit))
        group, _ = _new_process_group_helper(
            size, rank, [], "gloo", dist.PrefixStore(name, store), group_name=name, timeout=limit
        )
        backend = group._get_backend(CPU)
        for _, tensor in WEIGHTS:
            backend.broadcast(tensor.clone(), 0, limit).wait(limit)

    info = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2, "group_name": name}
    receiver = open_receiver("gloo", info, ReceiverPosition(0, CPU), TIMEOUT)
    update_info = {
        "names": [name for name, _ in WEIGHTS],
        "dtype_names": [str(tensor.dtype) for _, tensor in WEIGHTS],
        "shapes": [list(tensor.shape) for _, tensor in WEIGHTS],
    }
    with ThreadPoolExecutor() as pool:
        trainer = pool.submit(train)
        receiver.connect()
        received = collect(receiver, update_info)
        trainer.result(TIMEOUT)
    receiver.close()
    assert_equal(received, WEIGHTS)


def test_gloo_receiver_update_for_another_group_names_both() -> None:
    sender = Sender(1, timeout=TIMEOUT)
    with ThreadPoolExecutor() as pool:
        receiver = open_receiver("gloo", sender.init_info, ReceiverPosition(0, CPU), TIMEOUT)
        connected = pool.submit(receiver.connect)
        sender.connect()
        connected.result(TIMEOUT)
        with pytest.raises(TransferBroken, match="are in the group 'weights', but the update is for 'second'"):
            collect(receiver, {**Sender.update_info(WEIGHTS), "group_name": "second"})
    sender.close()


def test_senders_need_torch_alone() -> None:
    code = "import sys, eagleray.weights; print(sorted({'msgspec', 'zmq', 'ray', 'safetensors'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == "[]"
