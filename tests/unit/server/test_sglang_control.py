"""SGLang's control routes: the calls that they make, their answers, and what a trainer for SGLang does with them."""

from __future__ import annotations

import pytest
from server_fakes import Call, serving, settle, stats, write_checkpoint
from sglang_fakes import SteeredApi

from eagleray.errors import NotFound
from eagleray.identity import EngineId
from eagleray.messages.control import (
    AbortRequests,
    AbortWeightUpdate,
    Command,
    CommandDone,
    FinishWeightUpdate,
    InitWeightTransfer,
    Pause,
    ReceiveWeights,
    ResetPrefixCache,
    Resume,
    ShutdownWeightTransfer,
    Sleep,
    StartWeightUpdate,
    UpdateWeights,
    WakeUp,
)
from eagleray.messages.failure import Failure
from eagleray.messages.plain import unpack

GROUP = {
    "master_address": "10.0.0.1",
    "master_port": 5000,
    "rank_offset": 1,
    "world_size": 3,
    "group_name": "slime-pp_0",
    "backend": "gloo",
}
TENSORS = {"names": ["a", "b"], "dtypes": ["bfloat16", "float32"], "shapes": [[2, 3], []], "group_name": "slime-pp_0"}
ALL = ("weights", "kv_cache", "scheduling")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serving(write_checkpoint(tmp_path_factory.mktemp("sglang")), enable_sglang_api=True) as api:
        yield api


@pytest.fixture
def steered(served):
    return SteeredApi(served)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/pause_generation", {}, [Pause(mode="abort")]),
        ("/pause_generation", None, [Pause(mode="abort")]),
        ("/pause_generation", {"mode": "in_place"}, [Pause(mode="keep", clear_cache=False)]),
        (
            "/pause_generation",
            {"mode": "retract"},
            [Pause(mode="keep", clear_cache=False), ResetPrefixCache(reset_running_requests=True)],
        ),
        ("/continue_generation", {}, [Resume(may_sleep=True)]),
        ("/abort_request", {"rid": "a"}, [AbortRequests(request_ids=["a"])]),
        ("/abort_request", {"abort_all": True}, [AbortRequests()]),
        ("/flush_cache", None, [ResetPrefixCache()]),
        ("/release_memory_occupation", {}, [Sleep(tags=("weights", "kv_cache"), level=1, mode="keep")]),
        ("/release_memory_occupation", {"tags": ["kv_cache"]}, [Sleep(tags=("kv_cache",), level=1, mode="keep")]),
        ("/release_memory_occupation", {"tags": ["cuda_graph"]}, []),
        ("/resume_memory_occupation", {"tags": None}, [WakeUp(tags=ALL)]),
        ("/resume_memory_occupation", {"tags": ["weights"]}, [WakeUp(tags=("weights",))]),
        ("/init_weights_update_group", GROUP, [InitWeightTransfer(init_info=GROUP)]),
        (
            "/init_weights_update_group",
            GROUP | {"backend": "nccl"},
            [InitWeightTransfer(init_info=GROUP | {"backend": "torch_nccl"})],
        ),
        ("/destroy_weights_update_group", {"group_name": "slime-pp_0"}, [ShutdownWeightTransfer()]),
        (
            "/update_weights_from_disk",
            {"model_path": "/w", "weight_version": "7", "load_format": "auto"},
            [UpdateWeights(weight_dir="/w", weight_version="7")],
        ),
        (
            "/update_weights_from_disk",
            {"model_path": "/w", "abort_all_requests": True},
            [AbortRequests(), UpdateWeights(weight_dir="/w")],
        ),
        ("/begin_weight_update", None, [StartWeightUpdate()]),
    ],
)
def test_sglang_control_route_makes_the_calls(steered, path, body, expected):
    status, answer = steered.post(path, body)
    assert (status, answer["success"]) == (200, True)
    assert answer["message"]
    assert steered.pop_requests() == expected


def test_flush_cache_by_get_is_400_while_requests_have_a_part(steered):
    assert steered.get("/flush_cache") == (200, {"success": True, "message": "The cache is empty."})
    steered.fleet.of_rank(0).execute = lambda command: [steered.fleet.of_rank(0).reply(command, success=False)]
    status, answer = steered.get("/flush_cache")
    assert (status, answer["success"]) == (400, False)
    assert "requests have a part of it" in answer["message"]


