"""Values of a row's columns as prompts, parameters and adapters. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import numpy as np

from eagleray.errors import InvalidRequest
from eagleray.generation_calls import as_params
from eagleray.messages.grammars import PARAM
from eagleray.messages.sampling import SamplingParams

Row = Mapping[str, Any]
"""Values of a row by the names of its columns, as `pyarrow.Table.to_pylist` returns them."""


def prompt_of(row: Row, column: str) -> str | list[int]:
    """Return the text or the token ids of a row. Raises `InvalidRequest` for another type."""
    value = row[column]
    if isinstance(value, str):
        return value
    if isinstance(value, np.ndarray):  # a tensor column
        value = value.tolist()
    if isinstance(value, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in value):
        return value
    raise InvalidRequest(
        f"column {column!r} has {_kind(value)} where a prompt is expected: convert it to a text or a list of token ids "
        "before the stage",
        param=column,
    )


def text_of(row: Row, column: str) -> str:
    """Return the text of a row. Raises `InvalidRequest` for another type."""
    value = row[column]
    if not isinstance(value, str):
        raise InvalidRequest(
            f"column {column!r} has {_kind(value)} where a text is expected: convert it to a text before the stage",
            param=column,
        )
    return value


def messages_of(row: Row, column: str) -> list[dict[str, Any]]:
    """Return the conversation of a row. Raises `InvalidRequest` for another type.

    Fields without a value are left out: Arrow gives every message the fields of all.
    """
    value = row[column]
    if not (isinstance(value, list) and value and all(isinstance(message, Mapping) for message in value)):
        raise InvalidRequest(
            f"column {column!r} has {_kind(value)} where a conversation is expected: convert it to a list of messages, "
            'each {"role", "content"}, before the stage',
            param=column,
        )
    return [_without_nulls(message) for message in value]


def params_of(row: Row, defaults: Mapping[str, Any], *, column: str | None, seed: str | None) -> SamplingParams:
    """Return the sampling parameters of a row: `defaults`, changed by the fields in `column` and the seed in `seed`.

    Raises `InvalidRequest`.
    """
    given = {**defaults}
    if column is not None and (own := row[column]) is not None:
        if not isinstance(own, Mapping):
            raise InvalidRequest(
                f"column {column!r} has {_kind(own)} where sampling parameters are expected: convert it to a "
                'dictionary such as {"max_tokens": 10} before the stage',
                param=column,
            )
        given |= _without_nulls(own)
        _check_schema_is_text(given.get(PARAM), column)
    if seed is not None and row[seed] is not None:
        given["seed"] = row[seed]
    if isinstance(biases := given.get("logit_bias"), Mapping):  # names of Arrow's fields are texts
        given["logit_bias"] = {_token_id(token): bias for token, bias in biases.items()}
    return one_completion(as_params(given))


def tools_of(row: Row, column: str) -> list[Any] | None:
    """Return the tools of a row, which are the text of a JSON list; None for a null. Raises `InvalidRequest`."""
    value = row[column]
    if value is None:
        return None
    try:
        tools = msgspec.json.decode(text_of(row, column))
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"the tools in column {column!r} are not valid JSON: {error}", param=column) from None
    if not isinstance(tools, list):
        raise InvalidRequest(f"column {column!r} must have JSON lists of tools, but it has {tools!r:.60}", param=column)
    return tools


def one_completion(params: SamplingParams) -> SamplingParams:
    """Return the parameters. Raises `InvalidRequest` if they ask for several completions."""
    if params.n != 1:
        raise InvalidRequest(f"a row has one completion, but `n` is {params.n}: repeat the row instead", param="n")
    return params


def adapter_of(row: Row, column: str | None, known: Collection[str]) -> str | None:
    """Return the name of the row's adapter; None for the model itself. Raises `InvalidRequest` for an unknown name."""
    name = None if column is None else row[column]
    if name is None:
        return None
    if not isinstance(name, str) or name not in known:
        names = ", ".join(known) or "none"
        raise InvalidRequest(
            f"column {column!r} names adapter {name!r}, but the option `lora_modules` names {names}", param=column
        )
    return name


def _check_schema_is_text(constraint: Any, column: str) -> None:
    """Refuse a JSON schema that is a mapping: Arrow gives it the properties of other rows' schemas, in their order, and
    nulls that cannot be told from those of the schema."""
    if isinstance(constraint, Mapping) and isinstance(constraint.get("json"), Mapping):
        raise InvalidRequest(
            f"column {column!r} has a JSON schema as a dictionary, which Arrow changes: convert it to a text by "
            "`json.dumps` before the stage",
            param=column,
        )


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    return value


def _token_id(token: Any) -> int:
    try:
        return int(token)
    except (TypeError, ValueError):
        raise InvalidRequest(f"`logit_bias` has {token!r} where a token id is expected", param="logit_bias") from None


def _kind(value: Any) -> str:
    return "no value" if value is None else f"a value of type {type(value).__name__}"
