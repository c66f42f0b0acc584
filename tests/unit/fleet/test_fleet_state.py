from __future__ import annotations

import pytest
from fleet_machine import INFO, KILLED, OBSERVER, Machine, later

from eagleray.errors import ConfigError, EngineFailed
from eagleray.fleet import timeouts
from eagleray.fleet.events import Disconnected, NotConnected, Silent, StartApiServers, StartEngines, TimePassed
from eagleray.identity import ClientId, EngineId
from eagleray.messages.failure import Ended, Failure
from eagleray.messages.lifecycle import Alive, ClientStarted, EngineStarted, Knows, Register, Stop, Unreachable
from eagleray.messages.membership import Joined, Left

E = [EngineId("i", rank) for rank in range(3)]
SERVER = ClientId("i", 0)
EXTERNAL = ClientId("i", 1_000_000)
MISTAKE = Failure.of(ConfigError("the cache is too small"))
BUG = Failure.of(ZeroDivisionError("there is a bug"))


def starting(engines: int = 1, servers: int = 0, **options: object) -> Machine:
    """Return a machine whose processes were spawned, and which an observer watches."""
    machine = Machine(data_parallel_size=engines, **options)
    machine.handle(StartEngines(tuple(range(engines))))
    machine.handle(StartApiServers(tuple(range(servers))))
    machine.adopt()
    return machine


def joined(machine: Machine, engine: EngineId) -> Joined:
    (message,) = [one for one in machine.received[OBSERVER] if isinstance(one, Joined) and one.member == engine]
    return message


def test_start_clients_receive_joined_of_all_and_engines_of_clients(caplog):
    caplog.set_level("INFO", logger="eagleray")
    it = starting(2, 1)
    assert it.spawned == [*E[:2], SERVER]
    it.bring_up(SERVER)
    attach = it.attached[SERVER]
    assert (attach.member, [one.member for one in attach.members]) == (SERVER, [OBSERVER])
    it.bring_up(E[0])
    assert it.events(SERVER) == ["+engine-0"]
    assert (joined(it, E[0]).address, joined(it, E[0]).engine) == ("of engine-0", INFO)
    assert not it.is_serving
    it.bring_up(E[1])
    assert {one.member for one in it.attached[E[1]].members} == {OBSERVER, SERVER}
    assert it.events(E[0]) == []
    assert it.events(SERVER) == ["+engine-0", "+engine-1"]
    assert it.is_serving
    assert it.state.engines == set(E[:2])
    assert [message for message in caplog.messages if "joined" in message] == [
        "engine-0 has joined",
        "engine-1 has joined",
    ]


def test_start_serving_is_set_when_clients_know_the_engines():
    """A caller that waits for `serving` may send a request at once."""
    it = starting(1, 1)
    for member in (E[0], SERVER):
        it.bind(member)
    it.handle(ClientStarted(SERVER))
    it.handle(EngineStarted(E[0], INFO))
    it.handle(Knows(OBSERVER, E[0]))
    assert not it.is_serving
    it.handle(Knows(SERVER, E[0]))
    assert it.is_serving


def test_start_message_that_a_client_has_started_arrives_again_it_joins_once():
    it = starting()
    it.bring_up(E[0])
    it.handle(ClientStarted(OBSERVER))
    assert it.events(E[0]) == []


def test_engine_killed_starts_next_incarnation():
    it = Machine.serving()
    it.exit(E[0])
    it.pass_time(0.0)
    assert it.spawned[-1] == later(E[0])
    it.now = 5.0
    it.bring_up(later(E[0]))
    assert it.events() == ["+engine-0", "+client-0", "-engine-0", "+engine-0.1"]
    (left,) = [message for message in it.received[OBSERVER] if isinstance(message, Left)]
    assert (left.cause, left.time) == (KILLED, 1000.0)
    it.handle(Register("of external", 30.0))
    history = [event for event in it.attached[EXTERNAL].history if isinstance(event.member, EngineId)]
    assert [type(event) for event in history] == [Joined, Left, Joined]
    assert [event.time for event in history] == [1000.0, 1000.0, 1005.0]
    assert it.error is None


def test_engine_reports_failure_leaves_now_and_is_replaced_after_its_exit():
    it = Machine.serving()
    it.handle(Ended(E[0], BUG))
    assert it.events()[-1] == "-engine-0"
    assert it.state.engines == {later(E[0])}
    it.pass_time(1.0)
    assert E[0] in it.running
    it.exit(E[0], "it ended with exit code 1")
    it.pass_time(0.0)
    assert it.spawned[-1] == later(E[0])


def test_engine_messages_of_past_incarnations_are_ignored():
    it = Machine.serving()
    it.handle(Ended(E[0], BUG))
    it.exit(E[0])
    it.pass_time(0.0)
    it.handle(EngineStarted(E[0], INFO))
    it.bring_up(later(E[0]))
    it.forget()
    for message in (Ended(E[0], BUG), EngineStarted(E[0], INFO), Silent(E[0], 9.0), Disconnected(E[0])):
        it.handle(message)
    it.pass_time(10.0)
    assert it.events() == []
    it.handle(Ended(later(E[0]), BUG))
    assert it.events() == ["-engine-0.1"]


