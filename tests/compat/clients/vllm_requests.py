"""Send requests made of vLLM's classes, and compare the keys of the answers with those classes.

Used by the scripts beside it, which run in vLLM's environment.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from checking import URL, expect
from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": "What is a list?"}]


def get(path: str) -> str:
    """Return the answer to a request without a body. Raises `AssertionError` if it is refused."""
    return _send(urllib.request.Request(URL + path))


def post(path: str, body: BaseModel) -> str:
    """Return the answer to a request, with every field that its class has. Raises `AssertionError` if it is refused."""
    data = body.model_dump_json().encode()
    return _send(urllib.request.Request(URL + path, data, {"content-type": "application/json"}))


def _send(request: urllib.request.Request) -> str:
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{error.code}: {error.read().decode()}") from None


def events(path: str, body: BaseModel) -> list[str]:
    """Return the data of each event of a stream, except the `[DONE]` at the end."""
    lines = [line.removeprefix("data: ") for line in post(path, body).splitlines() if line.startswith("data: ")]
    expect(lines, "no events")
    return [line for line in lines if line != "[DONE]"]


def check_keys(answer: str, read: BaseModel) -> None:
    """Raise `AssertionError` if the answer lacks a key, at any depth, that vLLM's class would write."""
    missing = sorted(missing_keys(json.loads(answer), json.loads(read.model_dump_json())))
    expect(not missing, "keys that vLLM's answer would also have:", missing)


def missing_keys(ours: Any, written: Any, path: str = "") -> set[str]:
    """Return the paths of the keys in `written` that `ours` lacks."""
    if isinstance(ours, list) and isinstance(written, list):
        return {key for one, other in zip(ours, written, strict=True) for key in missing_keys(one, other, f"{path}[]")}
    if not isinstance(ours, dict) or not isinstance(written, dict):
        return set()
    missing = {f"{path}.{key}" for key in written.keys() - ours.keys()}
    return missing.union(*(missing_keys(ours[key], written[key], f"{path}.{key}") for key in written.keys() & ours))
