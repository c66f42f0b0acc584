"""Copies of borrowed memory."""

from __future__ import annotations

import mmap
from typing import NamedTuple

import numpy as np
import pytest
import torch

from eagleray.executor.ray_graph.detach import detach, is_borrowed


@pytest.fixture
def foreign():
    """Yield memory that neither numpy nor Python has allocated, like that of a channel."""
    with mmap.mmap(-1, 4096) as memory:
        yield memory


def over(memory: mmap.mmap) -> np.ndarray:
    return np.frombuffer(memory, dtype=np.float32)


def owned_arrays() -> list[np.ndarray]:
    whole = np.arange(12)
    frozen = np.arange(3)
    frozen.flags.writeable = False
    views = [whole, whole[2:5], whole.reshape(3, 4).T, frozen]
    return [*views, np.frombuffer(b"abcd", np.uint8), np.frombuffer(bytearray(4), np.uint8)]


@pytest.mark.parametrize("index", range(6))
def test_detach_owned_array_is_passed_on(index):
    array = owned_arrays()[index]
    assert not is_borrowed(array)
    assert detach([array])[0] is array


def test_detach_borrowed_array_is_copied_through_every_view(foreign):
    array = over(foreign)
    writeable = np.frombuffer(memoryview(foreign)[8:16], np.uint8)
    for borrowed in (array, array[3:7], array.reshape(2, -1).T, writeable):
        copy = detach(borrowed)
        assert is_borrowed(borrowed) and not is_borrowed(copy)
        assert np.array_equal(copy, borrowed) and not np.shares_memory(copy, borrowed)
    del array, writeable, borrowed


class Named(NamedTuple):
    number: int
    array: np.ndarray


def test_detach_nested_values_are_copied_at_any_depth(foreign):
    value = {"a": [1, (over(foreign), "text")], "b": Named(3, over(foreign)), "c": memoryview(foreign)[:4], "d": None}
    copy = detach(value)
    assert not is_borrowed(copy["a"][1][0]) and not is_borrowed(copy["b"].array) and not is_borrowed(copy["c"])
    assert (copy["a"][0], copy["a"][1][1], copy["b"].number, copy["d"]) == (1, "text", 3, None)
    assert isinstance(copy["b"], Named)
    value["c"].release()


def test_detach_tensor_is_always_copied(foreign):
    tensor = torch.frombuffer(foreign, dtype=torch.float32)
    copy = detach((tensor,))[0]
    assert copy.data_ptr() != tensor.data_ptr() and torch.equal(copy, tensor)
    del tensor
