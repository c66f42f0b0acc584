"""The operations of a weight update, as generators (see `operations`).

An update is opened, receives tensors in any number of calls, and is committed by one assignment of the state, after
every engine that takes part has checked that it can apply the tensors. Any failure before the commit drops the update:
the staged tensors are freed, and the old weights stay. Nothing undoes a commit: an engine that cannot apply it is
replaced, and its successor does not join before it has the weights.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import msgspec

from eagleray.errors import DeadlineExceeded, EnginesMissing, InvalidRequest, WeightsMismatch, WrongState
from eagleray.fleet.control.instance import SteeredInstance, WeightTransfer
from eagleray.fleet.control.operations import Answer, Commands, Condition, Replies, Steps, adopt
from eagleray.fleet.control.weight_sources import WeightDirectory, WeightSources
from eagleray.identity import EngineId, MemberId
from eagleray.messages.control import (
    AbortWeightUpdate,
    CheckWeights,
    CloseWeightTransfer,
    CommandBody,
    FinishWeightUpdate,
    InitWeightTransfer,
    OpenWeightTransfer,
    ReceiveWeights,
    UpdateWeights,
)
from eagleray.messages.plain import packed_list_length, slice_packed_list

MOST_NAMES = 20
"""Limit for the number of missing weights that an answer names."""


@dataclass
class ReceivedWeights:
    """Tensors that the open update has received."""

    num_calls: int = 0
    num_tensors: int = 0
    num_bytes: int = 0
    fingerprint: str = ""
    """Fingerprint of the directory of the tensors; empty if they were pushed."""
    weight_version: str | None = None
    """Name of the weights from the last call that gave one."""


@dataclass
class LastCommit:
    """The last update that was committed."""

    answer: Answer
    was_one_shot: bool


class WeightUpdates:
    """The open update and the last commit of an instance."""

    def __init__(self, instance: SteeredInstance, sources: WeightSources) -> None:
        self._instance = instance
        self._sources = sources
        self.received = ReceivedWeights()
        self.last_commit: LastCommit | None = None
        self.dropped_because: Exception | None = None
        """Error that ended the last update, for further calls of the trainer until it starts another update."""
        self._dropped_at: float | None = None
        """Time at which an update with tensors was dropped, unless the trainer aborted it."""

    @property
    def dropped_in_pause(self) -> str | None:
        """Reason why the last update was dropped, if it had received tensors, the present pause had begun, and no other
        update was opened since."""
        instance = self._instance
        if instance.state.pause is None or self._dropped_at is None or self._dropped_at < instance.since["pause"]:
            return None
        return str(self.dropped_because)

    def may_repeat(self, request: FinishWeightUpdate) -> bool:
        """Whether a finish without an open update repeats the last commit, or names the weights of a one-shot one."""
        if self.last_commit is None:
            return False
        version = self._instance.state.weight_version
        return self.last_commit.was_one_shot or request.weight_version in (None, version)

    def drop(self, cause: Exception) -> None:
        """Close the open update without a commit."""
        if self._instance.state.open_update is not None:
            self.dropped_because = cause
            self._dropped_at = self._instance.now if self.received.num_calls else None
            self._instance.drop_update()

    # The transfer.

    def init(self, request: InitWeightTransfer) -> Steps:
        """Wait for all engines, close an earlier transfer, and prepare the new one."""
        instance = self._instance
        try:
            yield Condition(lambda: not instance.missing_ranks or instance.lacks_engines, instance.describe_missing)
        except DeadlineExceeded as error:
            raise EnginesMissing(str(error)) from None
        if instance.missing_ranks:
            raise EnginesMissing(f"not all engines are there: {instance.describe_missing()}")
        yield from self.shutdown()
        instance.transfer = WeightTransfer(request.init_info, is_collective=True)
        bodies: dict[MemberId, CommandBody] = {
            record.engine: OpenWeightTransfer(
                init_info=request.init_info, first_rank=instance.first_rank(record.engine)
            )
            for record in instance.started
        }
        try:
            replies = yield Commands(bodies, fails_fast=True)
            replies.raise_failure()
            instance.transfer.is_collective = any(it.get("is_collective", True) for it in replies.results.values())
            if instance.transfer.is_collective and replies.exits:
                instance.close_transfer(_exits(replies))
            instance.check_transfer()
        except Exception as error:
            instance.close_transfer(str(error))
            raise
        return {"message": "Weight transfer initialized"}

    def shutdown(self) -> Steps:
        """Close the transfer, if one is open."""
        if self._instance.transfer is not None:
            self._instance.transfer = None
            replies = yield Commands(_to_all(self._instance, CloseWeightTransfer()))
            replies.raise_failure()
        return {"message": "Weight transfer shut down"}

    # The update.

    def start(self) -> Steps:
        """Open an update, unless one without tensors is open already."""
        if self._instance.state.open_update is None:
            yield from self._open()
        return {"message": "Weight update started", "update": self._instance.state.open_update}

    def update(self, request: UpdateWeights) -> Steps:
        """Receive tensors into the open update. With a directory: open an update, receive and commit."""
        if request.weight_dir is None:
            yield from self._receive(request)
            received = self.received
            return {
                "message": "Weights updated",
                "num_tensors": received.num_tensors,
                "num_bytes": received.num_bytes,
            }
        yield from self._open()
        yield from self._receive(request)
        finish = FinishWeightUpdate(weight_version=request.weight_version)
        answer = yield from self._commit(finish, message="Weights updated", is_one_shot=True)
        if answer["num_missing"] == 0 and self.received.fingerprint and request.weight_dir is not None:
            self._sources.add_directory(
                WeightDirectory(answer["update"], request.weight_dir, self.received.fingerprint)
            )
        return {
            "message": answer["message"],
            "num_tensors": self.received.num_tensors,
            "num_bytes": self.received.num_bytes,
            "weight_version": answer["weight_version"],
            "update": answer["update"],
        }

    def finish(self, request: FinishWeightUpdate) -> Steps:
        """Commit the open update. Without an open update, repeat the answer of the last commit, perhaps with a new
        name."""
        if self._instance.state.open_update is not None:
            return (yield from self._commit(request, message="Weight update finished", is_one_shot=False))
        assert self.last_commit is not None
        version = request.weight_version
        if version is not None and version != self._instance.state.weight_version:
            yield from adopt(self._instance, {"weight_version": version})
        answer = self.last_commit.answer | {
            "message": "Weight update finished",
            "weight_version": self._instance.state.weight_version,
        }
        self.last_commit.answer = answer
        return answer

    def abort(self) -> Steps:
        """Drop the open update, if there is one. The answer comes when the staged tensors are freed."""
        instance = self._instance
        if (number := instance.state.open_update) is not None:
            self.drop(WrongState(f"weight update {number} was aborted by abort_weight_update: start another"))
            self._dropped_at = None
            yield Commands(_to_all(instance, AbortWeightUpdate()))
        return {"message": "Weight update aborted", "update": instance.state.update}

    def _open(self) -> Generator[Commands | Condition, Replies, None]:
        instance = self._instance
        if not instance.started:
            raise EnginesMissing(f"no engine can receive weights: {instance.describe_missing()}")
        self.received = ReceivedWeights()
        self.dropped_because = self._dropped_at = None
        for record in instance.engines.values():
            record.takes_part = record.is_started
        number = instance.next_update
        instance.assign(instance.changed(open_update=number, is_in_place=instance.updates_in_place))
        try:
            replies = yield Commands(instance.set_state_bodies())
            replies.raise_failure()
            self._check_participants(replies)
        except Exception as error:
            self.drop(error)
            raise

    def _receive(self, request: UpdateWeights) -> Generator[Commands | Condition, Replies, None]:
        instance, is_pushed = self._instance, request.weight_dir is None
        bodies = self._parts(request)
        try:
            if is_pushed:
                instance.check_transfer()
            replies = yield Commands(bodies, fails_fast=True)
            replies.raise_failure()
            self._check_participants(replies)
        except Exception as error:
            self.drop(error)
            if is_pushed and instance.transfer is not None and instance.transfer.is_collective:
                instance.close_transfer(str(error))  # the trainer may be in a broadcast, and must not wait for ever
            raise
        self.received.num_calls += 1
        self.received.fingerprint = next(
            (it["fingerprint"] for it in replies.results.values() if "fingerprint" in it), ""
        )
        self.received.num_tensors += replies.most("num_tensors")
        self.received.num_bytes += replies.most("num_bytes")
        self.received.weight_version = request.weight_version or self.received.weight_version

    def _parts(self, request: UpdateWeights) -> dict[MemberId, CommandBody]:
        """Return the command for each engine that takes part. An `update_info` that is a list has an entry for each
        worker of the deployment, and each engine gets the entries of its own workers."""
        instance, info = self._instance, request.update_info
        engines = [record.engine for record in instance.participants]
        try:
            length = packed_list_length(info) if request.weight_dir is None else None
        except msgspec.MsgspecError:
            raise InvalidRequest("`update_info` is missing or not encoded", param="update_info") from None
        if length is None:
            return dict.fromkeys(engines, ReceiveWeights(update_info=info, weight_dir=request.weight_dir))
        if length != instance.num_workers:
            raise InvalidRequest(
                f"`update_info` is a list of {length}, but there are {instance.num_workers} workers: send one for each "
                "worker, or one object for all",
                param="update_info",
            )
        parts: dict[MemberId, CommandBody] = {}
        for engine in engines:
            first = instance.first_rank(engine)
            parts[engine] = ReceiveWeights(
                update_info=slice_packed_list(info, first, first + instance.workers_per_engine)
            )
        return parts

    def _commit(
        self, request: FinishWeightUpdate, *, message: str, is_one_shot: bool
    ) -> Generator[Commands | Condition, Replies, Answer]:
        instance = self._instance
        number = instance.state.open_update
        assert number is not None
        try:
            if not self.received.num_calls:
                raise WeightsMismatch(f"weight update {number} has received no weights; the old ones stay")
            missing, num_missing = yield from self._check(request)
            if instance.shares_experts:
                self._check_participants((yield from adopt(instance, {"is_held": True})))
        except Exception as error:
            self.drop(error)
            raise
        answer = {
            "message": message,
            "weight_version": request.weight_version or self.received.weight_version or str(number),
            "update": number,
            "num_tensors": self.received.num_tensors,
            "num_missing": num_missing,
            "missing": missing[:MOST_NAMES],
        }
        self.last_commit = LastCommit(answer, was_one_shot=is_one_shot)
        committed = instance.changed(
            update=number, open_update=None, is_in_place=False, weight_version=answer["weight_version"]
        )
        instance.assign(committed)
        yield from self._apply(number)
        return answer

    def _check(self, request: FinishWeightUpdate) -> Generator[Commands | Condition, Replies, tuple[list[str], int]]:
        """Have every engine check its staged tensors. Returns the names of missing weights, and their number.

        An engine whose weights are older than the instance's needs a complete update, and takes part no longer if it
        lacks a tensor. If engines share experts, this fails the update.
        """
        instance = self._instance
        behind = {record.engine for record in instance.participants if record.update != instance.state.update}
        replies = yield Commands(
            {
                record.engine: CheckWeights(require_complete=request.require_complete or record.engine in behind)
                for record in instance.participants
            }
        )
        if replies.failures.keys() <= behind and replies.results and not instance.shares_experts:
            for record in instance.participants:
                record.takes_part = record.engine not in replies.failures
        else:
            replies.raise_failure()
        self._check_participants(replies)
        names = sorted({name for result in replies.results.values() for name in result.get("missing", ())})
        return names, replies.most("num_missing")

    def _check_participants(self, replies: Replies) -> None:
        """Raise `EnginesMissing` if too few engines take part. Some may have exited after their replies."""
        if self._instance.lacks_participants:
            raise self.engines_missing(_exits(replies) or self._instance.describe_missing())

    def engines_missing(self, cause: str) -> EnginesMissing:
        """Return the error for an open update that too few engines take part in."""
        if self._instance.shares_experts:
            return EnginesMissing(
                f"a weight update needs every engine, because they share experts: {cause}; the old weights stay"
            )
        return EnginesMissing(f"no engine takes part in the weight update: {cause}; the old weights stay")

    def _apply(self, number: int) -> Generator[Commands | Condition, Replies, None]:
        """Have the engines apply a committed update. Engines that share experts are held until all have applied it."""
        instance = self._instance
        engines, bodies = [record.engine for record in instance.participants], instance.set_state_bodies()
        for record in instance.engines.values():
            record.takes_part = False
        try:
            replies = yield Commands(bodies)
            self._replace_unapplied(engines, number, replies)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f"weight update {number} is committed, but not applied everywhere: {error}"
            ) from None
        finally:
            if instance.state.is_held:
                instance.assign(instance.changed(is_held=False))
                instance.post_state()

    def _replace_unapplied(self, engines: list[EngineId], number: int, replies: Replies) -> None:
        """Replace the engines that took part and did not apply the update."""
        instance = self._instance
        for engine in engines:
            if failure := replies.failures.get(engine):
                instance.replace(engine, f"it could not apply weight update {number}: {failure}")
            elif engine in replies.results and (record := instance.engines.get(engine)) and record.update != number:
                instance.replace(engine, f"it did not apply weight update {number}")


def _to_all(instance: SteeredInstance, body: CommandBody) -> dict[MemberId, CommandBody]:
    return {record.engine: body for record in instance.started}


def _exits(replies: Replies) -> str:
    return "; ".join(f"{member.label} ended: {cause}" for member, cause in replies.exits.items())
