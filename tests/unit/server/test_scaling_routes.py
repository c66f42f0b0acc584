"""Routes that scale an instance: their requests, answers and errors, with a scripted supervisor."""

from __future__ import annotations

import asyncio

import pytest
from server_fakes import Call, serving, settle

from eagleray.errors import DeadlineExceeded, InvalidRequest, NotFound, Unavailable, WrongState
from eagleray.identity import ClientId
from eagleray.messages.control import ControlCall, ControlReturned
from eagleray.messages.failure import Failure
from eagleray.messages.lifecycle import Attach
from eagleray.messages.plain import pack
from eagleray.messages.scaling import GetScaling, RestartEngines, Scale

STATUS = {
    "instance_id": "i",
    "operation_id": "mine",
    "kind": "scale",
    "phase": "completed",
    "active_data_parallel_size": 4,
    "participating_ranks": [0, 1, 2, 3],
    "active_api_server_count": 1,
    "engine_options": {},
    "safe_to_delete_ranks": [],
    "waiting_for": None,
    "last_error": None,
    "is_retryable": True,
    "seconds": 1.5,
}
RUNNING = STATUS | {"phase": "preparing", "waiting_for": "engine-3 must start"}


class Supervisor:
    """Answers calls for the status with `status`, and those for operations when they have ended: with `error`, or with
    the status if `has_ended`."""

    def __init__(self, api):
        self.calls: list[ControlCall] = []
        self.status = STATUS
        self.error: Exception | None = None
        self.has_ended = True
        self._api = api
        api.engine.control = self.answer
        api.deliver(Attach(ClientId("test", 0), "supervisor", []))

    def answer(self, call):
        self.calls.append(call)
        if self.error is not None:
            return ControlReturned(call_id=call.call_id, failure=Failure.of(self.error))
        if isinstance(call.request, GetScaling) or self.has_ended:
            return ControlReturned(call_id=call.call_id, answer=pack(self.status))
        return ControlReturned(call_id=0, answer=pack(None))  # of another caller


@pytest.fixture
def supervisor(api):
    return Supervisor(api)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/scale", {"data_parallel_size": 4}, Scale(num_engines=4)),
        ("/scale?data_parallel_size=4&drain_timeout=5", None, Scale(num_engines=4, drain_timeout=5.0)),
        ("/scale", {"data_parallel_size": None, "remove_ranks": [2, 1, 2]}, Scale(remove_ranks=(1, 2))),
        ("/scale", {"data_parallel_size": 3, "remove_ranks": [0]}, Scale(num_engines=3, remove_ranks=(0,))),
        ("/scale", {"api_server_count": 2, "drain_timeout": 1.5}, Scale(num_api_servers=2, drain_timeout=1.5)),
        ("/restart", None, RestartEngines()),
        ("/restart", {"ranks": [1], "drain_timeout": 3}, RestartEngines(ranks=(1,), drain_timeout=3.0)),
        (
            "/restart",
            {"options": {"max-num-seqs": "64", "kv_cache_memory": None}},
            RestartEngines(options={"max_num_seqs": 64, "kv_cache_memory": None}),
        ),
        ("/restart", {"options": {"model": "/new"}}, RestartEngines(options={"model": "/new"})),
        ("/scale_elastic_ep", {"new_data_parallel_size": 4}, Scale(num_engines=4, drain_timeout=120.0)),
        ("/scale_elastic_ep", {"new_data_parallel_size": 4, "drain_timeout": 0}, Scale(num_engines=4)),
    ],
)
def test_scaling_route_makes_the_call_and_answers_with_its_end(api, supervisor, path, body, expected):
    arguments = {} if body is None else {"json": body}
    response = api.request("POST", path, headers={"X-Request-Id": "mine"}, **arguments)
    assert response.status_code == 200, response.text
    assert [call.request for call in supervisor.calls] == [expected]
    assert supervisor.calls[0].operation_id == "mine"
    message = {"message": "Scaled to 4 data parallel engines"} if "elastic" in path else {}
    assert response.json() == STATUS | message


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size", "cannot be changed by a restart of engines, because it"),
        ({"port": 1}, "port", "these can: model, revision, num_kv_blocks"),
        ({"max_num_seq": 64}, "max_num_seq", "did you mean `max_num_seqs`?"),
        ({"max_num_seqs": 0}, "max_num_seqs", "expected `int` >= 1"),
        ({"enforce_eager": True}, "enforce_eager", "nothing to do here"),
        ([1], "options", "object"),
    ],
)
def test_restart_route_refuses_options_before_anything_changes(api, supervisor, options, param, message):
    response = api.post("/restart", {"options": options})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert supervisor.calls == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/scale", {"data_parallel_size": 4}),
        ("/restart", {}),
        ("/scale_elastic_ep", {"new_data_parallel_size": 4}),
    ],
)
def test_scaling_route_operation_id_of_the_body_comes_first(api, supervisor, path, body):
    body |= {"operation_id": "resize-42", "timeout": 7}
    api.request("POST", path, headers={"X-Request-Id": "mine"}, json=body)
    assert (supervisor.calls[0].operation_id, supervisor.calls[0].timeout) == ("resize-42", 7.0)


@pytest.mark.parametrize(("path", "fields"), [("/scale", {"data_parallel_size": 4}), ("/restart", {})])
def test_scaling_route_without_wait_answers_202_with_the_status(api, supervisor, path, fields):
    supervisor.has_ended, supervisor.status = False, RUNNING
    response = api.request("POST", path, headers={"X-Request-Id": "mine"}, json=fields | {"wait": False})
    assert (response.status_code, response.json()) == (202, RUNNING)
    operation, status = supervisor.calls
    assert (operation.operation_id, status.request) == ("mine", GetScaling(operation_id="mine"))
    assert api.client.num_in_flight == 0, "nothing waits for the end"


