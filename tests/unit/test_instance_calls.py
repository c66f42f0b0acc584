"""`LLM` and `AsyncLLM` offer the same calls of an instance."""

from __future__ import annotations

import inspect

import pytest

from eagleray import LLM, AsyncLLM
from eagleray.instance_calls import InstanceCalls

CALLS = [name for name, _ in inspect.getmembers(InstanceCalls, inspect.iscoroutinefunction)]


@pytest.mark.parametrize("name", CALLS)
def test_instance_call_is_a_method_of_both_models(name):
    call = getattr(InstanceCalls, name)
    for model in (LLM, AsyncLLM):
        method = getattr(model, name)
        assert inspect.signature(method) == inspect.signature(call)
        assert method.__doc__ == call.__doc__
    assert inspect.iscoroutinefunction(getattr(AsyncLLM, name))
    assert not inspect.iscoroutinefunction(getattr(LLM, name))
