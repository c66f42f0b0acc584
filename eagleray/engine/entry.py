"""Entry of an engine: bind, wait for `Attach`, start, run the loop.

A process takes these steps in `run`. A Ray actor takes them itself: `Engine.bind`, return the address to the caller,
`Engine.run`.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path

import msgspec

from eagleray.config.environment import limit_openmp_spinning, see_devices
from eagleray.config.resolve import executor_name
from eagleray.config.sections import Config
from eagleray.engine.expert_group_member import ExpertGroupMember
from eagleray.engine.loop import EngineLoop
from eagleray.engine.mailbox import EngineInbox, EngineOutbox
from eagleray.engine.startup import StartedEngine, start_engine
from eagleray.engine.timeouts import (
    ATTACH_TIMEOUT_SECONDS,
    FAILURE_REPORT_SECONDS,
    LEAVE_MARGIN_SECONDS,
    RESTART_MARGIN_SECONDS,
)
from eagleray.engine.watchdog import Watchdog
from eagleray.errors import DeadlineExceeded
from eagleray.executor.choose import is_in_placement_group, open_executor
from eagleray.identity import SUPERVISOR
from eagleray.log import get_logger
from eagleray.messages.codec import Codec
from eagleray.messages.failure import Ended, Failure
from eagleray.messages.lifecycle import Attach, EngineLoaded, EngineSpec, EngineStarted, MemberToSupervisor
from eagleray.messages.outputs import EngineToClient
from eagleray.messages.waves import EngineToEngine
from eagleray.messages.wires import ENGINE_INBOX, ENGINE_OUTBOX
from eagleray.process.fork_server import ForkServer
from eagleray.process.gc_freeze import freeze_gc
from eagleray.process.parent import Parent
from eagleray.transport.heartbeat import HeartbeatSender
from eagleray.transport.inbox import Inbox, Outbox
from eagleray.transport.runtime_dir import make_runtime_dir, remove_runtime_dir

logger = get_logger(__name__)

ReportError = Callable[[Exception], None]
"""Reports the exception that an engine exits with; called from any thread."""

LOCAL_EXECUTORS = ("in-process", "processes")
"""Executors whose workers use the devices that Ray gave to the engine's own actor."""


def run(payload: bytes, parent: Parent) -> None:
    """Run the engine that `payload`, an encoded `EngineSpec`, describes."""
    engine = Engine.bind(msgspec.msgpack.decode(payload, type=EngineSpec))
    parent.report_bound(engine.address)
    engine.run(parent.report_failure, has_pipe=True, fork_server=parent.fork_server)


