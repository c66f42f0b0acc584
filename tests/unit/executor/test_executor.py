from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from eagleray.errors import CheckpointError, DeadlineExceeded, ExpertGroupBroken, WorkerFailed, WorkerLost
from eagleray.executor.executor import Executor
from eagleray.executor.failure_monitor import FailureMonitor
from eagleray.identity import EngineId, WorkerId
from eagleray.messages.failure import Ended, Failure
from eagleray.messages.steps import (
    Call,
    LoadModel,
    MeasureMemory,
    MemoryMeasured,
    Reply,
    StageRoutedExperts,
    StepBroken,
    StepPlan,
    StepResult,
)
from eagleray.messages.workers import Topology


class FakeGroup:
    """Worker group that returns the replies of a test, in its order."""

    def __init__(self, world_size: int = 1, *, pp: int = 1) -> None:
        self.topology = Topology(
            tensor_parallel_size=world_size // pp,
            pipeline_parallel_size=pp,
            nodes=["n"] * world_size,
            addresses=["127.0.0.1"] * world_size,
        )
        self.sent: list[Call] = []
        self.replies: deque[Reply] = deque()
        self.closed = False
        self.lost = ""

    def send(self, call: Call) -> None:
        self.sent.append(call)

    def receive(self, timeout: float) -> Reply | None:
        if self.replies:
            return self.replies.popleft()
        self.check()
        return None

    def check(self) -> None:
        if self.lost:
            raise WorkerLost(self.lost)

    def close(self) -> None:
        self.closed = True


def plan(step: int) -> StepPlan:
    return StepPlan(step=step, freed_rows=[], new_rows=[], new_blocks=[], rows=[0], num_tokens=[1])


def result(step: int, experts: np.ndarray | None = None) -> StepResult:
    return StepResult(step=step, rows=[0], token_ids=[step], routed_experts=experts)


def capturing(step: int) -> StepPlan:
    return StepPlan(step=step, freed_rows=[], new_rows=[], new_blocks=[], rows=[0], num_tokens=[2], capture_rows=[0])


def layers(*numbers: int) -> np.ndarray:
    """Return routed experts [2 tokens, one layer for each number, top_k 3]."""
    rows = [[token, layer, 0] for token in range(2) for layer in numbers]
    return np.array(rows, np.uint8).reshape(2, len(numbers), 3)


def test_call_all_workers_reply_returns_in_order_of_rank():
    group = FakeGroup(world_size=2)
    group.replies += [Reply(1, 1, MemoryMeasured(11)), Reply(1, 0, MemoryMeasured(10))]
    replies = Executor(group).call(MeasureMemory(1), MemoryMeasured, timeout=1)
    assert [reply.available_bytes for reply in replies] == [10, 11]


def test_step_several_in_flight_get_their_own_results():
    group = FakeGroup()
    executor = Executor(group)
    first, second = executor.step(plan(1)), executor.step(plan(2))
    group.replies += [Reply(2, 0, result(2)), Reply(1, 0, result(1))]
    assert first.result() == result(1)
    assert second.result() == result(2)


def test_call_late_reply_is_not_mistaken_for_another():
    group = FakeGroup()
    executor = Executor(group)
    with pytest.raises(DeadlineExceeded, match=r"no MemoryMeasured from rank 0 within 0 s \(call 1\)"):
        executor.call(MeasureMemory(1), MemoryMeasured, timeout=0)
    group.replies += [Reply(1, 0, MemoryMeasured(1)), Reply(2, 0, MemoryMeasured(2))]
    assert executor.call(MeasureMemory(1), MemoryMeasured, timeout=1)[0].available_bytes == 2


def test_gather_until_holds_ends_the_wait():
    group = FakeGroup(world_size=3)
    group.replies += [Reply(1, 1, MemoryMeasured(5))]
    replies = Executor(group).gather(MeasureMemory(1), MemoryMeasured, timeout=5, until=lambda r: r.available_bytes < 9)
    assert replies == {1: MemoryMeasured(5)}