def test_update_without_a_pause_is_committed_by_each_call(steered):
    steered.post("/init_weights_update_group", GROUP)
    steered.pop_requests()
    status, answer = steered.post("/update_weights_from_distributed", TENSORS | {"weight_version": "3"})
    assert (status, answer["message"]) == (200, "The weights have version 3.")
    start, update, finish = steered.pop_requests()
    assert (start, finish) == (StartWeightUpdate(), FinishWeightUpdate())
    assert unpack(update.update_info) == {
        "names": ["a", "b"],
        "dtype_names": ["bfloat16", "float32"],
        "shapes": [[2, 3], []],
        "group_name": "slime-pp_0",
        "packed": False,
    }
    assert steered.get("/get_weight_version") == (200, {"weight_version": "3"})


def test_updates_of_a_pause_are_one_that_continue_commits(steered):
    steered.post("/init_weights_update_group", GROUP)
    steered.post("/pause_generation", {})
    steered.pop_requests()
    for version in ("4", "5"):
        status, _ = steered.post("/update_weights_from_distributed", TENSORS | {"weight_version": version})
        assert status == 200
    assert steered.get("/get_weight_version")[1] == {"weight_version": "default"}
    assert steered.post("/continue_generation", {})[0] == 200
    kinds = [type(request) for request in steered.pop_requests()]
    assert kinds == [StartWeightUpdate, UpdateWeights, UpdateWeights, FinishWeightUpdate, Resume]
    assert steered.fleet.control.state.update == 1
    assert steered.get("/get_weight_version")[1] == {"weight_version": "5"}


def test_updates_come_while_the_cache_sleeps(steered):
    """As a trainer does that shares the GPUs: the weights wake first, and the cache after the update."""
    steered.post("/init_weights_update_group", GROUP)
    steered.post("/release_memory_occupation", {})
    steered.post("/resume_memory_occupation", {"tags": ["weights"]})
    steered.post("/pause_generation", {})
    steered.post("/update_weights_from_distributed", TENSORS | {"weight_version": "9"})
    assert steered.post("/continue_generation", {})[0] == 200
    state = steered.fleet.control.state
    assert (state.asleep, state.pause, state.weight_version) == (("kv_cache",), None, "9")
    steered.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert steered.fleet.control.state.name == "serving"


def test_begin_and_end_enclose_one_update(steered):
    steered.post("/init_weights_update_group", GROUP)
    steered.post("/begin_weight_update")
    for _ in range(2):
        steered.post("/update_weights_from_distributed", TENSORS)
    assert steered.fleet.control.state.update == 0
    assert steered.post("/end_weight_update") == (200, {"success": True, "message": "The weights have version 1."})


def test_continue_after_lost_weights_says_why(steered):
    steered.post("/init_weights_update_group", GROUP)
    steered.post("/pause_generation", {})
    steered.post("/update_weights_from_distributed", TENSORS)
    steered.fleet.advance(301)
    status, answer = steered.post("/continue_generation", {})
    assert (status, answer["success"], answer["error"]["code"]) == (409, False, "wrong_state")
    assert "no call of it came for 300 s" in answer["message"]
    steered.post("/update_weights_from_distributed", TENSORS)
    assert steered.post("/continue_generation", {})[0] == 200
    assert steered.version == "1"


def test_continue_after_lost_weights_is_possible_with_resume(steered):
    steered.post("/init_weights_update_group", GROUP)
    steered.post("/pause_generation", {})
    steered.post("/update_weights_from_distributed", TENSORS)
    steered.fleet.advance(301)
    steered.post("/resume")
    steered.post("/pause_generation", {})
    assert steered.post("/continue_generation", {})[0] == 200


def test_continue_after_an_update_without_weights_is_refused_once(steered):
    steered.post("/pause_generation", {})
    steered.post("/begin_weight_update")
    status, answer = steered.post("/continue_generation", {})
    assert (status, answer["error"]["code"]) == (400, "weights_mismatch")
    assert steered.post("/continue_generation", {})[0] == 200


def test_init_group_drops_the_update_of_a_trainer_that_died(steered):
    steered.post("/init_weights_update_group", GROUP)
    steered.post("/pause_generation", {})
    steered.post("/update_weights_from_distributed", TENSORS)
    steered.pop_requests()
    assert steered.post("/init_weights_update_group", GROUP)[0] == 200
    assert [type(request) for request in steered.pop_requests()] == [AbortWeightUpdate, InitWeightTransfer]
    assert steered.post("/continue_generation", {})[0] == 200
    assert steered.version == "default"


