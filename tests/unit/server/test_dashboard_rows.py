from __future__ import annotations

from server_fakes import stats

from eagleray.identity import ClientId, EngineId, next_incarnation
from eagleray.messages.membership import EngineInfo, Joined, Left, ProcessInfo
from eagleray.server.dashboard.rows import MAX_EVENTS, api_server_rows, engine_rows, event_rows, node_rows
from eagleray.server.dashboard.sampler import EngineRates
from eagleray.server.dashboard.state import EventRow

ENGINE, OTHER, SERVER = EngineId("i", 0), EngineId("i", 1), ClientId("i", 0)
REPLACEMENT = next_incarnation(ENGINE)
KILLED = "it was killed by SIGKILL"


def info(host: str = "a") -> EngineInfo:
    return EngineInfo(
        architecture="Tiny",
        vocab_size=10,
        max_model_len=20,
        block_size=4,
        num_kv_blocks=5,
        process=ProcessInfo(host=host, pid=1),
        workers=tuple(ProcessInfo(host=name, pid=2 + rank) for rank, name in enumerate((host, host, "b", "b"))),
    )


def rows(latest, infos, **options):
    defaults = {"stats": {}, "rates": {}, "tensor_parallel_size": 2}
    return engine_rows([ENGINE, OTHER], latest, infos, **defaults | options)


def test_event_rows_recovery_has_the_time_since_the_first_exit():
    second = next_incarnation(REPLACEMENT)
    events = [
        Joined(ENGINE, "", time=1.0),
        Left(ENGINE, KILLED, time=10.0),
        Left(REPLACEMENT, "out of memory", time=11.0),
        Joined(OTHER, "", time=12.0),
        Joined(second, "", time=14.5),
        Left(second, "again", returns=False, time=20.0),
        Left(OTHER, "it was removed by scaling", returns=False, time=21.0, is_planned=True),
        Joined(next_incarnation(OTHER), "", time=22.0),
    ]
    assert event_rows(events)[::-1] == [
        EventRow(time=1.0, member="engine-0", kind="started"),
        EventRow(time=10.0, member="engine-0", kind="lost", cause=KILLED, returns=True),
        EventRow(time=11.0, member="engine-0.1", kind="lost", cause="out of memory", returns=True),
        EventRow(time=12.0, member="engine-1", kind="started"),
        EventRow(time=14.5, member="engine-0.2", kind="recovered", downtime=4.5),
        EventRow(time=20.0, member="engine-0.2", kind="lost", cause="again", returns=False),
        EventRow(time=21.0, member="engine-1", kind="left", cause="it was removed by scaling", returns=False),
        EventRow(time=22.0, member="engine-1.1", kind="started"),
    ]


def test_event_rows_are_bounded_in_number_and_length():
    events = [Left(SERVER, "x" * 10_000, time=float(number)) for number in range(MAX_EVENTS + 10)]
    shown = event_rows(events)
    assert len(shown) == MAX_EVENTS
    assert shown[0].time == MAX_EVENTS + 9
    assert len(shown[0].cause) <= 600


def test_engine_rows_states_follow_the_last_event():
    starting, _ = rows({}, {})
    assert (starting.state, starting.label, starting.workers) == ("starting", "engine-0", [])
    latest = {ENGINE: Left(REPLACEMENT, KILLED, time=3.0), OTHER: Left(OTHER, "given up", returns=False, time=4.0)}
    lost, gone = rows(latest, {0: info()})
    assert (lost.state, lost.label, lost.restarts) == ("restarting", "engine-0.1", 1)
    assert (lost.since, lost.cause) == (3.0, KILLED)
    assert (lost.host, lost.pid) == ("a", None)
    assert [(worker.label, worker.state, worker.pid) for worker in lost.workers] == [
        ("tp0-pp0", "restarting", None),
        ("tp1-pp0", "restarting", None),
        ("tp0-pp1", "restarting", None),
        ("tp1-pp1", "restarting", None),
    ]
    assert (gone.state, gone.cause) == ("gone", "given up")


def test_engine_rows_serving_engine_has_load_of_its_incarnation():
    load = stats(REPLACEMENT, num_running=3, num_waiting=2, num_kv_blocks=10, num_free_kv_blocks=4)
    row, _ = rows(
        {ENGINE: Joined(REPLACEMENT, "", time=3.0)},
        {0: info()},
        stats={ENGINE: stats(ENGINE, num_running=9), REPLACEMENT: load},
        rates={REPLACEMENT: EngineRates(5.0, 7.0)},
    )
    assert (row.state, row.pid, row.num_running, row.num_waiting, row.cache_usage) == ("serving", 1, 3, 2, 0.6)
    assert (row.prompt_tokens_per_second, row.generation_tokens_per_second) == (5.0, 7.0)


def test_api_server_rows_lost_server_has_no_process_and_no_requests():
    others = [SERVER, ClientId("i", 1)]
    latest = {SERVER: Left(SERVER, KILLED), others[1]: Joined(others[1], "", time=2.0)}
    lost, serving = api_server_rows(others, latest, {0: 10, 1: 11}, {0: 4, 1: 5})
    assert (lost.state, lost.pid, lost.num_in_flight, lost.cause) == ("restarting", None, 0, KILLED)
    assert (serving.state, serving.pid, serving.num_in_flight, serving.cause) == ("serving", 11, 5, None)


def test_node_rows_count_members_by_host():
    latest = {ENGINE: Joined(ENGINE, ""), OTHER: Left(OTHER, KILLED)}
    engines = rows(latest, {0: info("a"), 1: info("c")})
    servers = api_server_rows([SERVER], {SERVER: Joined(SERVER, "")}, {}, {})
    here, a, b, c = node_rows(engines, servers, "here")
    assert (here.host, here.engines, here.num_workers, here.num_away, here.num_api_servers) == ("here", [], 0, 0, 1)
    assert (a.host, a.engines, a.num_workers, a.num_away, a.num_api_servers) == ("a", ["engine-0"], 2, 0, 0)
    assert (b.host, b.engines, b.num_workers, b.num_away) == ("b", [], 2, 2)
    assert (c.host, c.engines, c.num_workers, c.num_away) == ("c", [], 0, 3)
