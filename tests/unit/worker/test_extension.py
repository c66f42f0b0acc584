"""The worker extension: it is found and made, and calls do not harm the worker."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from eagleray.errors import ConfigError, InvalidRequest
from eagleray.messages.plain import pack_arguments, unpack
from eagleray.worker.extension import Extension

MODULE = """
import numpy as np
from eagleray.errors import InvalidRequest

class Base:
    def rank(self):
        return self.worker.rank

class Mine(Base):
    number = 5

    def __init__(self, worker):
        self.worker = worker
        self.helper = print

    def show(self, *args, **kwargs):
        return {"args": args, "kwargs": kwargs}

    def double(self, array):
        array *= 2
        return [array, array.sum()]

    def fail(self):
        raise KeyError("no weights")

    def refuse(self):
        raise InvalidRequest("mine")

    def strange(self):
        return [{1, 2}]

    def _private(self):
        pass

    @staticmethod
    def still():
        return "still"

class Demanding:
    def __init__(self, worker, more):
        pass

not_a_class = 5
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "users_module.py").write_text(MODULE)
    (tmp_path / "users_broken.py").write_text("raise RuntimeError('not today')\n")
    (tmp_path / "users_lacking.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def extension(module):
    return Extension.load("users_module:Mine", SimpleNamespace(rank=3))


def call(extension, method, *args, **kwargs):
    returned = extension.call(method, pack_arguments(args, kwargs))
    assert returned.failure is None
    return unpack(returned.value)


def failure_of(extension, method, *args):
    returned = extension.call(method, pack_arguments(args, {}))
    assert returned.value is None
    return returned.failure


def test_extension_call_passes_plain_arguments_and_results(extension):
    assert call(extension, "show", 1, [2.5], x={"y": b"z"}) == {"args": [1, [2.5]], "kwargs": {"x": {"y": b"z"}}}
    assert call(extension, "rank") == 3
    assert call(extension, "still") == "still"
    array, total = call(extension, "double", np.arange(4.0))
    assert (array.tolist(), total) == ([0, 2, 4, 6], 12)


def test_extension_call_method_raises_returns_failure(extension):
    failure = failure_of(extension, "fail")
    assert str(failure) == "KeyError: 'no weights'"
    assert "in fail" in failure.traceback
    assert str(failure_of(extension, "rank", 1)).startswith("TypeError: Base.rank() takes 1 positional argument")
    assert str(failure_of(extension, "refuse")) == "InvalidRequest: mine"  # the method's, not about the call
    assert call(extension, "rank") == 3


def test_extension_call_result_not_plain_returns_failure_with_place(extension):
    failure = failure_of(extension, "strange")
    assert failure.kind == "TypeError"
    assert "the result of `strange`[0]: a value of type builtins.set" in failure.message


@pytest.mark.parametrize("method", ["missing", "_private", "__init__", "__class__", "number", "worker", "helper", ""])
def test_extension_call_not_a_public_method_is_refused(extension, method):
    failure = failure_of(extension, method)
    assert (failure.kind, failure.is_user_error) == (InvalidRequest.__name__, True)
    assert failure.message == (
        f"worker extension `users_module:Mine` has no public method `{method}`: it has `double`, `fail`, `rank`, "
        "`refuse`, `show`, `still`, `strange`"
    )


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("users_module", "it must be of the form `module:Class`"),
        (":Mine", "it must be of the form `module:Class`"),
        ("users_modul:Mine", "no module `users_modul` can be imported; add its directory to PYTHONPATH"),
        ("users_lacking:Mine", "no module `no_such_dependency` can be imported"),
        ("users_broken:Mine", "importing `users_broken` raised RuntimeError: not today"),
        ("users_module:Yours", "module `users_module` has no `Yours`"),
        ("users_module:not_a_class", "module `users_module` has a int, not a class, of name `not_a_class`"),
        ("users_module:Demanding", "making it with the worker raised TypeError: .*'more'"),
    ],
)
def test_extension_load_invalid_option_raises_config_error(module, path, message):
    with pytest.raises(ConfigError, match=f"option `worker_extension_cls` = '{path}': {message}"):
        Extension.load(path, SimpleNamespace(rank=0))
