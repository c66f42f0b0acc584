"""Errors for actors that exit before they have reported where they run."""

from __future__ import annotations

from typing import Any

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from eagleray.cluster import spawn
from eagleray.cluster.bundles import Bundle
from eagleray.cluster.deadline import Deadline
from eagleray.cluster.spawn import ActorHandles
from eagleray.errors import ClusterError, ClusterLost, UserError, WorkerLost
from eagleray.log import LogSettings

LABEL = "engine-0/tp0-pp0"


class _Method:
    def remote(self, variables: dict[str, str], log: LogSettings) -> str:
        return "reference"


class _Handle:
    get_info = _Method()


def actors(monkeypatch: pytest.MonkeyPatch, error: Exception | None, *, has_node: bool = True) -> ActorHandles:
    """Return one actor, whose first answer is `error`; None: it does not answer."""

    def get(reference: str) -> Any:
        assert error is not None
        raise error

    def wait(references: list[str], **options: Any) -> tuple[list[str], list[str]]:
        return ([], references) if error is None else (references, [])

    monkeypatch.setattr(spawn.ray, "get", get)
    monkeypatch.setattr(spawn.ray, "wait", wait)
    monkeypatch.setattr(spawn.placement_groups, "have_nodes", lambda group_id, indices: has_node)
    bundle = Bundle(index=0, node_id="", total={}, free={})
    return ActorHandles([LABEL], [_Handle()], {}, log=LogSettings(), group_id="group", bundles=[bundle])


def died(message: str) -> ActorDiedError:
    return ActorDiedError(ActorDiedErrorContext(error_message=message, actor_id=b"\0" * 16))


@pytest.mark.parametrize(
    "error",
    [
        died("The actor is dead because its node has died. Node Id: 0, NodeIP: 127.0.0.9"),
        ActorUnavailableError("The actor is unavailable: its node does not answer", b"\0" * 16),
    ],
)
def test_get_info_actor_whose_node_died_is_worker_lost(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    with pytest.raises(WorkerLost, match=LABEL) as caught:
        actors(monkeypatch, error).get_info(Deadline(5.0, "startup_timeout"))
    assert not isinstance(caught.value, UserError)


def test_get_info_actor_whose_constructor_fails_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    cause = RayTaskError("__init__", "Traceback\nModuleNotFoundError: No module named 'eagleray'", ImportError("x"))
    with pytest.raises(ClusterError, match=r"did not come to life: .*eagleray must be installed on every node"):
        actors(monkeypatch, ActorDiedError(cause)).get_info(Deadline(5.0, "startup_timeout"))


def test_get_info_placement_group_that_lost_a_node_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterLost, match=f"a node that was to hold {LABEL} is gone"):
        actors(monkeypatch, None, has_node=False).get_info(Deadline(5.0, "startup_timeout"))
