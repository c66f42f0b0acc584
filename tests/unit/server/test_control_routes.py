"""Control routes: parameters by query and body, answers, errors, and who may call them."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from server_fakes import Call, serving, settle
from starlette.applications import Starlette
from starlette.routing import Mount

from eagleray.errors import DeadlineExceeded, EnginesMissing, NotFound, TransferBroken, WeightsMismatch, WrongState
from eagleray.identity import ClientId
from eagleray.messages.control import (
    AbortRequests,
    AbortWeightUpdate,
    Command,
    CommandDone,
    ControlCall,
    ControlReturned,
    FinishWeightUpdate,
    GetWeightInfo,
    InitWeightTransfer,
    InstanceState,
    LoadAdapter,
    Pause,
    ResetPrefixCache,
    Resume,
    SetWeightVersion,
    ShutdownWeightTransfer,
    Sleep,
    StartWeightUpdate,
    StateChanged,
    UnloadAdapter,
    UpdateWeights,
    WakeUp,
)
from eagleray.messages.failure import Failure
from eagleray.messages.lifecycle import Attach
from eagleray.messages.outputs import WorkersReturned
from eagleray.messages.plain import pack

CLIENT = ClientId("test", 0)
RESET_ALL = ResetPrefixCache(reset_running_requests=True)
FROM_DIRECTORY = {"weight_dir": "/w", "weight_version": "v"}
COMPLETE = {"weight_version": "v", "require_complete": True}
ADAPTER = {"lora_name": "a", "lora_path": "/a"}
ALL = ("weights", "kv_cache", "scheduling")


class Supervisor:
    """Answers control calls with `result`, or fails them with `error`."""

    def __init__(self, api):
        self.calls: list[ControlCall] = []
        self.result: dict = {}
        self.error: Exception | None = None
        api.engine.control = self.answer
        api.deliver(Attach(CLIENT, "supervisor", []))

    def answer(self, call):
        self.calls.append(call)
        if self.error is not None:
            return ControlReturned(call_id=call.call_id, failure=Failure.of(self.error))
        return ControlReturned(call_id=call.call_id, answer=pack(self.result))

    @property
    def requests(self):
        return [call.request for call in self.calls]


@pytest.fixture
def supervisor(api):
    return Supervisor(api)


POSTS = [
    ("/pause", None, Pause()),
    ("/pause?mode=keep&clear_cache=false", None, Pause(mode="keep", clear_cache=False)),
    ("/pause", {"mode": "wait"}, Pause(mode="wait")),
    ("/pause?wait_for_inflight_requests=true", None, Pause(mode="wait")),
    ("/resume", {}, Resume()),
    ("/sleep", None, Sleep(tags=("weights", "kv_cache"), level=1)),
    ("/sleep?level=2&mode=keep", None, Sleep(tags=("weights", "kv_cache"), level=2, mode="keep")),
    ("/sleep?level=0", None, Sleep(tags=("scheduling",), level=0)),
    ("/sleep?level=1&tags=kv_cache", None, Sleep(tags=("kv_cache",), level=1)),
    ("/wake_up", None, WakeUp(tags=ALL)),
    ("/wake_up?tags=weights&tags=kv_cache", None, WakeUp(tags=("weights", "kv_cache"))),
    ("/wake_up", {"tags": ["weights"]}, WakeUp(tags=("weights",))),
    ("/release_kv_cache_memory", None, Sleep(tags=("kv_cache",), level=1, mode="keep")),
    ("/reset_prefix_cache", None, ResetPrefixCache()),
    ("/reset_prefix_cache?reset_running_requests=true", None, RESET_ALL),
    ("/reset_prefix_cache", {"reset_running_requests": True, "reset_external": False}, RESET_ALL),
    ("/abort_requests", {"request_ids": ["a"]}, AbortRequests(request_ids=["a"])),
    ("/inference/v1/abort_requests", {"request_ids": ["cmpl-a"]}, AbortRequests(request_ids=["cmpl-a", "a"])),
    ("/inference/v1/abort_requests", None, AbortRequests()),
    ("/init_weight_transfer_engine", {"init_info": {"port": 1}}, InitWeightTransfer(init_info={"port": 1})),
    ("/shutdown_weight_transfer_engine", None, ShutdownWeightTransfer()),
    ("/start_weight_update", {"is_checkpoint_format": True}, StartWeightUpdate()),
    ("/start_weight_update?is_checkpoint_format=true", None, StartWeightUpdate()),
    ("/update_weights", FROM_DIRECTORY, UpdateWeights(**FROM_DIRECTORY)),
    ("/update_weights", {"update_info": {"names": ["a"]}}, UpdateWeights(update_info=pack({"names": ["a"]}))),
    ("/finish_weight_update", None, FinishWeightUpdate()),
    ("/finish_weight_update", COMPLETE, FinishWeightUpdate(**COMPLETE)),
    ("/abort_weight_update", None, AbortWeightUpdate()),
    ("/update_weight_version", {"new_version": "v"}, SetWeightVersion("v")),
    ("/load_lora_adapter", ADAPTER, LoadAdapter(name="a", path="/a", load_inplace=True)),
    ("/load_lora_adapter", ADAPTER | {"load_inplace": False}, LoadAdapter(name="a", path="/a")),
    ("/skyrl/v1/load_lora_adapter", ADAPTER, LoadAdapter(name="a", path="/a", load_inplace=True)),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "expected"), POSTS)
def test_control_route_makes_the_call(api, supervisor, path, body, expected):
    supervisor.result = {"status": "done", "n": 1}
    arguments = {} if body is None else {"json": body}
    response = api.request("POST", path, headers={"X-Request-Id": "mine"}, **arguments)
    assert response.status_code == 200, response.text
    assert supervisor.requests == [expected]
    assert (supervisor.calls[0].operation_id, supervisor.calls[0].timeout) == ("mine", 600.0)
    own = {"status": "kv_cache_released"} if "release" in path else {"status": "ok"} if "adapter" in path else None
    assert response.json() == (own or supervisor.result)


@pytest.mark.parametrize(
    ("path", "expected", "said"),
    [
        ("/v1/load_lora_adapter", LoadAdapter(name="a", path="/a"), "LoRA adapter 'a' added"),
        ("/v1/unload_lora_adapter", UnloadAdapter("a"), "LoRA adapter 'a' removed"),
    ],
)
def test_lora_route_of_vllm_answers_by_text(api, supervisor, path, expected, said):
    response = api.post(path, ADAPTER if "/load" in path else {"lora_name": "a"})
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    assert said in response.text
    assert supervisor.requests == [expected]


SLEEP = Sleep(tags=("weights", "kv_cache"), level=2, mode="keep")
UPDATE = UpdateWeights(update_info=pack({"names": ["a"], "packed": True}))
RPC_CALLS = [
    ("skyrl_start_weight_update", {"is_checkpoint_format": True}, StartWeightUpdate()),
    ("update_weights_nccl", {"update_info": {"names": ["a"], "packed": True}}, UPDATE),
    ("update_weights_ipc", {"update_info": {"names": ["a"], "packed": True}}, UPDATE),
    ("skyrl_finish_weight_update", None, FinishWeightUpdate()),
    ("skyrl_sleep_for_weight_sync", {"offload_kv": True}, SLEEP),
    ("skyrl_wake_for_weight_sync", {"tags": ["weights"]}, WakeUp(tags=("weights",))),
]


@pytest.mark.parametrize(("method", "kwargs", "expected"), RPC_CALLS)
def test_collective_rpc_method_of_skyrl_is_a_control_call(api, supervisor, method, kwargs, expected):
    supervisor.result = {"message": "done"}
    body = {"method": method} | ({} if kwargs is None else {"kwargs": kwargs})
    assert api.post("/collective_rpc", body).json() == {"results": [{"message": "done"}]}
    assert supervisor.requests == [expected]
    supervisor.error = WrongState("no update is open")
    assert api.post("/collective_rpc", body).status_code == 409
    wrong = api.post("/collective_rpc", {"method": method, "kwargs": {"other": 1}})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "kwargs")


@pytest.mark.parametrize("options", [{"enable_collective_rpc": True}, {"worker_extension_cls": "pkg.mod.Class"}])
def test_collective_rpc_method_of_skyrl_beside_an_extension_is_the_workers(checkpoint, options):
    with serving(checkpoint, **options) as api:
        api.engine.call_workers = lambda call: WorkersReturned(call_id=call.call_id, values=[pack(call.method)])
        answer = api.post("/collective_rpc", {"method": "skyrl_finish_weight_update"})
        assert answer.json() == {"results": ["skyrl_finish_weight_update"]}


@pytest.mark.parametrize("path", ["/pause?timeout=5", "/resume?timeout=5"])
def test_control_route_timeout_is_that_of_the_call(api, supervisor, path):
    api.post(path)
    assert supervisor.calls[0].timeout == 5.0


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/pause?mode=now", None, "`mode`: not a supported value; supported: abort, keep, wait"),
        ("/pause?modus=keep", None, "`modus` is not a field of this request"),
        ("/pause", [], "must be a JSON object"),
        ("/sleep?level=3", None, "`level`"),
        ("/sleep?level=0&tags=weights", None, "`tags`"),
        ("/wake_up?tags=all", None, "`tags`"),
        ("/abort_requests", None, "`request_ids` is missing"),
        ("/init_weight_transfer_engine", None, "`init_info` is missing"),
        ("/start_weight_update", {"is_checkpoint_format": False}, "`is_checkpoint_format` must be true"),
        ("/update_weights", None, "either `update_info` or `weight_dir`"),
        ("/update_weights", {"update_info": {}, "weight_dir": "/w"}, "either `update_info` or `weight_dir`"),
        ("/update_weights", {"update_info": {}, "weight_version": "v"}, "give it to finish_weight_update"),
        ("/update_weight_version", None, "`new_version` is missing"),
        ("/v1/load_lora_adapter", ADAPTER | {"is_3d_lora_weight": True}, "`is_3d_lora_weight` must be false"),
        ("/pause?timeout=-1", None, "`timeout`"),
    ],
)
def test_control_route_wrong_parameters_are_named(api, supervisor, path, body, said):
    response = api.request("POST", path, **({} if body is None else {"json": body}))
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]
    assert not supervisor.calls


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (WrongState("resume first"), 409, "wrong_state"),
        (WeightsMismatch("a"), 400, "weights_mismatch"),
        (NotFound("/w"), 404, "not_found"),
        (EnginesMissing("engine 1"), 503, "engines_missing"),
        (TransferBroken("gone"), 503, "transfer_broken"),
        (DeadlineExceeded("engine-1 has not replied"), 504, "deadline_exceeded"),
        (ZeroDivisionError("bug"), 500, "request_failed"),
    ],
)
def test_control_route_failure_has_its_status(api, supervisor, error, status, code):
    supervisor.error = error
    response = api.post("/finish_weight_update")
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert str(error) in response.json()["error"]["message"]


def test_control_route_gets_ignore_a_body(api, supervisor):
    supervisor.result = {"is_paused": True, "asleep": ["kv_cache"]}
    assert api.request("GET", "/is_paused", json={"x": 1}).json() == {"is_paused": True}
    assert api.get("/is_sleeping").json() == {"is_sleeping": True}
    assert api.get("/weight_info").json() == supervisor.result
    assert supervisor.requests == [GetWeightInfo()] * 3
    assert api.request("GET", "/get_world_size", json={}).json() == {"world_size": 1}
    for path in ("/reset_mm_cache", "/reset_encoder_cache"):
        assert api.post(path).status_code == 200


def test_world_size_is_that_of_the_configuration(checkpoint):
    with serving(checkpoint, data_parallel_size=3, tensor_parallel_size=2) as api:
        assert api.get("/get_world_size").json() == {"world_size": 6}
        assert api.get("/get_world_size?include_dp=false").json() == {"world_size": 2}
        assert api.get("/get_world_size?include_dp=maybe").status_code == 400


def test_liveness_asks_every_worker(api):
    api.engine.call_workers = lambda call: WorkersReturned(call_id=call.call_id, values=[pack(None)])
    assert api.get("/liveness").json() == {"status": "ok"}
    assert api.engine.sent[-1].method == "liveness_probe"
    late = Failure.of(DeadlineExceeded("rank 0"))
    api.engine.call_workers = lambda call: WorkersReturned(call_id=call.call_id, failure=late)
    response = api.get("/liveness")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unresponsive")


def test_weight_checker_compares_with_the_baseline_of_the_caller(api):
    of_workers = [{"dp0:pp0:tp0:a": "12", "dp0:pp0:tp0:b": "34"}, {"dp0:pp0:tp1:a": "56"}]
    api.engine.call_workers = lambda call: WorkersReturned(
        call_id=call.call_id, values=[pack(checksums) for checksums in of_workers]
    )
    merged = of_workers[0] | of_workers[1]
    assert api.post("/weight_checker", {"action": "checksum"}).json() == {"checksums": merged}
    assert api.engine.sent[-1].method == "weight_checksums"
    same = api.post("/weight_checker", {"action": "compare", "baseline": merged})
    assert same.json() == {"match": True, "mismatches": []}
    baseline = {"dp0:pp0:tp0:a": "12", "dp0:pp0:tp1:a": "57", "dp0:pp0:tp1:c": "78"}
    other = api.post("/weight_checker", {"action": "compare", "baseline": baseline})
    assert other.json() == {"match": False, "mismatches": ["dp0:pp0:tp0:b", "dp0:pp0:tp1:a", "dp0:pp0:tp1:c"]}


@pytest.mark.parametrize(("body", "param"), [({"action": "compare"}, "baseline"), ({"action": "reset"}, "action")])
def test_weight_checker_impossible_actions_are_refused(api, body, param):
    response = api.post("/weight_checker", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (InstanceState(pause="keep"), "paused"),
        (InstanceState(asleep=("kv_cache",)), "sleeping"),
        (InstanceState(asleep=("kv_cache",), pause="wait"), "sleeping"),
        (InstanceState(open_update=1, pause="keep"), "paused"),
        (InstanceState(open_update=1, is_in_place=True), "updating"),
        (InstanceState(open_update=1), None),
        (InstanceState(is_held=True), None),
    ],
)
def test_ready_names_the_state_and_health_stays(api, supervisor, state, code):
    api.deliver(StateChanged(state))
    assert {api.get(path).status_code for path in ("/health", "/live")} == {200}
    response = api.get("/ready")
    assert response.status_code == (200 if code is None else 503)
    assert code is None or response.json()["error"]["code"] == code


def test_control_route_client_disconnects_call_is_not_cancelled(checkpoint):
    async def disconnect():
        api.engine.control = None
        call = Call(api.app, "/pause", {})
        await settle()
        call.leave()
        await asyncio.gather(call.task, return_exceptions=True)

    with serving(checkpoint, enable_rl=True) as api:
        Supervisor(api)
        api.run(disconnect())
        assert [type(message) for message in api.engine.sent if isinstance(message, ControlCall)] == [ControlCall]
        assert api.client.num_in_flight == 0


def test_abort_requests_command_ends_requests_by_the_ids_of_users(api):
    Supervisor(api)
    api.engine.script = None

    async def run():
        call = Call(api.app, "/v1/completions", {"prompt": ["hello", "world"], "max_tokens": 5})
        while len(api.engine.requests) < 2:
            await asyncio.sleep(0.001)
        api.engine.deliver(Command(number=7, body=AbortRequests(request_ids=["other", "mine"]), timeout=1.0))
        await call.task
        return call.text

    text = api.run(run())
    assert text.count('"finish_reason":"abort"') == 2
    done = next(message for message in api.engine.sent if isinstance(message, CommandDone))
    assert done == CommandDone(member=CLIENT, number=7, result={"aborted": 2})


def test_abort_requests_command_finds_the_id_of_the_body(api):
    Supervisor(api)
    api.engine.script = None

    async def run():
        body = {"request_id": "of-body", "token_ids": [5], "sampling_params": {"max_tokens": 5}}
        call = Call(api.app, "/inference/v1/generate", body)
        while not api.engine.requests:
            await asyncio.sleep(0.001)
        api.engine.deliver(Command(number=7, body=AbortRequests(request_ids=["of-body"]), timeout=1.0))
        await call.task
        return call.text

    assert '"finish_reason":"abort"' in api.run(run())


# Who may call.


def post(api, path, address, **headers):
    async def request():
        transport = httpx.ASGITransport(api.app, client=(address, 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return await http.post(path, headers=headers)

    return api.run(request())


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1"])
def test_control_route_without_keys_serves_this_host(api, supervisor, address):
    assert post(api, "/pause", address).status_code == 200


@pytest.mark.parametrize("address", ["10.0.0.1", "::ffff:10.0.0.1", "fe80::1", "unix"])
def test_control_route_without_keys_refuses_other_hosts(api, supervisor, address):
    response = post(api, "/pause", address)
    assert (response.status_code, response.json()["error"]["code"]) == (403, "control_forbidden")
    assert "--enable-rl" in response.json()["error"]["message"]
    assert not supervisor.calls


@pytest.mark.parametrize("header", ["Origin", "Forwarded", "X-Forwarded-For"])
def test_control_route_without_keys_refuses_browsers_and_proxies(api, supervisor, header):
    response = post(api, "/pause", "127.0.0.1", **{header: "http://localhost"})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "control_forbidden")
    assert not supervisor.calls


@pytest.mark.parametrize(
    "options", [{"enable_rl": True}, {"enable_sleep_mode": True}, {"weight_transfer_config": {"backend": "gloo"}}]
)
def test_control_route_is_open_to_other_hosts_with_the_option(checkpoint, options):
    with serving(checkpoint, **options) as api:
        Supervisor(api)
        assert post(api, "/pause", "10.0.0.1").status_code == 200


def test_control_route_with_admin_key_takes_no_other(checkpoint):
    with serving(checkpoint, api_key=["user"], admin_api_key=["admin"]) as api:
        Supervisor(api)
        for wrong in ({}, bearer("user")):
            response = post(api, "/pause", "127.0.0.1", **wrong)
            assert response.status_code == 401
            assert "admin API key" in response.json()["error"]["message"]
        assert post(api, "/pause", "10.0.0.1", **bearer("admin")).status_code == 200
        assert api.get("/v1/models", headers=bearer("user")).status_code == 200
        assert api.get("/v1/models", headers=bearer("admin")).status_code == 200
        shown = api.get("/server_info", headers=bearer("user")).text
        assert "admin_api_key" not in shown


@pytest.mark.parametrize("options", [{}, {"admin_api_key": ["admin"]}, {"admin_api_key": ["admin"], "api_key": ["a"]}])
def test_control_route_of_a_mounted_app_is_refused_as_well(checkpoint, options):
    """A program that mounts the app at a prefix leaves the prefix in the path."""
    with serving(checkpoint, **options) as api:
        supervisor = Supervisor(api)
        api.app = Starlette(routes=[Mount("/prefix", app=api.app)])
        assert post(api, "/prefix/pause", "10.0.0.1", **bearer("a")).status_code == (401 if options else 403)
        assert not supervisor.requests
        assert post(api, "/prefix/health", "10.0.0.1").status_code != 401


def test_control_route_without_admin_key_takes_the_server_key(checkpoint):
    with serving(checkpoint, api_key=["user"]) as api:
        Supervisor(api)
        assert post(api, "/pause", "127.0.0.1").status_code == 401
        assert post(api, "/pause", "10.0.0.1", **bearer("user")).status_code == 200


def test_admin_key_alone_leaves_other_routes_open(checkpoint):
    with serving(checkpoint, admin_api_key=["admin"]) as api:
        assert api.get("/v1/models").status_code == 200
        assert post(api, "/pause", "127.0.0.1").status_code == 401


def test_openapi_shows_control_parameters_in_query_and_body(api):
    pause = api.get("/openapi.json").json()["paths"]["/pause"]["post"]
    assert {parameter["name"] for parameter in pause["parameters"]} == {
        "timeout",
        "mode",
        "clear_cache",
        "wait_for_inflight_requests",
    }
    assert pause["requestBody"]["required"] is False
    assert {"403", "409", "504"} <= pause["responses"].keys()
    update = api.get("/openapi.json").json()["paths"]["/update_weights"]["post"]
    assert "update_info" not in {parameter["name"] for parameter in update["parameters"]}