def test_failure_of_an_engine_is_an_answer_without_success(steered):
    engine = steered.fleet.of_rank(0)
    execute = engine.execute

    def execute_or_fail(command):
        if isinstance(command.body, ReceiveWeights):
            failure = Failure.of(NotFound("no such directory"))
            return [CommandDone(member=engine.engine, number=command.number, failure=failure)]
        return execute(command)

    engine.execute = execute_or_fail
    status, answer = steered.post("/update_weights_from_disk", {"model_path": "/w"})
    assert (status, answer["success"]) == (404, False)
    assert answer["message"] == answer["error"]["message"]
    assert "no such directory" in answer["message"]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/abort_request", {}, "give the `rid`"),
        ("/pause_generation", {"mode": "keep"}, "supported: abort, in_place, retract"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["x"]}, "a pickle can run any code"),
        ("/update_weights_from_distributed", TENSORS | {"load_format": "flattened_bucket"}, "`load_format`"),
        ("/update_weights_from_disk", {}, "`model_path` is missing"),
        ("/weights_checker", {"action": "snapshot"}, "'snapshot' is not supported"),
        ("/resume_memory_occupation", {"tags": ["disk"]}, "`tags"),
    ],
)
def test_sglang_control_route_refuses_with_a_sentence(steered, path, body, said):
    status, answer = steered.post(path, body)
    assert (status, answer["success"]) == (400, False)
    assert said in answer["message"]
    assert steered.pop_requests() == []


def test_server_info_has_the_shape_of_the_instance(tmp_path):
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 3}
    with serving(write_checkpoint(tmp_path), enable_sglang_api=True, **sizes) as api:
        for path in ("/server_info", "/get_server_info"):
            info = api.get(path).json()
            expected = {"tp_size": 2, "pp_size": 2, "dp_size": 3, "ep_size": 1, "num_gpus": 12}
            assert {name: info[name] for name in expected} == expected
            assert info["ranks"] == [0, 1, 2]
            assert info["enable_memory_saver"] is False


def test_model_info_names_model_and_version(steered, served):
    for path in ("/model_info", "/get_model_info"):
        info = served.get(path).json()
        assert (info["is_generation"], info["weight_version"], info["architectures"]) == (True, "default", ["Tiny"])
        assert info["model_path"] == info["tokenizer_path"] == served.config.model.model


def test_loads_has_the_requests_of_each_engine(served):
    served.join()
    served.deliver(stats(EngineId("test", 0), num_running=2, num_waiting=1))
    (load,) = served.get("/v1/loads?include=core").json()["loads"]
    assert load == {"dp_rank": 0, "num_running_reqs": 2, "num_waiting_reqs": 1, "num_total_reqs": 3}


def test_health_generate_generates_a_token_unless_requests_wait(steered, served):
    served.engine.sent.clear()
    assert served.get("/health_generate").status_code == 200
    assert served.engine.requests[-1].stopping.max_tokens == 1
    served.engine.sent.clear()
    steered.post("/pause_generation", {})
    assert served.get("/health_generate").status_code == 200
    assert served.engine.requests == []
    steered.post("/continue_generation", {})


def test_health_generate_without_an_engine_is_503(tmp_path):
    with serving(write_checkpoint(tmp_path), enable_sglang_api=True) as api:
        api.leave("it was killed")
        assert api.get("/health_generate").status_code == 503


def test_abort_request_ends_a_request_by_its_rid(served):
    """The client executes the command of the supervisor, whichever server has the request."""

    async def run():
        served.engine.script = None
        call = Call(served.app, "/generate", {"input_ids": [5], "rid": "turn-1"})
        await settle()
        served.engine.deliver(Command(number=1, body=AbortRequests(request_ids=["turn-1"]), timeout=5.0))
        await call.task
        return call.text

    assert '"finish_reason":{"type":"abort"' in served.run(run())


def test_sglang_control_routes_need_the_admin_key(tmp_path):
    with serving(write_checkpoint(tmp_path), enable_sglang_api=True, admin_api_key=["secret"]) as api:
        assert api.post("/pause_generation", {}).status_code == 401
        assert api.post("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}).status_code == 200


def test_openapi_has_all_sglang_routes(served):
    paths = served.get("/openapi.json").json()["paths"]
    assert {"get", "post"} <= paths["/flush_cache"].keys()
    assert "/update_weights_from_distributed" in paths