def test_engine_silent_is_killed_and_replaced_after_its_exit():
    it = Machine.serving(data_parallel_size=2)
    it.handle(Silent(E[0], 10.0))
    message = it.received[OBSERVER][-1]
    assert isinstance(message, Left)
    assert message.cause == "it was silent for 10 s"
    assert (it.running[E[0]], it.running[E[1]]) == (["kill"], [])
    it.exit(E[0])
    it.pass_time(0.0)
    assert it.spawned[-1] == later(E[0])


def test_engine_start_timeout_is_killed_and_restarted():
    it = starting(startup_timeout=10.0)
    it.pass_time(10.0 + timeouts.START_MARGIN_SECONDS)
    assert it.running[E[0]] == ["kill"]
    it.exit(E[0])
    it.pass_time(0.0)
    assert it.spawned[-1] == later(E[0])


def test_engine_failed_but_running_is_killed_again_and_not_replaced():
    it = starting()
    it.handle(Ended(E[0], BUG))
    it.pass_time(2 * timeouts.STOP_TIMEOUT_SECONDS)
    assert it.running == {E[0]: ["kill", "kill"]}


def test_user_error_at_first_start_ends_instance():
    it = starting(2, 1)
    it.bring_up(SERVER)
    it.handle(Ended(E[0], MISTAKE))
    assert isinstance(it.error, ConfigError)
    left, stop = it.received[SERVER]
    assert (left.member, left.cause, left.returns) == (E[0], str(MISTAKE), False)
    assert stop == Stop(timeouts.FLUSH_SECONDS, cause="the cache is too small")
    for member in list(it.running):
        it.exit(member)
    it.pass_time(1000.0)
    assert it.state.engines == set()
    assert not it.running


def test_user_error_after_serving_is_restarted():
    it = Machine.serving()
    it.exit(E[0])
    it.pass_time(0.0)
    it.handle(Ended(later(E[0]), MISTAKE))
    it.exit(later(E[0]))
    it.pass_time(timeouts.FIRST_RESTART_DELAY_SECONDS)
    assert it.spawned[-1] == later(E[0], 2)
    assert it.error is None


def test_processes_killed_thirty_times_are_restarted_each_time():
    it = Machine.serving(data_parallel_size=2, max_engine_restarts=1)
    for blow in range(30):
        for member in list(it.running):
            it.exit(member, ["it was killed by SIGKILL", "it was killed by SIGSEGV"][blow % 2])
        it.pass_time(timeouts.MAX_ENGINE_DELAY_SECONDS)
        assert len(it.running) == 3
        if blow % 10 == 9:
            for member in list(it.running):
                it.bring_up(member)
    assert {member.incarnation for member in it.running} == {30}
    assert it.error is None


def test_same_start_failure_twice_before_serving_ends_instance():
    it = starting(2)
    it.handle(Ended(E[0], BUG))
    it.exit(E[0], "it ended with exit code 1")
    it.pass_time(0.0)
    assert it.error is None
    it.handle(Ended(later(E[0]), BUG))
    assert isinstance(it.error, EngineFailed)
    assert "there is a bug" in str(it.error)


def test_same_start_failure_twice_after_serving_gives_up_engine_and_the_last_one_ends_instance():
    it = Machine.serving(data_parallel_size=2)
    for engine in E[:2]:
        assert it.error is None
        it.exit(engine)
        for attempt in (1, 2):
            it.pass_time(1.0)
            it.handle(Ended(later(engine, attempt), MISTAKE))
            it.exit(later(engine, attempt))
        assert E[0] not in it.state.engines
    assert isinstance(it.error, ConfigError)


def test_budget_spent_gives_up_engine_and_the_last_one_ends_instance():
    it = Machine.serving(data_parallel_size=2, max_engine_restarts=1)
    it.forget()
    it.handle(Ended(E[0], BUG))
    it.exit(E[0])
    it.pass_time(0.0)
    it.bring_up(later(E[0]))
    it.handle(Ended(later(E[0]), BUG))
    it.exit(later(E[0]))
    assert it.events() == ["-engine-0", "+engine-0.1", "-engine-0.1 for ever"]
    assert it.state.engines == {E[1]}
    assert it.error is None
    it.handle(Ended(E[1], BUG))
    it.exit(E[1])
    it.pass_time(0.0)
    it.handle(Ended(later(E[1]), Failure.of(OSError("its disk is full"))))
    assert str(it.error).startswith("engine-1.1 failed: OSError: its disk is full")
    *_, left, stop = it.received[OBSERVER]
    assert not left.returns
    assert stop.cause.startswith("engine-1.1 failed: OSError: its disk is full")


