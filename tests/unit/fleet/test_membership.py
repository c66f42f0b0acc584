from __future__ import annotations

from eagleray.fleet.membership import Membership
from eagleray.identity import ClientId, EngineId, next_incarnation, replica_key
from eagleray.messages.membership import EngineInfo, Joined, Left

ENGINE, CLIENT, OTHER = EngineId("i", 0), ClientId("i", 0), ClientId("i", 1)


def test_membership_join_is_sent_to_other_attached_members():
    membership = Membership()
    assert membership.attach(ENGINE) == ([], [])
    assert membership.attach(CLIENT) == ([], [])
    assert membership.join(Joined(ENGINE, "e")) == [CLIENT]
    assert membership.join(Joined(CLIENT, "c")) == [ENGINE]


def test_membership_attach_returns_joined_members():
    membership = Membership()
    membership.attach(ENGINE)
    membership.join(Joined(ENGINE, "e"))
    assert membership.attach(OTHER) == ([Joined(ENGINE, "e")], [])


def test_membership_leave_is_sent_to_the_others_once():
    membership = Membership()
    membership.attach(ENGINE)
    membership.attach(CLIENT)
    membership.join(Joined(ENGINE, "e"))
    assert membership.leave(Left(ENGINE, "killed")) == [CLIENT]
    assert membership.leave(Left(ENGINE, "killed")) == []
    assert membership.attach(OTHER)[0] == []


def test_membership_leave_of_expected_member_is_sent():
    membership = Membership()
    membership.attach(CLIENT)
    assert membership.leave(Left(ENGINE, "who?")) == []
    membership.expect(ENGINE)
    assert membership.leave(Left(ENGINE, "killed")) == [CLIENT]


def test_membership_attach_returns_missing_engine_until_replacement_joins():
    membership = Membership()
    membership.attach(ENGINE)
    membership.join(Joined(ENGINE, "e"))
    first, second = Left(ENGINE, "killed"), Left(next_incarnation(ENGINE), "killed again")
    membership.leave(first)
    assert membership.attach(CLIENT) == ([], [first])
    membership.expect(next_incarnation(ENGINE))
    membership.leave(second)
    assert membership.attach(OTHER) == ([], [second])
    third = Joined(next_incarnation(next_incarnation(ENGINE)), "e")
    membership.attach(third.member)
    membership.join(third)
    membership.leave(Left(CLIENT, "killed"))
    assert membership.attach(ClientId("i", 2)) == ([third], [])


def test_replica_key_is_equal_for_all_incarnations():
    membership = Membership()
    membership.attach(ENGINE)
    membership.join(Joined(ENGINE, "e"))
    membership.attach(next_incarnation(ENGINE))
    assert membership.leave(Left(ENGINE, "killed")) == [next_incarnation(ENGINE)]
    assert replica_key(next_incarnation(ENGINE)) == replica_key(ENGINE) == ENGINE
    assert replica_key(EngineId("i", 1)) != ENGINE


def test_membership_attach_missing_engine_has_info():
    info = EngineInfo(architecture="A", vocab_size=10, max_model_len=20, block_size=4, num_kv_blocks=5)
    membership = Membership()
    membership.attach(ENGINE)
    membership.join(Joined(ENGINE, "e", info))
    membership.leave(Left(ENGINE, "killed"))
    assert membership.attach(CLIENT) == ([], [Left(ENGINE, "killed", engine=info)])


def test_membership_history_has_joins_and_exits_without_addresses():
    membership = Membership()
    membership.attach(ENGINE)
    membership.join(Joined(ENGINE, "e", time=1.0))
    membership.leave(left := Left(ENGINE, "killed", time=2.0))
    membership.leave(left)
    assert membership.history.events == [Joined(ENGINE, "", time=1.0), left]