def failure(kind: str, *, is_user_error: bool) -> Ended:
    cause = Failure(kind=kind, message="it broke", traceback="Traceback: here", is_user_error=is_user_error)
    return Ended(WorkerId(EngineId("i", 0), tp=1, pp=0), cause)


def test_call_worker_raised_error_has_name_and_traceback():
    group = FakeGroup(world_size=2)
    executor = Executor(group)
    pending = executor.step(plan(1))
    group.replies.append(Reply(1, 1, failure("ZeroDivisionError", is_user_error=False)))
    with pytest.raises(WorkerFailed, match=r"engine-0/tp1-pp0: ZeroDivisionError: it broke\nTraceback: here"):
        pending.result()


def test_call_peer_failure_is_attributed_to_exited_worker():
    group = FakeGroup(world_size=2)
    executor = Executor(group)
    pending = executor.step(plan(1))
    group.replies.append(Reply(1, 1, failure("RuntimeError", is_user_error=False)))
    group.lost = "engine-0/tp0-pp0 was killed by SIGKILL"
    with pytest.raises(WorkerLost, match=r"tp0-pp0 was killed by SIGKILL \(engine-0/tp1-pp0 noticed it: RuntimeError"):
        pending.result()


def test_call_closed_channel_without_report_is_worker_lost(monkeypatch):
    monkeypatch.setattr("eagleray.executor.executor.PEER_EXIT_SECONDS", 0.01)
    group = FakeGroup(world_size=2)
    executor = Executor(group)
    pending = executor.step(plan(1))
    group.replies.append(Reply(1, 1, failure("ChannelClosed", is_user_error=False)))
    with pytest.raises(WorkerLost, match="engine-0/tp1-pp0: ChannelClosed: it broke"):
        pending.result()


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (Failure.noticed("it was killed by SIGKILL"), WorkerLost),
        (Failure(kind="ChannelClosed", message="x"), WorkerLost),
        (Failure(kind="KeyError", message="x"), WorkerFailed),
        (Failure(kind="CheckpointError", message="x", is_user_error=True), CheckpointError),
    ],
)
def test_failure_monitor_report_kind_is_failed_or_lost(cause, kind):
    losses = FailureMonitor(lambda: None)
    losses.report("engine-0/tp0-pp0", cause)
    with pytest.raises(kind):
        losses.check()


def test_check_unawaited_failure_is_raised():
    group = FakeGroup(world_size=2)
    executor = Executor(group)
    executor.check()
    group.lost = "gone"
    with pytest.raises(WorkerLost, match="gone"):
        executor.check()
    group.lost = ""
    group.replies.append(Reply(0, 1, failure("OSError", is_user_error=False)))
    with pytest.raises(WorkerFailed, match="tp1-pp0: OSError"):
        executor.check()


def test_call_user_error_keeps_its_type():
    group = FakeGroup()
    group.replies.append(Reply(1, 0, failure("CheckpointError", is_user_error=True)))
    with pytest.raises(CheckpointError, match=r"^it broke$"):
        Executor(group).call(LoadModel(), MemoryMeasured, timeout=1)


def test_close_stops_the_workers():
    group = FakeGroup()
    Executor(group).close()
    assert group.closed


def test_step_result_timeout_names_step_and_size():
    pending = Executor(FakeGroup()).step(
        StepPlan(step=7, freed_rows=[], new_rows=[], new_blocks=[], rows=[0, 3], num_tokens=[1, 99]), seconds=0.01
    )
    with pytest.raises(DeadlineExceeded) as raised:
        pending.result()
    expected = "step 7 (100 tokens in 2 rows) has not returned: no StepResult from rank 0 within 0 s (call 1)"
    assert str(raised.value) == expected


