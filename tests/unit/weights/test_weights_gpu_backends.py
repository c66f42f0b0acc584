"""Parts of the backends nccl and ipc that need no GPU: refusals, connecting, and data of other processes."""

from __future__ import annotations

import ctypes
import pickle
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from received_weights import collect
from torch.distributed import PrefixStore, TCPStore
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from eagleray.errors import ConfigError, DeadlineExceeded, InvalidRequest, NotFound, TransferBroken, WeightsMismatch
from eagleray.weights.ipc import check_sizes, find_handles
from eagleray.weights.nccl import check_id, read_pickled_id
from eagleray.weights.nccl_library import NcclCommunicator
from eagleray.weights.receiver import ReceiverPosition, open_receiver
from eagleray.weights.tensors import SentTensor

UUID = "6a1c4b0e-0000-4000-8000-000000000001"


def handle(device: int = 3) -> tuple[Any, tuple[Any, ...]]:
    """Make a handle with the arguments of a float32 tensor of shape [2, 4]."""
    storage = (torch.UntypedStorage, torch.float32, device, b"h" * 64, 32, 0, False, b"r" * 64, 0, b"e" * 64, True)
    return rebuild_cuda_tensor, (torch.Tensor, torch.Size([2, 4]), (4, 1), 0, *storage)


@pytest.mark.parametrize("backend", ["nccl", "torch_nccl", "ipc"])
def test_gpu_backend_on_a_cpu_is_refused(backend: str) -> None:
    with pytest.raises(ConfigError, match=f"backend {backend} .* but the workers compute on the CPU: send by"):
        open_receiver(backend, {"world_size": 2}, ReceiverPosition(0, torch.device("cpu")), 1.0)


def test_nccl_init_info_without_store_and_id_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="either `master_address` and `master_port` or `nccl_unique_id_b64`"):
        open_receiver("nccl", {"world_size": 2}, ReceiverPosition(0, torch.device("cuda", 0)), 1.0)


def test_torch_nccl_receiver_joins_the_communicator_at_the_first_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def communicator(unique_id: bytes, **place: Any) -> None:
        made.append((unique_id, place["rank"], place["size"]))
        raise TransferBroken("there is no GPU")

    monkeypatch.setattr("eagleray.weights.nccl.NcclCommunicator", communicator)
    trainer = TCPStore("127.0.0.1", 0, 4, is_master=True, wait_for_workers=False)
    info = {"master_address": "127.0.0.1", "master_port": trainer.port, "world_size": 4, "group_name": "pp_0"}
    position = ReceiverPosition(2, torch.device("cuda", 0))
    receiver = open_receiver("torch_nccl", info, position, 10.0)
    receiver.connect()
    assert made == []
    PrefixStore("cuda/", PrefixStore("pp_0/", PrefixStore("pp_0", trainer))).set("0", b"i" * 128)
    with pytest.raises(TransferBroken, match="there is no GPU"):
        collect(receiver, {"names": [], "dtype_names": [], "shapes": [], "group_name": "pp_0"})
    assert made == [(b"i" * 128, 3, 4)]
    with pytest.raises(TransferBroken, match="the group was closed"):
        collect(receiver, {"names": [], "dtype_names": [], "shapes": []})


class WaitingLibrary:
    """NCCL whose other ranks come when `come` is set."""

    def __init__(self, result: int = 0) -> None:
        self.come = threading.Event()
        self.aborted: queue.Queue[int] = queue.Queue()
        self._result = result

    def ncclCommInitRank(self, communicator: Any, size: int, unique_id: Any, rank: int) -> int:
        assert self.come.wait(30)
        communicator._obj.value = 7
        return self._result

    def ncclCommAbort(self, communicator: ctypes.c_void_p) -> None:
        self.aborted.put(communicator.value or 0)

    def ncclGetErrorString(self, result: int) -> bytes:
        return b"remote process exited"


@pytest.fixture
def make_communicator(monkeypatch: pytest.MonkeyPatch) -> Callable[..., NcclCommunicator]:
    def make(library: WaitingLibrary, *, timeout: float, is_cancelled: bool = False) -> NcclCommunicator:
        monkeypatch.setattr("eagleray.weights.nccl_library._load", lambda: library)
        monkeypatch.setattr("torch.cuda.device", lambda device: nullcontext())
        return NcclCommunicator(
            b"i" * 128,
            rank=1,
            size=4,
            device=torch.device("cuda", 0),
            timeout=timeout,
            is_cancelled=lambda: is_cancelled,
        )

    return make


