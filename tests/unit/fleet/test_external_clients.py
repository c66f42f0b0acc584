from __future__ import annotations

from eagleray.fleet import timeouts
from eagleray.fleet.external_clients import ExternalClients, is_external
from eagleray.fleet.membership import Membership
from eagleray.fleet.turn import Connect, Disconnect, LeaseTimer, Send, Turn
from eagleray.identity import FIRST_EXTERNAL_INDEX, ClientId, EngineId
from eagleray.messages.lifecycle import Register
from eagleray.messages.membership import Left

FIRST, SECOND = ClientId("i", FIRST_EXTERNAL_INDEX), ClientId("i", FIRST_EXTERNAL_INDEX + 1)


def opened() -> tuple[ExternalClients, Turn]:
    turn = Turn()
    return ExternalClients("i", turn, Membership(turn)), turn


def pass_time(clients: ExternalClients, turn: Turn, now: float, *, late: float = 0.0) -> list:
    """Let the timers that are due at `now` fire, `late` seconds later. Returns the actions."""
    turn.begin(now + late, 0.0)
    while (timer := turn.timers.pop(now)) is not None:
        key, due = timer
        assert isinstance(key, LeaseTimer)
        clients.pass_time(key.client, due)
    return turn.end()


def test_external_clients_two_leases_expire_separately():
    clients, turn = opened()
    clients.register(Register("a", 5.0))
    clients.register(Register("b", 3600.0))
    assert list(clients) == [FIRST, SECOND]
    assert [action.member for action in turn.end() if isinstance(action, Connect)] == [FIRST, SECOND]
    assert pass_time(clients, turn, 4.9) == []
    left = Left(FIRST, "it sent no `Alive` for 5 s", returns=False)
    assert pass_time(clients, turn, 5.0) == [
        Send((SECOND,), left),
        Send((FIRST,), left),
        Disconnect(FIRST, flushes=True),
    ]
    assert list(clients) == [SECOND]
    clients.clear()
    assert len(clients) == 0
    assert turn.timers.deadline is None


def test_external_clients_renewed_lease_is_extended():
    clients, turn = opened()
    clients.register(Register("a", 5.0))
    turn.begin(3.0, 0.0)
    clients.renew(FIRST)
    turn.end()
    assert pass_time(clients, turn, 5.0) == []
    assert pass_time(clients, turn, 8.0) != []
    clients.renew(FIRST)  # too late, and harmless
    assert FIRST not in clients


def test_external_clients_supervisor_was_stopped_leases_begin_anew():
    clients, turn = opened()
    clients.register(Register("a", 5.0))
    turn.end()
    late = timeouts.LATE_TIMER_SECONDS + 1.0
    assert pass_time(clients, turn, 5.0, late=late) == []
    assert pass_time(clients, turn, 5.0 + late) == []
    assert pass_time(clients, turn, 5.0 + late + 5.0) != []


def test_external_clients_registered_again_former_identity_leaves():
    clients, turn = opened()
    clients.register(Register("a", 5.0))
    turn.end()
    clients.register(Register("a", 5.0))
    assert list(clients) == [SECOND]
    assert [type(action).__name__ for action in turn.end()] == ["Disconnect", "Connect"]


def test_external_clients_not_connected_is_dropped():
    clients, turn = opened()
    clients.register(Register("nowhere", 5.0))
    turn.end()
    clients.on_not_connected(FIRST, "no such protocol")
    clients.on_not_connected(FIRST, "no such protocol")
    assert len(clients) == 0
    assert turn.end() == []
    clients.register(Register("b", float("inf")))
    assert turn.end() == []


def test_external_clients_are_told_from_api_servers_by_their_index():
    assert is_external(FIRST)
    assert not is_external(ClientId("i", 3))
    assert not is_external(EngineId("i", 3))