def test_merge_step_routed_experts_are_joined_in_order_of_stages():
    group = FakeGroup(world_size=6, pp=3)
    pending = Executor(group).step(capturing(1))
    group.replies += [
        Reply(1, 4, result(1, layers(3, 4))),
        Reply(1, 2, StageRoutedExperts(step=1, routed_experts=layers())),
        Reply(1, 0, StageRoutedExperts(step=1, routed_experts=layers(0, 1, 2))),
    ]
    joined = pending.result().routed_experts
    assert joined is not None and joined.dtype == np.uint8
    assert np.array_equal(joined, layers(0, 1, 2, 3, 4))


def test_merge_step_without_capture_needs_sampler_rank_alone():
    group = FakeGroup(world_size=4, pp=2)
    pending = Executor(group).step(plan(1))
    group.replies.append(Reply(1, 2, result(1)))
    assert pending.result() == result(1)


def test_step_missing_stage_report_names_its_rank():
    group = FakeGroup(world_size=4, pp=2)
    pending = Executor(group).step(capturing(1), seconds=0.01)
    group.replies.append(Reply(1, 2, result(1, layers(0))))
    with pytest.raises(DeadlineExceeded, match="no StepResult from rank 0 within"):
        pending.result()


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_step_broken_reply_of_any_rank_raises_expert_group_broken(rank):
    group = FakeGroup(world_size=4, pp=2)
    executor = Executor(group)
    first, second = executor.step(capturing(1)), executor.step(capturing(2))
    group.replies += [Reply(1, rank, StepBroken(step=1, cause="engine 1 is gone"))]
    with pytest.raises(ExpertGroupBroken, match="step 1: engine 1 is gone"):
        first.result()
    group.replies += [Reply(2, rank, StepBroken(step=2, cause="engine 1 is gone"))]
    with pytest.raises(ExpertGroupBroken, match="step 2"):
        second.result()


def test_drop_steps_late_results_are_dropped():
    group = FakeGroup()
    executor = Executor(group)
    executor.step(plan(1))
    executor.drop_steps()
    group.replies += [Reply(1, 0, result(1)), Reply(2, 0, MemoryMeasured(7))]
    assert executor.call(MeasureMemory(1), MemoryMeasured, timeout=1) == [MemoryMeasured(7)]


def test_begin_replies_are_polled_while_steps_go_on():
    group = FakeGroup(world_size=2)
    executor = Executor(group)
    pending = executor.begin(MeasureMemory(512), MemoryMeasured)
    assert pending.poll() is None
    step = executor.step(plan(7))
    group.replies += [Reply(1, 1, MemoryMeasured(11)), Reply(2, 0, result(7))]
    assert step.result().step == 7
    assert pending.poll() is None
    group.replies.append(Reply(1, 0, MemoryMeasured(10)))
    assert pending.poll() == {0: MemoryMeasured(10), 1: MemoryMeasured(11)}


def test_begin_replies_survive_steps_that_are_dropped():
    group = FakeGroup()
    executor = Executor(group)
    pending = executor.begin(MeasureMemory(512), MemoryMeasured)
    executor.step(plan(1))
    executor.drop_steps()
    group.replies += [Reply(2, 0, result(1)), Reply(1, 0, MemoryMeasured(10))]
    assert pending.poll() == {0: MemoryMeasured(10)}


def test_begin_dropped_call_ignores_its_replies():
    group = FakeGroup()
    executor = Executor(group)
    executor.begin(MeasureMemory(512), MemoryMeasured).drop()
    group.replies += [Reply(1, 0, MemoryMeasured(10)), Reply(2, 0, MemoryMeasured(20))]
    assert executor.call(MeasureMemory(512), MemoryMeasured, timeout=1) == [MemoryMeasured(20)]


def test_begin_worker_exits_poll_raises():
    group = FakeGroup()
    pending = Executor(group).begin(MeasureMemory(512), MemoryMeasured)
    group.lost = "worker engine-0/worker-0: it was killed"
    with pytest.raises(WorkerLost, match="it was killed"):
        pending.poll()