@pytest.mark.parametrize(
    ("is_cancelled", "error", "message"),
    [
        (
            False,
            DeadlineExceeded,
            r"the 4 ranks of the trainer's communicator of NCCL were not .* within 0\.1 s",
        ),
        (True, TransferBroken, "the transfer was closed while the 4 ranks"),
    ],
)
def test_nccl_communicator_without_its_other_ranks_stops_waiting_and_aborts_late(
    make_communicator: Callable[..., NcclCommunicator], is_cancelled: bool, error: type[Exception], message: str
) -> None:
    library = WaitingLibrary()
    with pytest.raises(error, match=message):
        make_communicator(library, timeout=30.0 if is_cancelled else 0.1, is_cancelled=is_cancelled)
    assert library.aborted.empty()
    library.come.set()
    assert library.aborted.get(timeout=30) == 7


def test_nccl_communicator_connected_ranks_are_kept_until_abort(
    make_communicator: Callable[..., NcclCommunicator],
) -> None:
    library = WaitingLibrary()
    library.come.set()
    communicator = make_communicator(library, timeout=30.0)
    assert library.aborted.empty()
    communicator.abort()
    assert library.aborted.get(timeout=30) == 7


def test_nccl_communicator_failed_connection_gives_the_text_of_nccl(
    make_communicator: Callable[..., NcclCommunicator],
) -> None:
    library = WaitingLibrary(result=6)
    library.come.set()
    with pytest.raises(TransferBroken, match="ncclCommInitRank failed: remote process exited"):
        make_communicator(library, timeout=30.0)


def test_read_pickled_id_struct_of_another_module_gives_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("trainer_nccl")
    kind = type(
        "ncclUniqueId",
        (ctypes.Structure,),
        {"_fields_": [("internal", ctypes.c_byte * 128)], "__module__": "trainer_nccl"},
    )
    module.ncclUniqueId = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trainer_nccl", module)
    unique_id = bytes(range(128))
    pickled = pickle.dumps(kind.from_buffer_copy(unique_id))  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "trainer_nccl")
    assert read_pickled_id(pickled) == unique_id


class RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("executed",)


@pytest.mark.parametrize("value", [RunsCode(), b"bytes", b"x" * 2000, {"a": 1}, None])
def test_read_pickled_id_anything_else_is_refused_and_not_executed(
    value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidRequest, match="NCCL's id"):
        read_pickled_id(pickle.dumps(value))
    assert capsys.readouterr().out == ""


def test_check_id_of_wrong_length_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="127 bytes, but 128"):
        check_id(b"x" * 127)


@pytest.mark.parametrize("gpu", [UUID, f"GPU-{UUID}", UUID.upper()])
def test_find_handles_either_form_of_the_gpu_uuid_matches(gpu: str) -> None:
    found = find_handles([{gpu: handle(), "GPU-other": handle(0)}], UUID, 1)
    assert (found[0].device, found[0].size, found[0].dtype) == (3, (2, 4), "float32")


def test_find_handles_dict_of_one_buffer_is_accepted() -> None:
    assert len(find_handles({UUID: handle()}, UUID, 1)) == 1


def test_find_handles_no_handle_for_the_gpu_names_both() -> None:
    with pytest.raises(NotFound, match=f"none for GPU {UUID}.*there are handles for GPU-other"):
        find_handles([{"GPU-other": handle()}], UUID, 1)


@pytest.mark.parametrize(
    "handles",
    [None, [], "x", [handle()], [{UUID: handle()[1]}], [{UUID: (rebuild_cuda_tensor, (1, 2))}], [{UUID: 1}]],
)
def test_find_handles_anything_else_is_refused(handles: Any) -> None:
    with pytest.raises(WeightsMismatch, match="update_info: "):
        find_handles(handles, UUID, 1)


def test_check_sizes_buffer_smaller_than_the_tensors_is_refused() -> None:
    tensors = [SentTensor("a", torch.float32, (2, 4)), SentTensor("b", torch.uint8, (3,))]
    check_sizes(tensors, [32, 3], 35)
    with pytest.raises(WeightsMismatch, match="35 bytes, but the shared buffer has 34"):
        check_sizes(tensors, [32, 3], 34)
    with pytest.raises(WeightsMismatch, match="`tensor_sizes` are not the bytes"):
        check_sizes(tensors, [32, 4], 40)
