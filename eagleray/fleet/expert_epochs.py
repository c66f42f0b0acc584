"""The epochs of the expert group: which engines it has, when it forms again, and what waits until it has formed.

Pure: owned by `FleetState`, in a fleet whose engines share experts. `ExpertRendezvous` records who has opened and
joined; this class passes it the events of engines and the steps of scaling operations, and sends its state to the
engines. Control calls wait while engines exchange experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from eagleray.fleet.expert_rendezvous import ExpertRendezvous
from eagleray.fleet.membership import Membership
from eagleray.fleet.replicas import Replicas
from eagleray.fleet.scaling_operations import FleetChanges, Regroup
from eagleray.fleet.turn import Turn
from eagleray.identity import EngineId, replica_key
from eagleray.messages.lifecycle import EngineLoaded, ExpertsBroken, ExpertsJoined, ExpertsOpened

if TYPE_CHECKING:
    from eagleray.fleet.control.instance import Effect
    from eagleray.fleet.control.machine import Control


class ExpertEpochs:
    """`rendezvous`: that of the present epoch. `changes`: what scaling operations have begun. `carry_out` carries out
    the effects of control calls."""

    def __init__(
        self,
        rendezvous: ExpertRendezvous,
        replicas: Replicas,
        membership: Membership,
        changes: FleetChanges,
        turn: Turn,
        control: Control,
        *,
        carry_out: Callable[[Iterable[Effect]], None],
    ) -> None:
        self._rendezvous = rendezvous
        self._replicas = replicas
        self._membership = membership
        self._changes = changes
        self._turn = turn
        self._control = control
        self._carry_out = carry_out
        self._is_exchanging = False
        """Whether the ranks have changed, so that engines exchange experts when the group forms."""

    @property
    def spawned_group_size(self) -> int | None:
        """See `EngineSpec.expert_group_size`, for an engine that is spawned now."""
        group, held = self._rendezvous, self._changes.held
        if not (group.has_changed or held):
            return None
        return len({*group.ranks, *(key.rank for key in held)}.difference(group.leaving))

    def needs(self, engine: EngineId) -> bool:
        """Whether the others wait for the replacement of an engine. They do not wait for one that clients do not know
        yet, or that is about to leave."""
        if replica_key(engine) in self._changes.held:
            return False
        return engine.rank in self._rendezvous.ranks and engine.rank not in self._rendezvous.leaving

    # Events of engines.

    def on_attached(self, engine: EngineId) -> None:
        """Send an engine that was attached the state of the group that it belongs to."""
        if engine.rank in self._rendezvous.ranks:
            self._send()

    def on_ended(self, engine: EngineId, *, returns: bool) -> None:
        """Handle the exit of an engine. The others wait for its replacement if it `returns`."""
        self._is_exchanging |= not returns and engine.rank in self._rendezvous.ranks
        self._rendezvous.remove(engine, returns=returns)
        self._send()

    def handle(self, message: EngineLoaded | ExpertsOpened | ExpertsJoined | ExpertsBroken) -> None:
        """Handle a message of an engine."""
        match message:
            case EngineLoaded(engine):
                self._on_loaded(engine)
            case ExpertsOpened():
                self._on_opened(message)
            case ExpertsJoined(engine, epoch, shortage):
                self._rendezvous.join(engine, epoch, shortage)
            case ExpertsBroken(engine, epoch):
                if self._rendezvous.mark_broken(engine, epoch):
                    self._send()

    def _on_loaded(self, engine: EngineId) -> None:
        """Handle that an engine which is being added has loaded its weights, and can join the group."""
        replica = self._replicas.of(engine)
        if replica is not None and engine in self._membership:
            replica.wait_for_others()
            self._changes.on_loaded(engine)

    def _on_opened(self, message: ExpertsOpened) -> None:
        """Handle that an engine has opened for an epoch."""
        engine, replica = message.engine, self._replicas.of(message.engine)
        if replica is None or engine not in self._membership:
            return
        replica.wait_for_others()
        if self._rendezvous.open(engine, message.epoch, message.opened):
            self._send()

    # Scaling.

    def regroup(self, step: Regroup) -> None:
        """Begin an epoch with other engines, or with engines that give their experts to the others."""
        self._rendezvous.regroup(step.ranks, leaving=step.leaving)
        self._is_exchanging = True
        self.review()
        self._send()

    def review(self) -> bool:
        """Let control calls wait while engines exchange experts, or an operation is about to let them exchange more.
        Returns whether that has changed."""
        self._is_exchanging &= not self._rendezvous.is_settled
        is_regrouping = self._is_exchanging or self._changes.is_regrouping
        if is_regrouping == self._control.is_regrouping:
            return False
        self._carry_out(self._control.set_regrouping(is_regrouping, self._turn.now))
        return True

    def _send(self) -> None:
        """Send the state of the rendezvous to its engines: the ranks that it waits for, or the complete group."""
        group = self._rendezvous
        members = [engine for engine in self._membership.engines if engine.rank in group.ranks]
        if group.is_complete:
            engines = [self._membership.joined_message(engine) for engine in group.engines]
            self._turn.send(group.formed_message(engines), *members)
        else:
            self._turn.send(group.open_message, *members)
