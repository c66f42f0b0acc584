"""Plain data (`messages.plain`) as JSON, which has neither arrays nor bytes.

An array is `{"data", "shape", "dtype"}`: its bytes in C order as base64, and numpy's name of the dtype, such as "<f4".
In both directions, so an object of exactly these three fields is an array. Bytes become base64, the keys of a dict
texts, and floats that are not finite null; on the way in they have no form.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

from eagleray.errors import InvalidRequest
from eagleray.messages.arrays import Array

ARRAY_FIELDS = {"data", "shape", "dtype"}


def to_json(value: Any) -> Any:
    """`value`, of plain data, for a JSON encoder that knows bytes."""
    match value:
        case list():
            return [to_json(item) for item in value]
        case dict():
            return {_key(key): to_json(item) for key, item in value.items()}
        case np.ndarray():
            return {"data": value.tobytes(), "shape": list(value.shape), "dtype": value.dtype.str}
        case _:
            return value


def from_json(value: Any, param: str) -> Any:
    """Plain data of decoded JSON. Raises `InvalidRequest` for an array that is none; `param` is where `value` was."""
    match value:
        case list():
            return [from_json(item, f"{param}[{index}]") for index, item in enumerate(value)]
        case dict() if value.keys() == ARRAY_FIELDS:
            return _array(value, param)
        case dict():
            return {key: from_json(item, f"{param}.{key}") for key, item in value.items()}
        case _:
            return value


def _key(key: Any) -> str:
    match key:
        case str():
            return key
        case bytes():
            return base64.b64encode(key).decode()
        case _:
            return json.dumps(key)


def _array(fields: dict[str, Any], param: str) -> Array:
    """The array, which owns its bytes."""
    try:
        data = base64.b64decode(fields["data"], validate=True)
        return np.frombuffer(data, np.dtype(fields["dtype"])).reshape(fields["shape"]).copy()
    except (TypeError, ValueError, SyntaxError) as error:  # all that numpy and base64 raise for what makes no sense
        raise InvalidRequest(
            f"`{param}`: an object of `data`, `shape` and `dtype` is an array, but this is none: {error}", param=param
        ) from None