class Engine:
    """An engine with an address. `run` attaches and starts it, and closes it in the end."""

    def __init__(
        self, spec: EngineSpec, *, runtime_dir: Path, inbox: EngineInbox, outbox: EngineOutbox, exit_stack: ExitStack
    ) -> None:
        self._spec = spec
        self._runtime_dir = runtime_dir
        self._inbox = inbox
        self._outbox = outbox
        self._exit_stack = exit_stack

    @classmethod
    def bind(cls, spec: EngineSpec) -> Engine:
        """Bind the inbox. Raises `ConfigError` if `spec.host` is not an address of this host."""
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
            return cls(spec, runtime_dir=runtime_dir, inbox=inbox, outbox=outbox, exit_stack=stack.pop_all())

    @property
    def address(self) -> str:
        """Address of the engine's inbox."""
        return self._inbox.address

    def run(self, report_error: ReportError, *, has_pipe: bool = False, fork_server: ForkServer | None = None) -> None:
        """Wait for `Attach`, start, serve requests until `Stop` arrives, and close everything.

        A failure is passed to `report_error` at once and raised after the clean-up, which may take a while. If
        `report_error` does not reach the supervisor through a pipe (`has_pipe`), the failure is also sent to it.
        `fork_server` forks workers that are processes, and is closed once they are started.
        """
        with self._exit_stack:
            try:
                attach = self._wait_for_attach()
                if not has_pipe:
                    report_error = self._report_over_new_socket(report_error, attach.supervisor)
                self._serve(attach, report_error, fork_server)
            except Exception as error:
                report_error(error)
                raise

    def _serve(self, attach: Attach, report_error: ReportError, fork_server: ForkServer | None) -> None:
        spec, exit_stack = self._spec, self._exit_stack
        deadline = time.monotonic() + spec.config.execution.startup_timeout
        in_placement_group = is_in_placement_group(spec.config, spec.ray)
        self._outbox.connect(SUPERVISOR, attach.supervisor)
        if (
            spec.ray is not None
            and executor_name(spec.config, in_placement_group=in_placement_group) in LOCAL_EXECUTORS
        ):
            see_devices(spec.ray.devices)
        _load_libraries(spec.config, in_placement_group=in_placement_group)
        if attach.heartbeat:
            exit_stack.callback(HeartbeatSender.start(attach.heartbeat, on_silent=self._exit_disconnected).close)
        with nullcontext() if fork_server is None else closing(fork_server):
            executor = open_executor(
                spec.engine,
                spec.config,
                runtime_dir=self._runtime_dir,
                ray=spec.ray,
                on_lost=report_error,
                fork_server=fork_server,
            )
        exit_stack.callback(executor.close)
        started = start_engine(
            spec.config,
            executor,
            deadline=deadline,
            in_placement_group=in_placement_group,
            expert_group_size=spec.expert_group_size,
        )
        watchdog = Watchdog(lambda: started.core.awaited, on_hang=lambda error: self._exit_hung(error, report_error))
        exit_stack.callback(watchdog.close)
        started_message = EngineStarted(spec.engine, started.info, update=spec.update)
        group_member = self._expert_group_member(started, started_message)
        loop = EngineLoop(
            spec.engine,
            started.core,
            self._inbox,
            self._outbox,
            stepper=group_member,
            has_experts=started.info.has_experts,
            host=spec.host,
            update=spec.update,
        )
        loop.adopt(attach.state, timeout=max(0.0, deadline - time.monotonic()))
        for member in attach.members:
            loop.join(member)
        freeze_gc()
        self._outbox.send(SUPERVISOR, started_message if group_member is None else EngineLoaded(spec.engine))
        loop.run()

    def _expert_group_member(self, started: StartedEngine, started_message: EngineStarted) -> ExpertGroupMember | None:
        """Make the stepper of an engine in an expert group, which reports its start when the group is formed."""
        if started.core.waves is None:
            return None
        config = self._spec.config
        start_seconds = config.execution.startup_timeout
        # Workers of an engine that exited wait for its heartbeat at most this long before they exit.
        leave_seconds = config.execution.heartbeat_timeout + LEAVE_MARGIN_SECONDS
        return ExpertGroupMember(
            started_message,
            started.core,
            started.core.waves,
            self._outbox,
            leave_seconds=leave_seconds,
            join_seconds=start_seconds,
            missing_seconds=start_seconds + config.ray.ray_placement_timeout + RESTART_MARGIN_SECONDS,
        )

    def _wait_for_attach(self) -> Attach:
        message = self._inbox.receive(ATTACH_TIMEOUT_SECONDS)
        if message is None:
            raise DeadlineExceeded(
                f"no Attach within {ATTACH_TIMEOUT_SECONDS:.0f} s after {self._spec.engine.label} was bound"
            )
        assert isinstance(message, Attach), f"{type(message).__name__} arrived before Attach"
        return message

    def _report_over_new_socket(self, report_error: ReportError, supervisor: str) -> ReportError:
        """Also send `Ended`, over a new socket: this runs on any thread and zmq sockets are not thread-safe."""

        def report_both(error: Exception) -> None:
            report_error(error)
            outbox = _open_outbox()
            outbox.connect(SUPERVISOR, supervisor)
            outbox.send(SUPERVISOR, Ended(self._spec.engine, Failure.of(error)))
            outbox.close()

        return report_both

    def _exit_disconnected(self, seconds: float) -> None:
        """Exit, because the supervisor has replaced a silent engine by now: two incarnations must never both run."""
        logger.error("%s: no heartbeat from the supervisor for %.0f s: exiting", self._spec.engine.label, seconds)
        self._exit_now()

    def _exit_hung(self, error: DeadlineExceeded, report_error: ReportError) -> None:
        """Report a hang and exit without closing anything, because the main thread hangs."""
        logger.error("%s: %s: exiting", self._spec.engine.label, error)
        threading.Thread(target=report_error, args=(error,), name="failure-report", daemon=True).start()
        time.sleep(FAILURE_REPORT_SECONDS)  # zmq sends in the background
        self._exit_now()

    def _exit_now(self) -> None:
        if not self._spec.runtime_dir:
            remove_runtime_dir(self._runtime_dir)
        os._exit(1)


def _open_outbox() -> EngineOutbox:
    return Outbox(Codec[EngineToClient | MemberToSupervisor | EngineToEngine](ENGINE_OUTBOX).encode)


def _load_libraries(config: Config, *, in_placement_group: bool) -> None:
    """Import torch before the first heartbeat if workers run in this process: no thread runs during the import, so with
    a slow disk the process would be taken for a hung one."""
    if executor_name(config, in_placement_group=in_placement_group) == "in-process":
        importlib.import_module("eagleray.executor.in_process")
