"""/collective_rpc: plain data in both directions."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
import pytest
import torch
from server_fakes import Call, serving, settle

from eagleray.errors import DeadlineExceeded, InvalidRequest
from eagleray.messages.failure import Failure
from eagleray.messages.outputs import WorkersReturned
from eagleray.messages.plain import pack, unpack_arguments

PATH = "/collective_rpc"


@pytest.fixture
def rpc(checkpoint):
    """An application with the route, and two workers that return their arguments."""
    with serving(checkpoint, enable_collective_rpc=True) as api:

        def echo(call):
            args, kwargs = unpack_arguments(call.arguments)
            return WorkersReturned(call_id=call.call_id, values=[pack(args), pack(kwargs)])

        api.engine.call_workers = echo
        yield api


def returns(api, *values, **fields):
    """Let the workers answer every call with these results."""
    packed = [pack(value) for value in values]
    api.engine.call_workers = lambda call: WorkersReturned(call_id=call.call_id, values=packed, **fields)


def encoded(array):
    return {
        "data": base64.b64encode(array.tobytes()).decode(),
        "shape": list(array.shape),
        "dtype": array.dtype.str,
    }


@pytest.mark.parametrize(("is_enabled", "status"), [(False, 401), (True, 200)])
def test_collective_rpc_needs_an_admin_key_without_the_option(checkpoint, is_enabled, status):
    with serving(checkpoint, admin_api_key=["admin"], enable_collective_rpc=is_enabled) as api:
        returns(api, 1)
        assert api.post(PATH, {"method": "weigh"}).status_code == status
        with_key = api.post(PATH, {"method": "weigh"}, headers={"authorization": "Bearer admin"})
        assert with_key.json() == {"results": [1]}


def test_collective_rpc_is_in_the_openapi_document(rpc):
    operation = rpc.get("/openapi.json").json()["paths"][PATH]["post"]
    assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/CollectiveRpcRequest")
    assert {"200", "400", "409", "413", "415", "500", "503", "504"} == operation["responses"].keys()


def test_collective_rpc_passes_arguments_and_results(rpc):
    body = {"method": "weigh", "args": [1, None, [True, 2.5, "x"]], "kwargs": {"name": {"y": []}}, "timeout": 7}
    response = rpc.post(PATH, body)
    assert response.status_code == 200
    assert response.json() == {"results": [body["args"], body["kwargs"]]}
    (call,) = rpc.engine.sent
    assert (call.method, call.timeout) == ("weigh", 7)
    assert rpc.post(PATH, {"method": "weigh"}).json() == {"results": [[], {}]}
    nulls = {"method": "weigh", "args": None, "kwargs": None, "timeout": None}
    assert rpc.post(PATH, nulls).json() == {"results": [[], {}]}


@pytest.mark.parametrize("array", [np.float32([[1, 2, 3]]), np.array(5, ">i4"), np.zeros((2, 0)), np.array(["ä"])])
def test_collective_rpc_arrays_survive_both_directions(rpc, array):
    response = rpc.post(PATH, {"method": "weigh", "args": [[encoded(array)]], "kwargs": {"x": encoded(array)}})
    assert response.json() == {"results": [[[encoded(array)]], {"x": encoded(array)}]}
    args, _ = unpack_arguments(rpc.engine.sent[0].arguments)
    ((got,),) = args
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    assert np.array_equal(got, array)


def test_collective_rpc_results_beyond_json_have_a_form(rpc):
    returns(rpc, [b"\xff", float("nan"), {1: "int", None: "none", b"k": "bytes", False: "bool", 0.5: "float"}])
    (result,) = rpc.post(PATH, {"method": "weigh"}).json()["results"]
    assert result == ["/w==", None, {"1": "int", "null": "none", "aw==": "bytes", "false": "bool", "0.5": "float"}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "method"),
        ({"method": 5}, "method"),
        ({"method": "weigh", "args": {}}, "args"),
        ({"method": "weigh", "kwargs": []}, "kwargs"),
        ({"method": "weigh", "timeout": 0}, "timeout"),
        ({"method": "weigh", "timeout": "1"}, "timeout"),
        ({"method": "weigh", "rank": 1}, "rank"),
        ({"method": "weigh", "args": [{"data": "AAAA", "shape": [2], "dtype": "<i2"}]}, "args[0]"),
        ({"method": "weigh", "args": [{"data": "!", "shape": [2], "dtype": "<i2"}]}, "args[0]"),
        ({"method": "weigh", "args": [{"data": 5, "shape": [2], "dtype": "<i2"}]}, "args[0]"),
        ({"method": "weigh", "args": [{"data": "AAAAAAAAAAA=", "shape": [1], "dtype": "O"}]}, "args[0]"),
        ({"method": "weigh", "args": [{"data": "AAAA", "shape": "x", "dtype": "u1"}]}, "args[0]"),
        ({"method": "weigh", "kwargs": {"x": [{"data": "", "shape": [], "dtype": "no"}]}}, "kwargs.x[0]"),
        ({"method": "weigh", "args": [{"data": "AAAA", "shape": [1], "dtype": "u1,u2"}]}, "args"),
        ({"method": "weigh", "args": [2**64]}, "args"),
    ],
)
def test_collective_rpc_wrong_request_is_refused_before_the_call(rpc, body, param):
    response = rpc.post(PATH, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert rpc.engine.sent == []


@pytest.mark.parametrize("depth", [100, 900, 100_000])
def test_collective_rpc_deeply_nested_arguments_are_refused(rpc, depth):
    content = b'{"method": "weigh", "args": ' + b"[" * depth + b"]" * depth + b"}"
    response = rpc.request("POST", PATH, content=content)
    assert response.status_code == 400
    assert "nested" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("error", "rank", "status", "code"),
    [
        (InvalidRequest("no worker extension"), None, 400, None),
        (KeyError("w"), 1, 500, "request_failed"),
        (DeadlineExceeded("no reply from rank 1"), None, 504, "deadline_exceeded"),
    ],
)
def test_collective_rpc_failures_have_their_status(rpc, error, rank, status, code):
    returns(rpc, failure=Failure.of(error), rank=rank)
    response = rpc.post(PATH, {"method": "weigh"})
    body = response.json()["error"]
    assert (response.status_code, body["code"]) == (status, code)
    assert body["message"].endswith(str(error))
    assert "Traceback" not in response.text


def test_collective_rpc_without_an_engine_is_unavailable(rpc):
    rpc.leave("killed")
    assert rpc.post(PATH, {"method": "weigh"}).status_code == 503


def test_collective_rpc_with_api_keys_needs_one(checkpoint):
    with serving(checkpoint, enable_collective_rpc=True, api_key=["secret"]) as api:
        returns(api, 1)
        assert api.post(PATH, {"method": "weigh"}).status_code == 401
        answer = api.post(PATH, {"method": "weigh"}, headers={"authorization": "Bearer secret"})
        assert answer.json() == {"results": [1]}


def test_collective_rpc_after_a_disconnect_is_forgotten(rpc):
    rpc.engine.call_workers = None

    async def leave():
        call = Call(rpc.app, PATH, {"method": "weigh"})
        await settle()
        assert rpc.client.num_in_flight == 1
        call.leave()
        await asyncio.wait_for(call.task, 5)
        assert rpc.client.num_in_flight == 0
        assert call.received == []

    rpc.run(leave())


def test_collective_rpc_tensors_in_results_have_a_form(rpc):
    returns(rpc, [torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16), torch.int8, torch.Size([2, 3])])
    (result,) = rpc.post(PATH, {"method": "weigh"}).json()["results"]
    assert result == [
        {"data": base64.b64encode(b"\x80\x3f\x00\x40").decode(), "shape": [1, 2], "dtype": "torch.bfloat16"},
        "torch.int8",
        [2, 3],
    ]


def test_collective_rpc_pickled_handles_are_refused(rpc):
    body = {"method": "weigh", "args": [{"update_info": {"ipc_handles_pickled": "gASV"}}]}
    response = rpc.post(PATH, body)
    assert response.status_code == 400
    assert "use backend `nccl` or `shm` over HTTP" in response.json()["error"]["message"]
    assert rpc.engine.sent == []
