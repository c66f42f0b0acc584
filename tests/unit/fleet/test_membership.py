from __future__ import annotations

from eagleray.fleet.membership import Membership, replica_key
from eagleray.identity import ClientId, EngineId, successor
from eagleray.messages.membership import EngineInfo, Joined, Left

ENGINE, CLIENT, OTHER = EngineId("i", 0), ClientId("i", 0), ClientId("i", 1)


def test_who_is_attached_hears_of_everybody_else():
    membership = Membership()
    assert membership.attach(ENGINE) == ([], [])
    assert membership.attach(CLIENT) == ([], [])
    assert membership.join(Joined(ENGINE, "e")) == [CLIENT]
    assert membership.join(Joined(CLIENT, "c")) == [ENGINE]


def test_who_is_attached_late_is_told_who_is_there():
    membership = Membership()
    membership.attach(ENGINE)
    membership.join(Joined(ENGINE, "e"))
    assert membership.attach(OTHER) == ([Joined(ENGINE, "e")], [])


def test_who_left_is_told_nothing_and_is_named_to_the_rest_once():
    membership = Membership()
    membership.attach(ENGINE)
    membership.attach(CLIENT)
    membership.join(Joined(ENGINE, "e"))
    assert membership.leave(Left(ENGINE, "killed")) == [CLIENT]
    assert membership.leave(Left(ENGINE, "killed")) == []
    assert membership.attach(OTHER)[0] == []


def test_the_end_of_one_that_was_only_started_is_news_too():
    membership = Membership()
    membership.attach(CLIENT)
    assert membership.leave(Left(ENGINE, "who?")) == []
    membership.expect(ENGINE)
    assert membership.leave(Left(ENGINE, "killed")) == [CLIENT]


def test_who_is_attached_late_is_told_which_engine_is_missing_until_its_successor_is_there():
    membership = Membership()
    membership.attach(ENGINE)
    membership.join(Joined(ENGINE, "e"))
    first, second = Left(ENGINE, "killed"), Left(successor(ENGINE), "killed again")
    membership.leave(first)
    assert membership.attach(CLIENT) == ([], [first])
    membership.expect(successor(ENGINE))
    membership.leave(second)
    assert membership.attach(OTHER) == ([], [second])
    third = Joined(successor(successor(ENGINE)), "e")
    membership.attach(third.member)
    membership.join(third)
    membership.leave(Left(CLIENT, "killed"))
    assert membership.attach(ClientId("i", 2)) == ([third], [])


def test_incarnations_share_a_place_and_nothing_else():
    membership = Membership()
    membership.attach(ENGINE)
    membership.join(Joined(ENGINE, "e"))
    membership.attach(successor(ENGINE))
    assert membership.leave(Left(ENGINE, "killed")) == [successor(ENGINE)]
    assert replica_key(successor(ENGINE)) == replica_key(ENGINE) == ENGINE
    assert replica_key(EngineId("i", 1)) != ENGINE


def test_who_comes_while_all_engines_are_missing_is_told_what_they_serve():
    info = EngineInfo(architecture="A", vocab_size=10, max_model_len=20, block_size=4, num_kv_blocks=5)
    membership = Membership()
    membership.attach(ENGINE)
    membership.join(Joined(ENGINE, "e", info))
    membership.leave(Left(ENGINE, "killed"))
    assert membership.attach(CLIENT) == ([], [Left(ENGINE, "killed", engine=info)])
