"""An engine from its birth to its end: bind, be attached, start, loop.

A process takes these steps in `run`, a Ray actor by itself: `Engine.bind`, tell the address to whoever gave birth to
it, `Engine.run`.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from eagleray.config.environment import limit_openmp_spinning, see_devices
from eagleray.config.resolve import executor_name, steps_in_flight
from eagleray.config.sections import Config
from eagleray.engine.expert_group_member import ExpertGroupMember
from eagleray.engine.loop import EngineLoop
from eagleray.engine.mailbox import SUPERVISOR, EngineInbox, EngineOutbox
from eagleray.engine.startup import StartedEngine, start_engine
from eagleray.engine.watchdog import Watchdog
from eagleray.errors import DeadlineExceeded
from eagleray.executor.choose import is_in_placement_group, open_executor
from eagleray.log import get_logger
from eagleray.messages.codec import Codec
from eagleray.messages.failure import Failure
from eagleray.messages.lifecycle import Attach, Bound, EngineSpec, EngineStarted, Failing, MemberToSupervisor
from eagleray.messages.outputs import EngineToClient
from eagleray.messages.waves import EngineToEngine
from eagleray.messages.wires import ENGINE_INBOX, ENGINE_OUTBOX
from eagleray.process.gc_freeze import freeze_gc
from eagleray.process.parent import Parent
from eagleray.transport.heartbeat import HeartbeatSender
from eagleray.transport.inbox import Inbox, Outbox
from eagleray.transport.runtime_dir import make_runtime_dir, remove_runtime_dir

logger = get_logger(__name__)

ReportError = Callable[[Exception], None]
"""Takes the exception that an engine ends with; called from any thread."""

HERE = ("in-process", "processes")
"""Executors whose workers use what the program that asked for the engine was given."""

ATTACH_SECONDS = 30.0

LAST_WORDS_SECONDS = 1.0
"""What an engine that ends in the middle of something gets to say why."""

LEAVE_SECONDS = 10.0
"""What workers get to come back from a step that was broken, when those are gone for whom they wait in it."""

NEWS_SECONDS = 60.0
"""Beyond what an engine that is missing may take to start: the longest pause before it is tried again, and more."""


def run(payload: bytes, parent: Parent) -> None:
    """Be the engine that `payload`, an encoded `EngineSpec`, describes."""
    engine = Engine.bind(msgspec.msgpack.decode(payload, type=EngineSpec))
    parent.send(Bound(engine.address))
    engine.run(parent.tell, has_pipe=True)


class Engine:
    """An engine that can be reached, and does nothing yet. It is over when `run` returns or raises."""

    def __init__(
        self, spec: EngineSpec, *, runtime_dir: Path, inbox: EngineInbox, outbox: EngineOutbox, ends: ExitStack
    ) -> None:
        self._spec = spec
        self._runtime_dir = runtime_dir
        self._inbox = inbox
        self._outbox = outbox
        self._ends = ends

    @classmethod
    def bind(cls, spec: EngineSpec) -> Engine:
        """Raises `ConfigError` if `spec.host` is not an address of this host."""
        limit_openmp_spinning()
        with ExitStack() as stack:
            if spec.runtime_dir:
                runtime_dir = Path(spec.runtime_dir)
            else:
                runtime_dir = make_runtime_dir()
                stack.callback(remove_runtime_dir, runtime_dir)
            inbox: EngineInbox = Inbox(runtime_dir, spec.engine.label, Codec(ENGINE_INBOX).decode, host=spec.host)
            stack.callback(inbox.close)
            outbox = _open_outbox()
            stack.callback(outbox.close)
            return cls(spec, runtime_dir=runtime_dir, inbox=inbox, outbox=outbox, ends=stack.pop_all())

    @property
    def address(self) -> str:
        """Of its inbox."""
        return self._inbox.address

    def run(self, tell: ReportError, *, has_pipe: bool = False) -> None:
        """Be attached, start, and take requests until `Stop` arrives; close everything in the end.

        What goes wrong is told to `tell` at once and raised after the clean-up, which may take a while. Unless
        `has_pipe`, by which the supervisor hears what `tell` is told, it is told by the wire as well.
        """
        with self._ends:
            try:
                attach = self._wait_for_attach()
                if not has_pipe:
                    tell = self._report_over_new_socket(tell, attach.supervisor)
                self._live(attach, tell)
            except Exception as error:
                tell(error)
                raise

    def _live(self, attach: Attach, tell: ReportError) -> None:
        spec, ends = self._spec, self._ends
        deadline = time.monotonic() + spec.config.execution.startup_timeout
        in_placement_group = is_in_placement_group(spec.config, spec.ray)
        self._outbox.connect(SUPERVISOR, attach.supervisor)
        if spec.ray is not None and executor_name(spec.config, in_placement_group=in_placement_group) in HERE:
            see_devices(spec.ray.devices)
        _load_libraries(spec.config, in_placement_group=in_placement_group)
        if attach.pulse:
            ends.callback(HeartbeatSender.start(attach.pulse, on_silent=self._exit_disconnected).close)
        executor = open_executor(spec.engine, spec.config, runtime_dir=self._runtime_dir, ray=spec.ray, on_lost=tell)
        ends.callback(executor.close)
        depth = steps_in_flight(spec.config, in_placement_group=in_placement_group)
        started = start_engine(spec.config, executor, depth=depth, deadline=deadline)
        watchdog = Watchdog(lambda: started.core.awaited, on_hang=lambda error: self._exit_hung(error, tell))
        ends.callback(watchdog.close)
        has_started = EngineStarted(spec.engine, started.info)
        company = self._company(started, has_started)
        loop = EngineLoop(
            spec.engine,
            started.core,
            self._inbox,
            self._outbox,
            pace=company,
            has_experts=started.info.has_experts,
        )
        for member in attach.members:
            loop.join(member)
        freeze_gc()
        if company is None:
            self._outbox.send(SUPERVISOR, has_started)
        loop.run()

    def _company(self, started: StartedEngine, has_started: EngineStarted) -> ExpertGroupMember | None:
        """Of an engine that steps together with others: it has started when they have formed a group."""
        if started.core.waves is None:
            return None
        config = self._spec.config
        start_seconds = config.execution.startup_timeout
        # Workers of an engine that is gone end when they have not heard of it for so long, if not before.
        leave_seconds = config.execution.heartbeat_timeout + LEAVE_SECONDS
        return ExpertGroupMember(
            has_started,
            started.core,
            started.core.waves,
            self._outbox,
            leave_seconds=leave_seconds,
            join_seconds=start_seconds,
            patience=start_seconds + config.ray.ray_placement_timeout + NEWS_SECONDS,
        )

    def _wait_for_attach(self) -> Attach:
        message = self._inbox.receive(ATTACH_SECONDS)
        if message is None:
            raise DeadlineExceeded(f"no Attach within {ATTACH_SECONDS:.0f} s after {self._spec.engine.label} was bound")
        assert isinstance(message, Attach), f"{type(message).__name__} arrived before Attach"
        return message

    def _report_over_new_socket(self, tell: ReportError, supervisor: str) -> ReportError:
        """Also as `Failing`: by an outbox of its own, because it may be told from any thread."""

        def tell_both(error: Exception) -> None:
            tell(error)
            outbox = _open_outbox()
            outbox.connect(SUPERVISOR, supervisor)
            outbox.send(SUPERVISOR, Failing(self._spec.engine, Failure.of(error)))
            outbox.close()

        return tell_both

    def _exit_disconnected(self, seconds: float) -> None:
        """Given up by the supervisor by now: it must not be possible that a successor and this one both go on."""
        logger.error("the supervisor was silent for %.0f s: ending", seconds)
        self._exit_now()

    def _exit_hung(self, error: DeadlineExceeded, tell: ReportError) -> None:
        """The main thread hangs, so nothing can be closed."""
        logger.error("%s: ending", error)
        words = threading.Thread(target=tell, args=(error,), name="last-words", daemon=True)
        words.start()
        time.sleep(LAST_WORDS_SECONDS)  # also for what zmq sends in the background
        self._exit_now()

    def _exit_now(self) -> None:
        if not self._spec.runtime_dir:
            remove_runtime_dir(self._runtime_dir)
        os._exit(1)


def _open_outbox() -> EngineOutbox:
    return Outbox(Codec[EngineToClient | MemberToSupervisor | EngineToEngine](ENGINE_OUTBOX).encode)


def _load_libraries(config: Config, *, in_placement_group: bool) -> None:
    """Before the first heartbeat: while torch is loaded no thread runs, and a slow disk would be taken for a process
    that hangs. With workers elsewhere it is not needed here."""
    if executor_name(config, in_placement_group=in_placement_group) == "in-process":
        importlib.import_module("eagleray.executor.in_process")
