"""An actor of a stage, with an event loop in place of engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from eagleray.config.build import build_config
from eagleray.data import stage_actor
from eagleray.data.stage_actor import StageActor
from eagleray.errors import ConfigError, EngineFailed, InvalidRequest

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data")

MAX_IN_FLIGHT = 3


class LoopThread:
    """Event loop in a thread, with an instance that may fail."""

    def __init__(self, config: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.failed: asyncio.Future[None] = self.loop.create_future()
        client = SimpleNamespace(engine_info=None)
        supervisor = SimpleNamespace(failed=self.failed)
        self.instance = SimpleNamespace(client=client, supervisor=supervisor, guard=self.guard)
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    async def guard(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await work

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class Squares:
    """Stage that squares numbers. A row waits until its number is released, and fails if its error is given."""

    outputs = ("score",)

    def __init__(self, *, held: tuple[int, ...] = (), errors: dict[int, Exception] | None = None) -> None:
        self.inputs = {"number_column": "number"}
        self.held = {number: asyncio.Event() for number in held}
        self.errors = errors or {}
        self.running: set[int] = set()
        self.most_running = 0
        self.has_computed = threading.Event()
        """Set when a row has been computed while another one is held."""

    def open(self, instance: Any) -> Any:
        return self.compute

    async def compute(self, row: Any) -> dict[str, Any]:
        number = row["number"]
        self.running.add(number)
        self.most_running = max(self.most_running, len(self.running))
        await asyncio.sleep(0)
        if number in self.held:
            await self.held[number].wait()
        self.running.discard(number)
        if number in self.errors:
            raise self.errors[number]
        if self.running & self.held.keys():
            self.has_computed.set()
        return {"score": float(number**2)}


@pytest.fixture
def make_actor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(stage_actor, "InstanceThread", LoopThread)
    monkeypatch.setattr(stage_actor, "checked_config", lambda config: config)
    made: list[StageActor] = []

    def make(stage: Squares, errors: str = "return") -> StageActor:
        made.append(
            StageActor(build_config(), stage, errors=errors, output_prefix="", max_in_flight=MAX_IN_FLIGHT)  # type: ignore[arg-type]
        )
        return made[-1]

    yield make
    for actor in made:
        actor._thread.close()


def block(*numbers: int) -> pa.Table:
    return pa.table({"number": numbers})


def test_stage_actor_rows_keep_their_order_and_fail_alone(make_actor: Any) -> None:
    stage = Squares(errors={5: InvalidRequest("five is wrong")})
    table = make_actor(stage)(block(9, 5, 1, 7, 2))
    assert table["score"].to_pylist() == [81.0, None, 1.0, 49.0, 4.0]
    messages = [error and error["message"] for error in table["error"].to_pylist()]
    assert messages == [None, "five is wrong", None, None, None]
    assert stage.most_running == MAX_IN_FLIGHT


def test_stage_actor_slow_row_does_not_hold_up_another_block(make_actor: Any) -> None:
    stage = Squares(held=(9,))
    actor = make_actor(stage)
    slow: list[pa.Table] = []
    thread = threading.Thread(target=lambda: slow.append(actor(block(9, 1))), daemon=True)
    thread.start()
    assert stage.has_computed.wait(10), "row 1 is computed while row 9 runs"
    assert actor(block(2, 3, 4, 5))["score"].to_pylist() == [4.0, 9.0, 16.0, 25.0]
    assert not slow
    actor._thread.loop.call_soon_threadsafe(stage.held[9].set)
    thread.join(10)
    assert slow[0]["score"].to_pylist() == [81.0, 1.0]


def test_stage_actor_errors_raise_shows_the_row(make_actor: Any) -> None:
    actor = make_actor(Squares(errors={5: InvalidRequest("five is wrong")}), errors="raise")
    with pytest.raises(InvalidRequest, match=r"row 1 of a block \(number 5\): five is wrong"):
        actor(block(9, 5, 1))
    assert actor(block(2)).column_names == ["number", "score"]


def test_stage_actor_row_that_kills_engines_fails_alone(make_actor: Any) -> None:
    table = make_actor(Squares(errors={5: EngineFailed("engine-0 exited")}))(block(5, 2))
    assert table["error"].to_pylist() == [{"code": "engine_failed", "message": "engine-0 exited"}, None]


def test_stage_actor_failure_of_the_instance_raises(make_actor: Any) -> None:
    actor = make_actor(Squares(errors={5: EngineFailed("engine-0 was given up")}))
    actor._thread.failed.set_exception(EngineFailed("engine-0 was given up"))
    with pytest.raises(EngineFailed, match="given up"):
        actor(block(5, 2))
    actor._thread.failed.exception()


def test_stage_actor_missing_column_is_named(make_actor: Any) -> None:
    with pytest.raises(ConfigError, match=r"no column 'number': set `number_column` to one of .*, which are id"):
        make_actor(Squares())(pa.table({"id": [1]}))
