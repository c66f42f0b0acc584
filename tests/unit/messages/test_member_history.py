from __future__ import annotations

from eagleray.identity import ClientId, EngineId, next_incarnation
from eagleray.messages.member_history import MAX_EVENTS, MemberHistory
from eagleray.messages.membership import Joined, Left

ENGINE, OTHER, SERVER = EngineId("i", 0), EngineId("i", 1), ClientId("i", 0)


def test_member_history_latest_is_by_replica():
    history, replacement = MemberHistory(), next_incarnation(ENGINE)
    for event in (Joined(ENGINE, "e"), Joined(SERVER, "s"), Left(ENGINE, "killed"), Joined(replacement, "f")):
        history.record(event)
    assert history.latest() == {ENGINE: Joined(replacement, ""), SERVER: Joined(SERVER, "")}
    assert len(history.events) == 4


def test_member_history_is_bounded_and_keeps_the_last_event_of_present_replicas():
    history = MemberHistory()
    history.record(Joined(SERVER, "s"))
    history.record(Left(OTHER, "it was given up", returns=False))
    engine = ENGINE
    for _ in range(MAX_EVENTS):
        history.record(Left(engine, "killed"))
        engine = next_incarnation(engine)
    assert len(history.events) == MAX_EVENTS
    assert history.events[0] == Joined(SERVER, "")
    assert history.latest().keys() == {SERVER, ENGINE}
    assert history.latest()[ENGINE].member.incarnation == MAX_EVENTS - 1


def test_member_history_keeps_more_events_for_more_replicas():
    history = MemberHistory()
    for rank in range(MAX_EVENTS + 5):
        history.record(Joined(EngineId("i", rank), "e"))
    assert len(history.latest()) == len(history.events) == MAX_EVENTS + 5
