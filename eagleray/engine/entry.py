"""The engine process, from its birth to its end: bind, be attached, start, loop."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import msgspec

from eagleray.config.environment import let_waiting_threads_sleep
from eagleray.config.resolve import steps_in_flight
from eagleray.engine.loop import EngineInbox, EngineLoop, EngineOutbox
from eagleray.engine.startup import start_engine
from eagleray.errors import DeadlineExceeded
from eagleray.executor.choose import open_executor
from eagleray.messages.codec import Codec
from eagleray.messages.lifecycle import Attach, Bound, EngineSpec, EngineStarted, MemberToSupervisor
from eagleray.messages.outputs import EngineToClient
from eagleray.messages.wires import ENGINE_INBOX, ENGINE_OUTBOX
from eagleray.process import Parent
from eagleray.transport import Inbox, Outbox

__all__ = ["run"]

ATTACH_SECONDS = 30.0


def run(payload: bytes, parent: Parent) -> None:
    """Be the engine that `payload`, an encoded `EngineSpec`, describes."""
    spec = msgspec.msgpack.decode(payload, type=EngineSpec)
    let_waiting_threads_sleep()
    with ExitStack() as stack:
        inbox: EngineInbox = Inbox(Path(spec.runtime_dir), spec.engine.label, Codec(ENGINE_INBOX).decode)
        stack.callback(inbox.close)
        outbox: EngineOutbox = Outbox(Codec[EngineToClient | MemberToSupervisor](ENGINE_OUTBOX).encode)
        stack.callback(outbox.close)
        parent.send(Bound(inbox.address))
        attach = _wait_for_attach(inbox)
        outbox.connect("supervisor", attach.supervisor)

        deadline = time.monotonic() + spec.config.execution.startup_timeout
        executor = open_executor(spec.engine, spec.config, runtime_dir=Path(spec.runtime_dir), ray=spec.ray)
        stack.callback(executor.close)
        in_placement_group = spec.ray is not None and spec.ray.placement_group is not None
        depth = steps_in_flight(spec.config, in_placement_group=in_placement_group)
        with parent.telling():
            started = start_engine(spec.config, executor, depth=depth, deadline=deadline)
            loop = EngineLoop(spec.engine, started.core, inbox, outbox)
            for member in attach.members:
                loop.join(member)
            outbox.send("supervisor", EngineStarted(spec.engine, started.info))
            loop.run()


def _wait_for_attach(inbox: EngineInbox) -> Attach:
    message = inbox.receive(ATTACH_SECONDS)
    if message is None:
        raise DeadlineExceeded(f"no Attach within {ATTACH_SECONDS:.0f} s after the engine had bound {inbox.address}")
    assert isinstance(message, Attach), f"{type(message).__name__} arrived before Attach"
    return message