def test_api_server_replaced_attach_lists_missing_engine():
    it = Machine.serving(data_parallel_size=2)
    it.handle(Ended(E[1], BUG))
    it.exit(SERVER)
    it.pass_time(0.0)
    it.bind(later(SERVER))
    attach = it.attached[later(SERVER)]
    assert [one.member for one in attach.members] == [OBSERVER, E[0]]
    assert attach.missing == [Left(E[1], str(BUG), returns=True, engine=INFO, time=1000.0)]
    it.exit(E[1])
    it.pass_time(0.0)
    it.bring_up(later(E[1]))
    assert it.events(later(SERVER)) == ["+engine-1.1"]


# External clients


def test_external_client_registers_is_attached_and_published():
    it = Machine.serving()
    it.forget()
    it.handle(Register("of external", 30.0))
    attach = it.attached[EXTERNAL]
    assert joined_members(attach.members) == {OBSERVER, SERVER, E[0]}
    it.handle(ClientStarted(EXTERNAL))
    assert it.events(E[0]) == ["+client-1000000"]
    it.exit(E[0])
    assert it.events(EXTERNAL) == ["-engine-0"]


def joined_members(members: list[Joined]) -> set[object]:
    return {one.member for one in members}


def test_external_client_lease_expired_leaves_and_may_register_again():
    it = Machine.serving()
    it.handle(Register("of external", 10.0))
    it.handle(ClientStarted(EXTERNAL))
    it.forget()
    for _ in range(10):
        it.pass_time(5.0)
        it.handle(Alive(EXTERNAL))
    assert it.events(E[0]) == []
    it.pass_time(10.0)
    for member in (E[0], EXTERNAL):  # the client itself receives it too
        (left,) = it.received[member]
        assert (left.member, left.cause) == (EXTERNAL, "it sent no `Alive` for 10 s")
    it.handle(Alive(EXTERNAL))  # too late
    assert EXTERNAL not in it.attached
    it.handle(Register("of external", 30.0))
    assert ClientId("i", 1_000_001) in it.attached


def test_external_client_supervisor_was_suspended_lease_is_extended():
    it = Machine.serving()
    it.handle(Register("of external", 10.0))
    it.now = 100.0
    it.handle(TimePassed())
    assert EXTERNAL in it.attached
    it.pass_time(10.0)
    assert EXTERNAL not in it.attached


def test_external_client_registers_twice_gets_new_identity():
    it = Machine.serving()
    it.handle(Register("of external", 30.0))
    it.handle(ClientStarted(EXTERNAL))
    it.handle(Register("of external", 30.0))
    assert it.events(E[0])[-1] == "-client-1000000 for ever"
    assert EXTERNAL not in it.attached
    assert ClientId("i", 1_000_001) in it.attached


def test_external_client_cannot_be_connected_to_or_has_no_lease_nobody_knows_it():
    it = Machine.serving()
    it.forget()
    it.handle(Register("nowhere", 30.0))
    it.handle(NotConnected(EXTERNAL, "there is no such address"))
    it.handle(Register("of external", -1.0))
    it.handle(ClientStarted(EXTERNAL))
    it.pass_time(100.0)
    assert it.received == {}


# Connections


@pytest.mark.parametrize("pair", [(E[0], SERVER), (SERVER, E[0])])
def test_connection_broken_between_engine_and_api_server_replaces_engine(pair):
    it = Machine.serving()
    it.handle(Unreachable(*pair))
    it.pass_time(timeouts.DISCONNECT_GRACE_SECONDS)
    message = it.received[SERVER][-1]
    assert isinstance(message, Left)
    assert (message.member, message.cause) == (E[0], f"the connection from {pair[0].label} to {pair[1].label} broke")
    assert it.running[E[0]] == ["kill"]
    it.exit(E[0])
    it.pass_time(0.0)
    assert it.spawned[-1] == later(E[0])


def test_connection_broken_by_exit_replaces_nothing_else():
    it = Machine.serving(data_parallel_size=2)
    it.forget()
    it.handle(Unreachable(OBSERVER, E[0]))
    it.exit(E[0])
    it.pass_time(2 * timeouts.DISCONNECT_GRACE_SECONDS)
    assert it.events() == ["-engine-0"]
    assert it.running == {E[1]: [], SERVER: [], later(E[0]): []}


@pytest.mark.parametrize("pair", [(E[0], EXTERNAL), (EXTERNAL, E[0])])
def test_connection_broken_to_external_client_evicts_it(pair):
    it = Machine.serving()
    it.handle(Register("of external", 30.0))
    it.handle(ClientStarted(EXTERNAL))
    it.forget()
    it.handle(Unreachable(*pair))
    it.pass_time(timeouts.DISCONNECT_GRACE_SECONDS)
    for member in (E[0], EXTERNAL):
        assert it.events(member) == ["-client-1000000 for ever"]
    assert it.running[E[0]] == []


def test_connection_broken_from_supervisor_replaces_member():
    it = Machine.serving()
    it.handle(Disconnected(E[0]))
    it.pass_time(timeouts.DISCONNECT_GRACE_SECONDS)
    assert it.running[E[0]] == ["kill"]
