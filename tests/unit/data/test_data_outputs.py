"""Columns that the stages add to a block."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from ray.data import DataContext

from eagleray.data.outputs import append_outputs
from eagleray.errors import ConfigError, InvalidRequest, PromptTooLong, RequestFailed
from eagleray.messages.membership import RoutingInfo

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data")
ROUTING = RoutingInfo(num_layers=2, num_experts=300, top_k=4)
TABLE = pa.table({"id": [1, 2]})


def append(rows, names, table=TABLE, *, prefix="", has_errors=True, routing=None):
    return append_outputs(table, rows, names, prefix=prefix, has_errors=has_errors, routing=routing)


def test_append_outputs_failed_row_has_nulls_and_its_error() -> None:
    table = append([{"generated_text": "a"}, PromptTooLong("too long")], ["generated_text"])
    assert table.to_pylist() == [
        {"id": 1, "generated_text": "a", "error": None},
        {"id": 2, "generated_text": None, "error": {"code": "context_length_exceeded", "message": "too long"}},
    ]


@pytest.mark.parametrize(
    ("error", "code"), [(InvalidRequest("wrong"), "invalid_request_error"), (RequestFailed("broke"), "request_failed")]
)
def test_append_outputs_error_has_the_code_of_the_server(error: Exception, code: str) -> None:
    table = append([error, {"score": 0.5}], ["score"])
    assert table["error"][0].as_py() == {"code": code, "message": str(error)}


def test_append_outputs_types_do_not_depend_on_the_rows() -> None:
    names = ["generated_text", "generated_token_ids", "logprobs", "tool_calls", "routed_experts"]
    experts = np.ones((3, 2, 4), np.uint16)
    whole = dict(zip(names, ["a", [1], [[{"token_id": 1}]], [{"id": "1"}], experts], strict=True))
    failed = InvalidRequest("wrong")
    schemas = [append(rows, names, routing=ROUTING).schema for rows in ([whole, whole], [failed, whole], [failed] * 2)]
    assert schemas[0] == schemas[1] == schemas[2]


def test_append_outputs_routed_experts_are_tensors() -> None:
    experts = np.arange(24, dtype=np.uint16).reshape(3, 2, 4)
    table = append([{"routed_experts": experts}, InvalidRequest("wrong")], ["routed_experts"], routing=ROUTING)
    first, second = (row["routed_experts"] for row in table.to_pylist())
    np.testing.assert_array_equal(first, experts)
    assert first.dtype == second.dtype == np.uint16
    assert second.shape == (0, 2, 4)


def test_append_outputs_prefix_and_no_errors() -> None:
    table = append([{"score": 1.0}, {"score": 2.0}], ["score"], prefix="judge_", has_errors=False)
    assert table.column_names == ["id", "judge_score"]


def test_append_outputs_existing_column_is_refused() -> None:
    with pytest.raises(ConfigError, match="a column 'score' already: drop it, or set `output_prefix`"):
        append([{"score": 1.0}] * 2, ["score"], TABLE.append_column("score", pa.array([1, 2])))


def test_append_outputs_more_than_a_block_of_ray_data_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataContext.get_current(), "target_max_block_size", 1000)
    with pytest.raises(ConfigError, match=r"2 rows take .* bytes .*: set `rows_per_block` to 1 or less"):
        append([{"generated_text": "a" * 600}] * 2, ["generated_text"])
