from __future__ import annotations

from eagleray.fleet.membership import Membership
from eagleray.identity import ClientId, EngineId
from eagleray.messages.membership import Joined, Left

ENGINE, CLIENT, OTHER = EngineId("i", 0), ClientId("i", 0), ClientId("i", 1)


def test_who_is_attached_hears_of_everybody_else():
    membership = Membership()
    assert membership.attach(ENGINE) == []
    assert membership.attach(CLIENT) == []
    assert membership.join(Joined(ENGINE, "e")) == [CLIENT]
    assert membership.join(Joined(CLIENT, "c")) == [ENGINE]


def test_who_is_attached_late_is_told_who_is_there():
    membership = Membership()
    membership.attach(ENGINE)
    membership.join(Joined(ENGINE, "e"))
    assert membership.attach(OTHER) == [Joined(ENGINE, "e")]


def test_who_left_is_told_nothing_and_is_named_to_the_rest_once():
    membership = Membership()
    membership.attach(ENGINE)
    membership.attach(CLIENT)
    membership.join(Joined(ENGINE, "e"))
    assert membership.leave(Left(ENGINE, "killed")) == [CLIENT]
    assert membership.leave(Left(ENGINE, "killed")) == []
    assert membership.attach(OTHER) == []
