from __future__ import annotations

from eagleray.fleet.membership import Membership
from eagleray.fleet.turn import Connect, Disconnect, Send, Turn
from eagleray.identity import ClientId, EngineId, MemberId, next_incarnation, replica_key
from eagleray.messages.control import InstanceState, StateChanged
from eagleray.messages.membership import EngineInfo, Joined, Left

ENGINE, CLIENT, OTHER = EngineId("i", 0), ClientId("i", 0), ClientId("i", 1)
INFO = EngineInfo(architecture="A", vocab_size=10, max_model_len=20, block_size=4, num_kv_blocks=5)


def opened(*members: MemberId) -> tuple[Membership, Turn]:
    """Return a membership to which these members are attached."""
    membership = Membership(turn := Turn())
    for member in members:
        attach(membership, turn, member)
    return membership, turn


def attach(membership: Membership, turn: Turn, member: MemberId) -> tuple[list[Joined], list[Left]]:
    """Attach a member. Returns the members and the missing engines that it learns of."""
    membership.attach(member, f"of {member.label}", has_heartbeat=True)
    (connect,) = turn.end()
    assert isinstance(connect, Connect)
    assert (connect.member, connect.address, connect.has_heartbeat) == (member, f"of {member.label}", True)
    return connect.attach.members, connect.attach.missing


def test_membership_join_is_sent_to_other_attached_members():
    membership, turn = opened(ENGINE, CLIENT)
    turn.begin(5.0, 100.0)
    membership.join(ENGINE, INFO)
    joined = Joined(ENGINE, "of engine-0", INFO, 100.0)
    assert turn.end() == [Send((CLIENT,), joined)]
    membership.join(CLIENT, None)
    assert turn.end() == [Send((ENGINE,), Joined(CLIENT, "of client-0", None, 100.0))]
    assert attach(membership, turn, OTHER)[0][0] == joined


def test_membership_engine_is_told_of_clients_alone():
    first, second = EngineId("i", 1), EngineId("i", 2)
    membership, turn = opened(ENGINE, first, CLIENT)
    for member in (ENGINE, first, CLIENT):
        membership.join(member, None if member == CLIENT else INFO)
    membership.leave(Left(first, "killed"))
    sent = [(action.receivers, action.message) for action in turn.end() if isinstance(action, Send)]
    assert [(receivers, type(message), message.member) for receivers, message in sent] == [
        ((CLIENT,), Joined, ENGINE),
        ((CLIENT,), Joined, first),
        ((ENGINE, first), Joined, CLIENT),
        ((CLIENT,), Left, first),
    ]
    membership.attach(second, "of engine-2", has_heartbeat=True)
    (connect,) = turn.end()
    assert isinstance(connect, Connect)
    assert [joined.member for joined in connect.attach.members] == [CLIENT]
    assert connect.attach.missing == connect.attach.history == []
    members, missing = attach(membership, turn, OTHER)
    assert [joined.member for joined in members] == [ENGINE, CLIENT]
    assert [left.member for left in missing] == [first]


def test_membership_leave_is_sent_to_the_others_once():
    membership, turn = opened(ENGINE, CLIENT)
    membership.leave(Left(ENGINE, "killed"))
    assert turn.end() == [Send((CLIENT,), Left(ENGINE, "killed")), Disconnect(ENGINE, flushes=False)]
    assert ENGINE not in membership
    membership.leave(Left(ENGINE, "killed"))
    assert turn.end() == [Disconnect(ENGINE, flushes=False)]
    assert attach(membership, turn, OTHER)[0] == []


def test_membership_evicted_client_is_told_too():
    membership, turn = opened(ENGINE, CLIENT)
    membership.evict(left := Left(CLIENT, "silent"))
    assert turn.end() == [Send((ENGINE,), left), Send((CLIENT,), left), Disconnect(CLIENT, flushes=True)]


def test_membership_leave_of_expected_member_is_sent():
    membership, turn = opened(CLIENT)
    membership.leave(Left(ENGINE, "who?"))
    assert turn.end() == [Disconnect(ENGINE, flushes=False)]
    membership.expect(ENGINE)
    membership.leave(Left(ENGINE, "killed"))
    assert turn.end()[0] == Send((CLIENT,), Left(ENGINE, "killed"))


def test_membership_attach_lists_missing_engine_with_its_properties_until_replacement_joins():
    membership, turn = opened(ENGINE)
    membership.join(ENGINE, INFO)
    first, second = Left(ENGINE, "killed"), Left(next_incarnation(ENGINE), "killed again")
    membership.leave(first)
    turn.end()
    assert attach(membership, turn, CLIENT) == ([], [Left(ENGINE, "killed", engine=INFO)])
    membership.expect(next_incarnation(ENGINE))
    membership.leave(second)
    turn.end()
    assert attach(membership, turn, OTHER) == ([], [Left(second.member, second.cause, engine=INFO)])
    third = next_incarnation(next_incarnation(ENGINE))
    attach(membership, turn, third)
    membership.join(third, INFO)
    membership.leave(Left(CLIENT, "killed"))
    turn.end()
    assert attach(membership, turn, ClientId("i", 2)) == ([Joined(third, "of engine-0.2", INFO)], [])


def test_membership_replacement_of_attached_engine_is_another_member():
    membership, turn = opened(ENGINE, next_incarnation(ENGINE), CLIENT)
    membership.leave(Left(ENGINE, "killed"))
    assert turn.end()[0] == Send((CLIENT,), Left(ENGINE, "killed"))
    assert ENGINE not in membership and next_incarnation(ENGINE) in membership
    assert replica_key(next_incarnation(ENGINE)) == replica_key(ENGINE) == ENGINE
    assert replica_key(EngineId("i", 1)) != ENGINE


def test_membership_history_has_joins_and_exits_without_addresses():
    membership, turn = opened(ENGINE)
    turn.begin(0.0, 1.0)
    membership.join(ENGINE, INFO)
    turn.begin(0.0, 2.0)
    membership.leave(Left(ENGINE, "killed"))
    membership.leave(Left(ENGINE, "killed"))
    assert membership.history.events == [Joined(ENGINE, "", time=1.0), Left(ENGINE, "killed", time=2.0)]


def test_membership_published_state_goes_to_clients_now_and_later():
    membership, turn = opened(ENGINE, CLIENT)
    membership.publish_state(paused := InstanceState(pause="keep"))
    assert turn.end() == [Send((CLIENT,), StateChanged(paused))]
    membership.attach(OTHER, "of client-1", has_heartbeat=False)
    (connect,) = turn.end()
    assert isinstance(connect, Connect)
    assert connect.attach.state == paused