def test_scaling_route_without_wait_is_refused_like_with_it(api, supervisor):
    supervisor.error = InvalidRequest("no room", param="num_engines")
    response = api.post("/scale", {"data_parallel_size": 4, "wait": False})
    assert (response.status_code, response.json()["error"]["message"]) == (400, "no room")
    assert response.json()["error"]["param"] == "data_parallel_size"


def test_scaling_route_caller_whose_server_goes_gets_202(api, supervisor):
    supervisor.status = STATUS | {"phase": "committing"}
    assert api.post("/scale", {"api_server_count": 1}).status_code == 202


def test_scaling_status_is_that_of_the_instance(api, supervisor):
    for path in ("/scale", "/scale_elastic_ep"):
        assert api.get(path).json() == STATUS
        assert api.get(f"{path}?operation_id=mine").json() == STATUS
    requests = [GetScaling(), GetScaling(operation_id="mine")] * 2
    assert [call.request for call in supervisor.calls] == requests
    supervisor.error = NotFound("there is no scaling operation 'other'")
    response = api.get("/scale?operation_id=other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"phase": "idle", "kind": None}, False),
        ({"phase": "queued"}, True),
        ({"phase": "preparing"}, True),
        ({"phase": "draining"}, True),
        ({"phase": "committing"}, True),
        ({"phase": "committing", "kind": "restart"}, False),
        ({"phase": "completed"}, False),
        ({"phase": "failed"}, False),
    ],
)
def test_is_scaling_is_true_until_the_operation_ends(api, supervisor, changes, expected):
    supervisor.status = STATUS | changes
    for method in ("GET", "POST"):
        assert api.request(method, "/is_scaling_elastic_ep").json() == {"is_scaling_elastic_ep": expected}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/scale", None, None),
        ("/scale", {"wait": True}, None),
        ("/scale", {"data_parallel_size": 0}, "data_parallel_size"),
        ("/scale", {"data_parallel_size": 100_000}, "data_parallel_size"),
        ("/scale", {"data_parallel_size": True}, "data_parallel_size"),
        ("/scale", {"data_parallel_size": 1.5}, "data_parallel_size"),
        ("/scale", {"api_server_count": 0}, "api_server_count"),
        ("/scale", {"remove_ranks": [-1]}, "remove_ranks[0]"),
        ("/scale", {"remove_ranks": "1,2"}, "remove_ranks"),
        ("/scale", {"data_parallel_size": 2, "drain_timeout": -1}, "drain_timeout"),
        ("/scale", {"data_parallel_size": 2, "operation_id": ""}, "operation_id"),
        ("/scale", {"size": 2}, "size"),
        ("/scale_elastic_ep", None, "new_data_parallel_size"),
        ("/scale_elastic_ep", {"new_data_parallel_size": 0}, "new_data_parallel_size"),
        ("/scale_elastic_ep", {"data_parallel_size": 2}, "data_parallel_size"),
        ("/restart", {"ranks": ["a"]}, "ranks[0]"),
        ("/restart", {"data_parallel_size": 2}, "data_parallel_size"),
    ],
)
def test_scaling_route_wrong_fields_are_named(api, supervisor, path, body, param):
    response = api.request("POST", path, **({} if body is None else {"json": body}))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert not supervisor.calls


@pytest.mark.parametrize(
    ("path", "field"),
    [("/scale", "data_parallel_size"), ("/scale_elastic_ep", "new_data_parallel_size")],
)
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("no room", param="num_engines"), 400),
        (InvalidRequest("no engine 7", param="remove_ranks"), 400),
        (InvalidRequest("no API servers", param="num_api_servers"), 400),
        (WrongState("it was replaced by operation b"), 409),
        (DeadlineExceeded("operation mine goes on: engine-3 must start"), 504),
        (Unavailable("the instance has not started yet"), 503),
    ],
)
def test_scaling_route_error_names_the_users_field(api, supervisor, path, field, error, status):
    supervisor.error = error
    response = api.post(path, {field: 4})
    names = {"num_engines": field, "num_api_servers": "api_server_count", "remove_ranks": "remove_ranks", None: None}
    answer = response.json()["error"]
    assert (response.status_code, answer["message"]) == (status, str(error))
    assert answer["param"] == names[getattr(error, "param", None)]


def test_scaling_route_client_disconnects_operation_goes_on(checkpoint):
    async def disconnect():
        call = Call(api.app, "/scale", {"data_parallel_size": 4})
        await settle()
        call.leave()
        await asyncio.gather(call.task, return_exceptions=True)

    with serving(checkpoint, enable_rl=True) as api:
        supervisor = Supervisor(api)
        supervisor.has_ended = False
        api.run(disconnect())
        assert [call.request for call in supervisor.calls] == [Scale(num_engines=4)]
        assert api.client.num_in_flight == 0


def test_scaling_routes_need_the_admin_key(checkpoint):
    with serving(checkpoint, api_key=["user"], admin_api_key=["admin"]) as api:
        supervisor = Supervisor(api)
        for method, path in (
            ("POST", "/scale"),
            ("GET", "/scale"),
            ("POST", "/restart"),
            ("POST", "/scale_elastic_ep"),
            ("GET", "/is_scaling_elastic_ep"),
        ):
            response = api.request(method, path, headers={"Authorization": "Bearer user"})
            assert response.status_code == 401, path
        assert not supervisor.calls
        assert api.get("/scale", headers={"Authorization": "Bearer admin"}).json() == STATUS
