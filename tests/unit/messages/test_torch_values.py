"""Values of torch inside plain data: the receiver has the same ones, and nothing but known fields is accepted."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from eagleray.messages.plain import pack, unpack
from eagleray.messages.torch_values import CudaTensorHandle, TensorBytes, find_dtype

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
HANDLE = (
    torch.Tensor, torch.Size([2, 3]), (3, 1), 4, torch.storage.TypedStorage, torch.bfloat16, 1, b"\x01" * 64, 64, 512,
    False, b"\x02" * 32, 8, b"\x03" * 64, True,
)  # fmt: skip


@st.composite
def tensors(draw):
    """Draw a tensor of any dtype and stride."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    elements = torch.randint(0, 100, [2 * size for size in shape])
    tensor = elements.to(draw(st.sampled_from(DTYPES)))[tuple(slice(None, None, 2) for _ in shape)]
    return tensor.permute(draw(st.permutations(range(len(shape)))))


def raw(tensor):
    """Return dtype, shape and bytes of a tensor."""
    return (
        tensor.dtype,
        tensor.shape,
        tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist(),
    )


@given(tensors())
def test_pack_tensor_round_trip_is_equal(tensor):
    got = unpack(pack({"weights": [tensor]}))["weights"][0]
    assert type(got) is torch.Tensor and got.is_contiguous()
    assert raw(got) == raw(tensor)


def test_unpack_tensor_is_owned_and_writable():
    sent = torch.arange(6.0)
    packed = pack([sent, sent])
    one, other = unpack(packed)
    one += 1
    assert (sent[0], other[0], unpack(packed)[0][0]) == (0, 0, 0)


def test_pack_tensors_of_a_trainer_arrive_as_plain_tensors():
    parameter = torch.nn.Parameter(torch.ones(2))
    conjugate = torch.tensor([1 + 2j]).conj()
    with torch.inference_mode():
        inferred = torch.ones(1)
    for sent in (parameter, parameter * 2, conjugate, inferred, torch.nn.Buffer(torch.ones(3))):
        got = unpack(pack(sent))
        assert type(got) is torch.Tensor and not got.requires_grad and not got.is_inference()
        assert torch.equal(got, sent.detach())


def test_pack_dtype_and_size_round_trip_keep_their_types():
    sent = [torch.bfloat16, torch.Size([2, 0]), torch.Size([])]
    got = unpack(pack(sent))
    assert got == sent
    assert [type(one) for one in got] == [torch.dtype, torch.Size, torch.Size]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(2, device="meta"), "a tensor on the device `meta`"),
        (torch.ones(2, 2).to_sparse(), "a tensor of layout torch.sparse_coo"),
        (rebuild_cuda_tensor, "a value of type builtins.function"),
    ],
)
def test_pack_tensor_without_elements_on_the_host_is_refused(tensor, message):
    with pytest.raises(TypeError, match=message):
        pack([tensor])


def test_pack_cuda_handle_round_trip_is_equal():
    handles = {"GPU-1": (rebuild_cuda_tensor, HANDLE), "GPU-2": [rebuild_cuda_tensor, list(HANDLE)]}
    got = unpack(pack(handles))
    assert got == {"GPU-1": (rebuild_cuda_tensor, HANDLE), "GPU-2": (rebuild_cuda_tensor, HANDLE)}
    assert type(got["GPU-1"][1][1]) is torch.Size
    empty = (*HANDLE[:1], torch.Size([0]), (1,), 0, *HANDLE[4:7], None, 0, 0, True, None, 0, None, False)
    assert unpack(pack((rebuild_cuda_tensor, empty))) == (rebuild_cuda_tensor, empty)


@pytest.mark.parametrize(
    ("number", "value"),
    [
        (0, str), (0, "Tensor"), (1, [-1, 3]), (1, (2,)), (2, (3, 1, 1)), (2, ("3", 1)), (3, -1),
        (4, repr), (4, dict), (5, "bfloat16"), (5, None), (6, None), (6, "cuda:0"), (7, "handle"), (7, b"x" * 5000),
        (8, 1.5), (9, -8), (10, 1), (11, [1]), (12, None), (13, 5), (14, None),
    ],
)  # fmt: skip
def test_pack_cuda_handle_with_a_wrong_field_is_refused(number, value):
    fields = (*HANDLE[:number], value, *HANDLE[number + 1 :])
    with pytest.raises(TypeError, match=r"value\[0\]: a handle of a CUDA tensor that torch did not make"):
        pack([(rebuild_cuda_tensor, fields)])


@pytest.mark.parametrize("fields", [HANDLE[:14], (*HANDLE, None), None, 5])
def test_pack_cuda_handle_of_other_length_is_refused(fields):
    with pytest.raises(TypeError, match="`rebuild_cuda_tensor` has 15 arguments"):
        pack((rebuild_cuda_tensor, fields))


def test_unpack_cuda_handle_beyond_its_storage_is_refused():
    for change in ({8: 18}, {3: 27}, {1: torch.Size([10, 3])}, {2: (100, 1)}):
        fields = tuple(change.get(number, field) for number, field in enumerate(HANDLE))
        with pytest.raises(msgspec.DecodeError, match="a CUDA tensor is larger than its storage"):
            unpack(pack((rebuild_cuda_tensor, fields)))


@pytest.mark.parametrize("name", ["Tensor", "load", "bfloat", "__name__", ""])
def test_find_dtype_of_another_name_is_refused(name):
    with pytest.raises(msgspec.DecodeError, match="torch has no dtype"):
        find_dtype(name)


def test_unpack_tensor_of_wrong_size_is_refused():
    packed = pack(torch.ones(3, dtype=torch.int8))
    with pytest.raises(msgspec.DecodeError, match=r"3 bytes are no tensor of"):
        unpack(packed.replace(b"int8", b"half"))
    with pytest.raises(msgspec.DecodeError):
        unpack(packed.replace(b"\xa4int8", b"\xa4uint"))


@pytest.mark.parametrize("where", [{}, {"update_info": [{}]}])
def test_pack_pickled_handles_are_refused_with_what_to_send(where):
    inner = where["update_info"][0] if where else where
    inner["ipc_handles_pickled"] = "gASVAA"
    with pytest.raises(TypeError, match="send `ipc_handles` from Python, or use backend `nccl` or `shm` over HTTP"):
        pack([where])
    inner["ipc_handles_pickled"] = None
    assert unpack(pack([where])) == [where]


def test_unpack_without_torch_does_not_import_it():
    values = [torch.ones(2, dtype=torch.bfloat16), torch.float16, torch.Size([5]), (rebuild_cuda_tensor, HANDLE)]
    program = (
        "import sys\n"
        "from eagleray.messages.plain import pack, unpack\n"
        "got = unpack(sys.stdin.buffer.read(), as_torch=False)\n"
        "pack([1, {'a': (2,)}])\n"
        "assert 'torch' not in sys.modules\n"
        "print(got)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], input=pack(values), capture_output=True, check=True)
    handle = CudaTensorHandle.of(HANDLE)
    assert done.stdout.decode().strip() == str(
        [TensorBytes("torch.bfloat16", (2,), b"\x80?\x80?"), "torch.float16", [5], handle]
    )
