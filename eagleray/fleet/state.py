"""The state machine of the fleet: which engines and API servers run, what becomes of one that exits, falls silent or
loses its connections, and when the instance serves, fails and stops.

Pure: `FleetState.handle` takes an event and returns the actions that follow; `Supervisor` turns sockets, exits and
timers into events, and actions into calls.

Every process takes one path, at the first start and at every other. It is spawned, binds its inbox and reports `Bound`;
it is sent `Attach`; it reports that it has started; `Joined` is published; when it exits, `Left` is published, and
`restart_policy` decides whether and when `Replica` starts a replacement. A client in the supervisor's own process
(`LLM`) is adopted with its address, an external one registers with its own; both take the path from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from eagleray.config.resolve import expert_engines, local_ranks
from eagleray.config.sections import Config
from eagleray.errors import ClusterError, ClusterLost, EagleRayError, Unavailable
from eagleray.fleet import timeouts
from eagleray.fleet.autoscaler import Autoscaler, autoscale_settings
from eagleray.fleet.control.instance import (
    Effect,
    JoinEngine,
    PublishState,
    ReplaceEngine,
    SendAnswer,
    SendCommand,
)
from eagleray.fleet.control.machine import Control
from eagleray.fleet.engine_options import EngineOptions, OptionsOfEngines
from eagleray.fleet.engine_upgrades import EngineUpgrades
from eagleray.fleet.events import (
    Adopt,
    Disconnected,
    Event,
    Exited,
    KillInstance,
    NotConnected,
    Silent,
    StartApiServers,
    StartEngines,
    StopInstance,
    TimePassed,
)
from eagleray.fleet.expert_epochs import ExpertEpochs
from eagleray.fleet.expert_rendezvous import ExpertRendezvous
from eagleray.fleet.external_clients import ExternalClients
from eagleray.fleet.first_start import FirstStart
from eagleray.fleet.membership import Membership
from eagleray.fleet.node_drain import NodeDrain
from eagleray.fleet.process_exit import ProcessExit
from eagleray.fleet.replica import Replica, Starting, Up
from eagleray.fleet.replicas import Replicas
from eagleray.fleet.restart_policy import EndInstance, GiveUp
from eagleray.fleet.rolling_restart import RollingRestart
from eagleray.fleet.scaling import Scaling
from eagleray.fleet.scaling_operations import (
    Admit,
    Drain,
    FleetChanges,
    Regroup,
    Remove,
    RestartReplica,
    RestoreWeights,
    StartReplica,
    Step,
)
from eagleray.fleet.scaling_rules import ScalingRules
from eagleray.fleet.turn import (
    Action,
    BrokenConnectionTimer,
    ControlTimer,
    FailInstance,
    LeaseTimer,
    ScalingTimer,
    Spawn,
    Stopped,
    StopTimer,
    Turn,
)
from eagleray.identity import ClientId, EngineId, MemberId, replica_key
from eagleray.log import get_logger
from eagleray.messages.checkpoints import CheckpointFetched
from eagleray.messages.control import CommandDone, ControlCall
from eagleray.messages.failure import Ended, Failure
from eagleray.messages.lifecycle import (
    Alive,
    Bound,
    ClientStarted,
    EngineLoaded,
    EngineStarted,
    ExpertsBroken,
    ExpertsJoined,
    ExpertsOpened,
    Knows,
    NodeDraining,
    Register,
    Stop,
    Unreachable,
)
from eagleray.messages.membership import EngineInfo, Left
from eagleray.messages.scaling import (
    Drained,
    Draining,
    GetScaling,
    LoadReport,
    RestartEngines,
    Scale,
)

logger = get_logger(__name__)


class FleetState:
    """`instance` is the instance's name. `unix_clock` gives the Unix time of published changes. `shortage(num_added)`
    returns why that many added engines find no room; None if there is room."""

    def __init__(
        self,
        config: Config,
        instance: str,
        *,
        unix_clock: Callable[[], float] = time.time,
        shortage: Callable[[int], str | None] = lambda num_added: None,
    ) -> None:
        self.instance = instance
        self.failure: EagleRayError | None = None
        """The error that ends this instance."""
        self._config = config
        self._unix_clock = unix_clock
        self._turn = Turn()
        self._membership = Membership(self._turn)
        self._options = OptionsOfEngines(config)
        self._replicas = Replicas(config, self._turn, self._membership, self._options)
        self._control = Control.of(config, instance)
        rendezvous = ExpertRendezvous(local_ranks(config)) if expert_engines(config) > 1 else None
        self._changes = FleetChanges(
            self._replicas,
            self._membership,
            self._turn,
            instance=instance,
            shortage=shortage,
            rendezvous=rendezvous,
            regrouping_obstacle=lambda: self._control.regrouping_obstacle,
        )
        self._experts: ExpertEpochs | None = None
        """None if engines do not share experts."""
        if rendezvous is not None:
            self._experts = ExpertEpochs(
                rendezvous,
                self._replicas,
                self._membership,
                self._changes,
                self._turn,
                self._control,
                carry_out=self._carry_out,
            )
        self._upgrades = EngineUpgrades(
            config, self._options, self._replicas, self._membership, self._control, shortage=shortage
        )
        restarts = RollingRestart(
            self._changes,
            self._options,
            self._upgrades,
            self._replicas,
            self._membership,
            self._turn,
            instance=instance,
        )
        self._rules = ScalingRules(config, self._control, self._changes, self._upgrades)
        self._first_start = FirstStart(self._replicas, self._turn)
        self._node_drain = NodeDrain(self._replicas, self._membership, self._changes)
        self._scaling = Scaling(
            self._changes, restarts, self._turn, instance=instance, forbidden=self._scaling_forbidden
        )
        self._autoscaler: Autoscaler | None = None
        """None if the number of engines is fixed."""
        if (settings := autoscale_settings(config)) is not None:
            self._autoscaler = Autoscaler(
                settings,
                begin=self._scaling.begin,
                changes=self._changes,
                membership=self._membership,
                turn=self._turn,
            )
            self._scaling.autoscale = self._autoscaler.describe
        self._external_clients = ExternalClients(instance, self._turn, self._membership)
        self._infos: dict[EngineId, EngineInfo] = {}
        """Properties of engines that have started and not joined."""
        self._to_replace: list[tuple[EngineId, str]] = []
        """Engines that `Control` has given up, with the causes."""
        self._is_closed = False
        """Whether nothing is started any more."""
        self._stop: Stop | None = None
        """The message to members, while the instance stops."""
        self._kinds_to_stop: list[type[EngineId | ClientId]] = []
        """Kinds of members that are told to stop when the processes of the kind before have exited."""
        if self._control.state.adapters:
            self._membership.publish_state(self._control.state)

    @property
    def is_serving(self) -> bool:
        """Whether the first members have started, and the clients know the engines."""
        return self._first_start.is_serving

    @property
    def deadline(self) -> float | None:
        """Time by which `handle` must be called with `TimePassed`; None if nothing waits for a time."""
        return self._turn.timers.deadline

    @property
    def engines(self) -> set[EngineId]:
        """Engines that clients know or are to know soon."""
        known = (member for key, member in self._replicas.expected().items() if key not in self._changes.held)
        return {engine for engine in known if isinstance(engine, EngineId)}

    @property
    def num_engines(self) -> int:
        """Number of engines that run, come back or are being added."""
        return sum(isinstance(key, EngineId) for key in self._replicas.expected())

    @property
    def engine_infos(self) -> list[EngineInfo]:
        """Properties of the engines that have joined."""
        return self._membership.engine_infos

    def engine_options(self, engine: EngineId) -> EngineOptions:
        """Return the options of an engine that is spawned now."""
        return self._options.of(engine)

    def engine_config(self, engine: EngineId) -> Config:
        """Return the configuration of an engine that is spawned now."""
        return self._upgrades.config_of(engine)

    @property
    def expert_group_size(self) -> int | None:
        """See `EngineSpec`, for an engine that is spawned now."""
        return None if self._experts is None else self._experts.spawned_group_size

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle an event at the time `now`, in seconds of a monotonic clock. Returns what is to be done, in order."""
        self._turn.begin(now, self._unix_clock())
        match event:
            case StartEngines(ranks):
                for rank in ranks:
                    self._replicas.add(EngineId(self.instance, rank))
            case StartApiServers(indices):
                for index in indices:
                    self._replicas.add(ClientId(self.instance, index))
            case Adopt(client, address):
                self._first_start.adopt(client)
                self._attach(client, address, has_heartbeat=False)
            case Bound(EngineId() | ClientId() as member, address):
                self._on_bound(member, address)
            case EngineStarted(engine):
                if self._set_up(engine):
                    self._on_engine_started(event)
            case ClientStarted(client):
                if self._set_up(client):
                    self._join(client, None)
            case Exited(member, cause):
                if replica := self._replicas.of(member):
                    self._on_ended(replica.on_exit(cause))
                    self._replicas.drop_if_gone(replica)
                    self._continue_stop()
            case Ended(EngineId() | ClientId() as member, cause):
                if replica := self._replicas.of(member):
                    self._on_ended(replica.fail(cause))
            case Silent(member, seconds):
                self._replace(member, f"it was silent for {seconds:.0f} s")
            case NodeDraining():
                self._move(event)
            case Unreachable(sender, receiver):
                self._on_broken(sender, receiver)
            case Disconnected(member):
                self._on_broken(member)
            case ControlCall(request=(Scale() | RestartEngines() | GetScaling()) as request):
                self._scaling.call(event, request)
            case Drained(client, engine):
                self._changes.on_drained(client, engine)
            case CheckpointFetched():
                self._scaling.on_fetched(event)
            case LoadReport():
                self._on_load_report(event)
            case ControlCall():
                self._carry_out(self._control.call(event, now))
            case CommandDone():
                self._carry_out(self._control.on_done(event, now))
            case EngineLoaded() | ExpertsOpened() | ExpertsJoined() | ExpertsBroken():
                if self._experts is not None:
                    self._experts.handle(event)
            case Knows(client, engine):
                self._first_start.on_known(client, engine)
            case Register():
                if not self._is_closed:
                    self._external_clients.register(event)
            case NotConnected(client, reason):
                self._external_clients.on_not_connected(client, reason)
            case Alive(ClientId() as client):
                self._external_clients.renew(client)
            case TimePassed():
                self._pass_time()
            case StopInstance(grace):
                self._begin_stop(grace)
            case KillInstance():
                self._kill_all()
            case Ended() | Alive() | Bound():
                pass  # workers report to their engines, and engines send heartbeats
        self._continue()
        actions = self._turn.end()
        for action in actions:
            if isinstance(action, Spawn) and isinstance(action.member, EngineId):
                self._options.on_spawn(action.member)
        return actions

    def fail(self, error: EagleRayError, now: float) -> list[Action]:
        """Restart nothing from now on, and send the error to the clients. For errors of the supervisor itself."""
        self._turn.begin(now, self._unix_clock())
        self._fail_instance(error)
        return self._turn.end()

    def _continue(self) -> None:
        """Do what the event leads to, as far as it can be done now."""
        while True:
            if self._to_replace:  # not with the other effects, because each exit is an event of `Control` again
                self._replace(*self._to_replace.pop(0))
            elif (step := self._scaling.next_step()) is not None:
                self._take(step)
            elif self._experts is None or not self._experts.review():
                break
        self._upgrades.keep_weights()

    # Replicas

    def _replace(self, member: MemberId, reason: str) -> None:
        if replica := self._replicas.of(member):
            self._on_ended(replica.fail(Failure.noticed(reason), kills=True))

    def _on_ended(self, ended: ProcessExit | None) -> None:
        """Publish that an incarnation has ended, and see what that means to the others."""
        if ended is None:
            return
        is_planned = self._replicas.is_leaving(ended.member)
        left = Left(ended.member, str(ended.cause), returns=ended.is_replaced, is_planned=is_planned)
        is_held, next_step = False, ended.next_step
        if isinstance(ended.member, EngineId):
            self._infos.pop(ended.member, None)
            failure = _failure_of_added(ended)
            is_held = self._changes.on_ended(ended.member, failure)
            next_step = "the operation that added it fails" if is_held and failure is not None else next_step
        self._leave(left, is_known=not is_held)
        is_needed = False
        if self._experts is not None and isinstance(ended.member, EngineId):
            is_needed = self._experts.needs(ended.member)
            self._experts.on_ended(ended.member, returns=is_needed)
        if ended.decision is None:
            return
        logger.warning("%s is gone: %s; %s", ended.member.label, ended.cause, next_step)
        if ended.cause.traceback:
            logger.warning("%s", ended.cause.traceback.rstrip())
        if is_held:
            return
        if self._ends_instance(ended, is_needed=is_needed):
            self._fail_instance(ended.as_exception())
            return
        self._first_start.check()

    def _ends_instance(self, ended: ProcessExit, *, is_needed: bool) -> bool:
        """Whether the instance cannot serve without the member: the last of its kind, or an engine that shares experts
        with the others."""
        if isinstance(ended.decision, GiveUp):
            known = (key for key in self._replicas.expected() if key not in self._changes.held)
            return is_needed or not any(type(key) is type(ended.member) for key in known)
        return isinstance(ended.decision, EndInstance)

    # Members

    def _leave(self, left: Left, *, is_known: bool = True, flushes: bool = False) -> None:
        """Have the membership and the control calls know that a member has left."""
        if is_known:
            self._membership.leave(left, flushes=flushes)
        else:
            self._membership.withdraw(left.member)
        self._carry_out(self._control.leave(left.member, left.cause, left.returns, self._turn.now))
        if isinstance(left.member, ClientId):
            self._scaling.on_clients_changed()

    def _attach(self, member: MemberId, address: str, *, has_heartbeat: bool) -> None:
        self._control.attach(member, self._turn.now)
        self._membership.attach(member, address, has_heartbeat=has_heartbeat)
        if isinstance(member, ClientId):
            for key in self._changes.undrained:
                self._turn.send(Draining(self._replicas.engine(key)), member)
            self._scaling.on_clients_changed()

    def _on_bound(self, member: MemberId, address: str) -> None:
        replica = self._replicas.of(member)
        if replica is None or replica.expected != member or member in self._membership:
            return
        self._attach(member, address, has_heartbeat=True)
        if self._experts is not None and isinstance(member, EngineId):
            self._experts.on_attached(member)

    def _set_up(self, member: MemberId) -> bool:
        """Record that a member has started. Returns False if it has left, or had started already."""
        if member not in self._membership:  # it has left, or was never attached
            return False
        replica = self._replicas.of(member)
        return replica.set_up() if replica is not None else not self._membership.has_joined(member)

    def _on_engine_started(self, started: EngineStarted) -> None:
        """Have an engine join once it has the state and the weights of the instance."""
        engine = started.engine
        self._infos[engine] = started.info
        self._carry_out(self._upgrades.on_started(engine, self._turn.now))
        self._carry_out(self._control.start(engine, started.update, self._turn.now))
        if engine in self._infos and started.update != (required := self._control.state.update):
            logger.info("%s has started; it serves when it has the weights of update %d", engine.label, required)

    def _join(self, member: MemberId, info: EngineInfo | None) -> None:
        replica = self._replicas.of(member)
        if replica is not None and (seconds_away := replica.end_downtime()) is not None:
            logger.info("%s serves again after %.1f s", member.label, seconds_away)
        elif info is not None:
            logger.info("%s has joined", member.label)
        self._membership.join(member, info)
        self._first_start.check()

    # Connections

    def _on_broken(self, *ends: MemberId) -> None:
        """Handle a broken connection. `ends` is (sender, receiver), or (receiver,) for a connection of the
        supervisor.

        Messages may be lost with it, so one of the ends has to leave. The fleet waits first, because a connection also
        breaks when one of its ends exits, and that exit is reported soon.
        """
        due = self._turn.now + timeouts.DISCONNECT_GRACE_SECONDS
        self._turn.timers.set(BrokenConnectionTimer(ends), due)

    def _remove_one(self, ends: tuple[MemberId, ...]) -> None:
        """Evict an external client, or else replace an engine, whose requests resume on others."""
        if self._is_closed or not all(end in self._membership for end in ends):
            return
        sender = "".join(f"from {end.label} " for end in ends[:-1])
        reason = f"the connection {sender}to {ends[-1].label} broke"
        for end in ends:
            if isinstance(end, ClientId) and end in self._external_clients:
                self._external_clients.evict(end, reason)
                return
        self._replace(next((end for end in ends if isinstance(end, EngineId)), ends[0]), reason)

    # The control calls

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendCommand(member, message) | SendAnswer(member, message):
                    if member in self._membership:
                        self._turn.send(message, member)
                case PublishState(state):
                    self._membership.publish_state(state)
                case JoinEngine(engine):
                    if not self._changes.on_ready(engine):
                        self._join(engine, self._infos.pop(engine))
                case ReplaceEngine(engine, cause):
                    self._to_replace.append((engine, cause))
        if (deadline := self._control.deadline) is not None:
            self._turn.timers.set(ControlTimer(), deadline)
        else:
            self._turn.timers.cancel(ControlTimer())

    # Scaling

    def _scaling_forbidden(self, request: Scale | RestartEngines) -> EagleRayError | None:
        """Return the reason why an operation may not begin now."""
        if self._is_closed or not self.is_serving:
            when = "is stopping" if self._is_closed else "has not started yet"
            return Unavailable(f"the instance {when}, so it cannot be scaled")
        return self._rules.forbidden(request)

    def _on_load_report(self, report: LoadReport) -> None:
        if self._autoscaler is None or self._is_closed or not self.is_serving:
            return
        self._autoscaler.set_max_num_seqs(self._options.settled.config.scheduling.max_num_seqs)
        pause = None if self._control.state.may_step else f"the instance is {self._control.state.name}"
        self._autoscaler.on_report(report, pause=pause if self._scaling.is_idle else "an operation runs")

    def _take(self, step: Step) -> None:
        """Carry out a step of a scaling operation."""
        match step:
            case StartReplica(key):
                self._replicas.add(key)
                self._set_ranks()
            case Admit(keys):
                for key in keys:
                    engine = self._changes.held.pop(key)
                    assert engine is not None
                    self._join(engine, self._infos.pop(engine))
            case Drain(key):
                clients = self._membership.clients
                self._changes.undrained[key] = set(clients)
                self._turn.send(Draining(self._replicas.engine(key)), *clients)
            case Remove(EngineId() as key, cause):
                replica = self._replicas.let_go(key)
                self._set_ranks()
                self._let_leave(replica, cause, returns=False)
            case Remove(key, cause, grace):
                # Its connections cannot move, so requests get at least the time that they get when the server stops.
                shutdown_timeout = self._config.serving.shutdown_timeout
                self._stop_api_server(self._replicas.let_go(key), max(grace, shutdown_timeout))
            case Regroup():
                assert self._experts is not None
                self._experts.regroup(step)
            case RestoreWeights():
                self._carry_out(self._control.restore_weights(self._turn.now))
            case RestartReplica(key, cause):
                self._let_leave(self._replicas[key], cause, returns=True)

    def _let_leave(self, replica: Replica, cause: str, *, returns: bool) -> None:
        """Have an engine leave on purpose: its requests move at once, as after an exit."""
        engine, is_known = self._replicas.engine(replica.key), replica.key not in self._changes.held
        is_member, was_expected = isinstance(replica.state, Starting | Up), replica.expected is not None
        if replica.leave(returns=returns):
            self._turn.send(Stop(0.0), engine)
        left = Left(engine, cause, returns=returns, is_planned=True)
        self._infos.pop(engine, None)
        if is_member:
            logger.info("%s leaves: %s", engine.label, cause)
            self._leave(left, is_known=is_known, flushes=True)
        elif is_known and was_expected:
            self._membership.retire(left)
        if returns and self._experts is not None:
            self._experts.on_ended(engine, returns=True)
        self._replicas.drop_if_gone(replica)

    def _move(self, notice: NodeDraining) -> None:
        """Have an engine leave a node that drains, for one that stays, as soon as that is safe."""
        if self._is_closed or not self.is_serving or self._control.weights_are_changing:
            return
        if self._node_drain.begin(notice.engine):
            when = "" if notice.seconds_left is None else f" and goes in {notice.seconds_left:.0f} s"
            cause = f"its node {notice.node} drains{when}"
            self._let_leave(self._replicas[replica_key(notice.engine)], cause, returns=True)

    def _stop_api_server(self, replica: Replica, grace: float) -> None:
        replica.close()
        if replica.stop(grace):
            self._turn.send(Stop(grace, others_stay=True), replica.member)
        self._replicas.drop_if_gone(replica)

    def _set_ranks(self) -> None:
        """Have control calls and weights count the engines that are to serve, and those that are being added, which
        execute the same commands."""
        self._control.set_ranks(key.rank for key in self._replicas.expected() if isinstance(key, EngineId))

    # Time

    def _pass_time(self) -> None:
        while (timer := self._turn.timers.pop(self._turn.now)) is not None:
            match timer:
                case EngineId() | ClientId() as key, _:
                    self._pass_time_of(self._replicas[key])
                case LeaseTimer(client), due:
                    self._external_clients.pass_time(client, due)
                case BrokenConnectionTimer(ends), _:
                    self._remove_one(ends)
                case ControlTimer(), _:
                    self._carry_out(self._control.pass_time(self._turn.now))
                case ScalingTimer(), _:
                    self._scaling.pass_time()
                case StopTimer(), _:
                    self._external_clients.clear()
        self._continue_stop()

    def _pass_time_of(self, replica: Replica) -> None:
        self._on_ended(replica.pass_time())
        if isinstance(replica.state, Starting):  # a replacement
            self._membership.expect(replica.member)

    # The end of the instance

    def _close(self) -> None:
        self._is_closed = True
        self._scaling.fail(Unavailable("the instance stops"))
        self._replicas.close()

    def _fail_instance(self, error: EagleRayError) -> None:
        """Restart nothing from now on, and send the cause to the clients."""
        if self.failure is None:
            self.failure = error
            self._close()
            self._turn.send(Stop(timeouts.FLUSH_SECONDS, cause=str(error)), *self._membership.clients)
            self._turn.act(FailInstance(error))

    def _kill_all(self) -> None:
        self._close()
        self._replicas.kill()
        self._external_clients.clear()
        self._continue_stop()

    def _begin_stop(self, grace: float) -> None:
        """Stop API servers and external clients, then engines, whose requests have finished by then."""
        self._close()
        self._stop = Stop(grace, cause="" if self.failure is None else str(self.failure))
        self._kinds_to_stop = [EngineId]
        self._turn.send(self._stop, *self._external_clients)
        self._turn.timers.set(StopTimer(), self._turn.now + grace)
        self._replicas.stop(ClientId, self._stop)
        self._continue_stop()

    def _continue_stop(self) -> None:
        """Stop the next kind of members when nothing of the one before is left."""
        while self._stop is not None and not self._external_clients and self._replicas.have_stopped(ClientId):
            if self._kinds_to_stop:
                self._replicas.stop(self._kinds_to_stop.pop(), Stop(0.0, cause=self._stop.cause))
            elif self._replicas.have_stopped(EngineId):
                self._stop = None
                self._turn.act(Stopped())
            else:
                return


def _failure_of_added(ended: ProcessExit) -> EagleRayError | None:
    """Return why an engine that a scaling operation has added is not started again; None if it is. Another start does
    not help one for which the cluster has no room."""
    if ended.cause.kind in (ClusterError.__name__, ClusterLost.__name__):
        return ClusterError(ended.cause.message)
    return None if ended.is_replaced else ended.as_exception()
