"""The user's worker extension: an object of the user's class in every worker, whose methods the user calls by name.

Owned and driven by the worker. An exception of a method is returned to the user; it is not a failure of the worker.

The class is instantiated with the worker as its only argument, once the model is loaded. The worker offers

    worker.rank      its number in its engine, from 0
    worker.model     `models.base.Model`: this rank's part of the weights
    worker.device    the torch device that it computes on
    worker.mesh      `parallel.Mesh`: its coordinates among the ranks of the engine

and all its other attributes may change without notice. A method runs between two steps, so nothing else runs on the
worker meanwhile, and the next step sees its changes to the model. Arguments and results: see `messages.plain`.
"""

from __future__ import annotations

import importlib
from typing import Any

import msgspec

from eagleray.errors import ConfigError, InvalidRequest
from eagleray.messages.failure import Failure
from eagleray.messages.plain import pack, unpack_arguments
from eagleray.messages.steps import ExtensionReturned


class Extension:
    """Calls the public methods of `instance`'s class. Made by `load`."""

    def __init__(self, instance: Any) -> None:
        self._instance = instance

    @classmethod
    def load(cls, path: str, worker: Any) -> Extension:
        """Import the class at `path`, `module:Class`, and instantiate it. Raises `ConfigError` if this fails."""
        kind = _find_class(path)
        try:
            return cls(kind(worker))
        except Exception as error:  # the class is the user's code
            raise _mistake(path, f"making it with the worker raised {type(error).__name__}: {error}") from error

    def call(self, method: str, arguments: bytes) -> ExtensionReturned:
        """Call the method with `arguments` (of `pack_arguments`). Every failure is in the reply; nothing is raised."""
        if method.startswith("_") or not callable(getattr(type(self._instance), method, None)):
            return ExtensionReturned(failure=Failure.of(self._unknown(method)))
        try:
            args, kwargs = unpack_arguments(arguments)
            result = getattr(self._instance, method)(*args, **kwargs)
            return ExtensionReturned(value=pack(result, name=f"the result of `{method}`"))
        except Exception as error:  # the method is the user's code, and the meaning of its exceptions is the user's too
            return ExtensionReturned(failure=msgspec.structs.replace(Failure.of(error), is_user_error=False))

    def _unknown(self, method: str) -> InvalidRequest:
        kind = type(self._instance)
        names = [name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name, None))]
        known = f"it has {', '.join(f'`{name}`' for name in names)}" if names else "it has none"
        return InvalidRequest(
            f"worker extension `{kind.__module__}:{kind.__qualname__}` has no public method `{method}`: {known}",
            param="method",
        )


def _find_class(path: str) -> type:
    module_name, _, class_name = path.partition(":")
    if not module_name or not class_name:
        raise _mistake(path, "it must be of the form `module:Class`")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise _mistake(
            path, f"no module `{error.name}` can be imported; add its directory to PYTHONPATH, or install it"
        ) from None
    except Exception as error:  # the module is the user's code
        raise _mistake(path, f"importing `{module_name}` raised {type(error).__name__}: {error}") from error
    kind = getattr(module, class_name, None)
    if not isinstance(kind, type):
        what = "has no" if kind is None else f"has a {type(kind).__name__}, not a class, of name"
        raise _mistake(path, f"module `{module_name}` {what} `{class_name}`")
    return kind


def _mistake(path: str, what: str) -> ConfigError:
    return ConfigError(f"option `worker_extension_cls` = {path!r}: {what}")
