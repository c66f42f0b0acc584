"""The Ray actor that an engine lives in. It takes the steps of an engine that is a process: bind, then run."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import ExitStack
from operator import attrgetter
from typing import Protocol

import msgspec

from eagleray.cluster.actor_process import ActorProcess
from eagleray.cluster.cleanup import remove_with_process
from eagleray.log import get_logger
from eagleray.messages.lifecycle import EngineSpec
from eagleray.transport.runtime_dir import make_runtime_dir, remove_runtime_dir

logger = get_logger(__name__)


class BoundEngine(Protocol):
    """An engine whose inbox is bound."""

    @property
    def address(self) -> str: ...

    def run(self, tell: Callable[[Exception], None]) -> None:
        """Returns when the engine has been stopped; raises what ended it. `tell` is called with that before what it
        has is closed."""


class EngineActor(ActorProcess):
    """`bind` and `live` are called once each, in this order; both run on the main thread of the process."""

    def __init__(self, label: str, log_level: str) -> None:
        super().__init__(label, log_level)
        self._ends = ExitStack()
        self._engine: BoundEngine | None = None

    def bind(self, target: str, payload: bytes) -> str:
        """Bind the inbox of the engine that `payload`, an encoded `EngineSpec`, describes; its address.

        `target`, `module:function`, is called with the spec and returns the `BoundEngine`. The directory for its
        sockets is one of this host's.
        """
        module, _, function = target.partition(":")
        with ExitStack() as ends:
            directory = make_runtime_dir()
            ends.callback(remove_runtime_dir, directory)
            ends.callback(remove_with_process(directory))
            spec = msgspec.structs.replace(msgspec.msgpack.decode(payload, type=EngineSpec), runtime_dir=str(directory))
            engine: BoundEngine = attrgetter(function)(importlib.import_module(module))(spec)
            self._engine = engine
            self._ends = ends.pop_all()
        return engine.address

    def live(self) -> None:
        """Be that engine. The reference to the result is the sentinel, as that of `ActorProcess.run`."""
        assert self._engine is not None, "`live` before `bind`"
        with self._ends:
            try:
                # It tells the supervisor itself, if that has attached it already; and our result does.
                self._engine.run(lambda error: None)
            except Exception:
                logger.exception("%s ended", self)
                raise
