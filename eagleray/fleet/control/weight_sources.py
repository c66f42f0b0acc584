"""Weights for engines that lack the weights of the instance: successors of engines that exited, and engines whose
weights were dropped, or overwritten by an update in place that failed.

The source is a living engine with these weights, which offers its packed weights to the same ranks of the other engine,
or else the directory that they were read from, if its files are unchanged. Without a source the engine waits for the
next update, which must be complete. Pure, like `Control`, which owns it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from eagleray.fleet import timeouts
from eagleray.fleet.control.instance import EngineRecord, SteeredInstance
from eagleray.identity import EngineId
from eagleray.log import get_logger
from eagleray.messages.control import AbortWeightUpdate, CommandDone, FetchWeights, ServeWeights

logger = get_logger(__name__)


@dataclass(frozen=True)
class WeightDirectory:
    """A directory with all weights of an update."""

    update: int
    path: str
    fingerprint: str


Source = EngineId | WeightDirectory


@dataclass
class WeightFetch:
    """An engine that is getting weights."""

    update: int
    source: Source
    number: int
    """Number of the awaited command: `ServeWeights` to the source, then `FetchWeights` to the engine."""
    is_offered: bool
    """Whether the source has replied, or is a directory."""


@dataclass
class FailedSources:
    """Sources that have failed since all of them were last tried."""

    sources: list[Source] = field(default_factory=list)
    retry_at: float | None = None
    """Time at which all are tried again; None while one is left."""


class WeightSources:
    """`checkpoint`: directory of the weights of update 0; None for weights that no directory has."""

    def __init__(self, instance: SteeredInstance, *, checkpoint: str | None = None) -> None:
        self._instance = instance
        self.directories = [] if checkpoint is None else [WeightDirectory(0, checkpoint, "")]
        """Directories of the checkpoint and of the last update that was read from one."""
        self._fetches: dict[EngineId, WeightFetch] = {}
        self._failed: dict[EngineId, FailedSources] = {}

    @property
    def deadline(self) -> float | None:
        """Time of the next attempt; None if none is due."""
        return min((it.retry_at for it in self._failed.values() if it.retry_at is not None), default=None)

    def add_directory(self, directory: WeightDirectory) -> None:
        """Remember the directory that the last update was read from."""
        self.directories = [*self.directories[:1], directory]

    def review(self) -> None:
        """Have engines that lack weights fetch them from their sources."""
        for record in self._instance.started:
            if not self._lacks_weights(record):
                self._failed.pop(record.engine, None)
            elif record.engine not in self._fetches and not record.unanswered:
                self._begin(record)

    def on_done(self, done: CommandDone) -> None:
        """Handle a reply. Replies to commands of others are ignored."""
        found = ((engine, fetch) for engine, fetch in self._fetches.items() if fetch.number == done.number)
        engine, fetch = next(found, (None, None))
        if engine is None or fetch is None:
            return
        record = self._instance.engines.get(engine)
        if done.failure is not None:
            logger.warning("%s did not get the weights of update %d: %s", engine.label, fetch.update, done.failure)
            self._fail(engine)
        elif fetch.is_offered:
            del self._fetches[engine]
            if record is not None:
                record.update = fetch.update
                logger.info("%s has the weights of update %d now", engine.label, fetch.update)
        elif record is not None and record.takes_part:
            del self._fetches[engine]  # an update was opened meanwhile, whose tensors a copy would drop
        else:
            fetch.is_offered = True
            body = FetchWeights(update=fetch.update, handles=done.result["handles"])
            fetch.number = self._instance.send(engine, body, timeouts.FETCH_WEIGHTS_TIMEOUT_SECONDS)

    def on_exit(self, engine: EngineId) -> None:
        """Handle the exit of an engine. A copy from it is broken off: its connection may stay open if its host is gone.
        The reply says whether the copy was completed before."""
        self._fetches.pop(engine, None)
        self._failed.pop(engine, None)
        for other, fetch in list(self._fetches.items()):
            if fetch.source != engine:
                continue
            if not fetch.is_offered:
                self._fail(other)
            elif record := self._instance.engines.get(other):
                record.takes_part = False  # the command below drops an update that was opened after the copy began
                self._instance.post(AbortWeightUpdate(), [other])

    def _lacks_weights(self, record: EngineRecord) -> bool:
        """Whether an engine has other weights than the instance, and will not get them by the open update."""
        state = self._instance.state
        is_behind = record.update is None or (not record.has_joined and record.update != state.update)
        can_have = "weights" not in state.asleep and not (state.open_update is not None and state.is_in_place)
        return is_behind and can_have and not record.takes_part

    def _begin(self, record: EngineRecord) -> None:
        engine, instance = record.engine, self._instance
        update, failed = instance.state.update, self._failed.setdefault(engine, FailedSources())
        if failed.retry_at is not None:
            if instance.now < failed.retry_at:
                return
            failed.sources, failed.retry_at = [], None
        sources = [source for source in self._sources(engine) if source not in failed.sources]
        if not sources:
            failed.retry_at = instance.now + timeouts.FETCH_RETRY_SECONDS if failed.sources else None
        elif isinstance(source := sources[0], WeightDirectory):
            body = FetchWeights(update=update, weight_dir=source.path, fingerprint=source.fingerprint)
            number = instance.send(engine, body, timeouts.FETCH_WEIGHTS_TIMEOUT_SECONDS)
            self._fetches[engine] = WeightFetch(update, source, number, is_offered=True)
        else:
            number = instance.send(source, ServeWeights(update=update), timeouts.FETCH_WEIGHTS_TIMEOUT_SECONDS)
            self._fetches[engine] = WeightFetch(update, source, number, is_offered=False)

    def _sources(self, engine: EngineId) -> list[Source]:
        """Return the sources of the instance's weights. Engines that share experts have different weights each, so they
        are no sources."""
        instance = self._instance
        update = instance.state.update
        others = [it.engine for it in instance.started if it.update == update and it.engine != engine]
        engines: list[Source] = [] if instance.shares_experts else [*others]
        return [*engines, *(directory for directory in self.directories if directory.update == update)]

    def _fail(self, engine: EngineId) -> None:
        """Record that a source has failed. Another source is tried next."""
        fetch = self._fetches.pop(engine)
        self._failed.setdefault(engine, FailedSources()).sources.append(fetch.source)
        if record := self._instance.engines.get(engine):
            record.update = None  # its weights may be a mixture
