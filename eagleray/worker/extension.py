"""The user's worker extension: an object of the user's class in every worker, whose methods the user calls by name.

Owned and driven by the worker. An exception of a method is returned to the user; it is not a failure of the worker.

The class is instantiated once the model is loaded. There are two kinds:

A class whose constructor takes one positional argument gets the worker, which offers

    worker.rank      its number in its engine, from 0
    worker.model     `models.base.Model`: this rank's part of the weights
    worker.device    the torch device that it computes on
    worker.mesh      `parallel.Mesh`: its coordinates among the ranks of the engine

and all its other attributes may change without notice.

Any other class is a mixin, as vLLM's extensions are: the object is of a class that inherits from the user's class and
then from `worker_view.WorkerView`, so that the worker's attributes are its own, under vLLM's names. Its constructor, if
it has one, takes keywords only. Before, the worker initializes torch's default process group over the engine's ranks.

`collective_rpc` finds the public methods of the user's class, then those of `WorkerView`, also without an extension. A
method runs between two steps, so nothing else runs on the worker meanwhile, and the next step sees its changes to the
model. Arguments and results: see `messages.plain`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from eagleray.errors import ConfigError, InvalidRequest
from eagleray.messages.failure import Failure
from eagleray.messages.plain import pack, unpack_arguments
from eagleray.messages.steps import ExtensionReturned
from eagleray.worker.worker_view import WorkerView, view_arguments

if TYPE_CHECKING:
    from eagleray.worker.startup import LoadedWorker

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Extension:
    """Calls the public methods of the user's object, if there is one, and of the worker's view. Made by `load`."""

    def __init__(self, instance: Any | None, view: WorkerView) -> None:
        self._instance = instance
        self._view = view
        self._model = view.model_runner.model

    @classmethod
    def load(cls, path: str | None, worker: LoadedWorker, *, open_default_group: Callable[[], None]) -> Extension:
        """Import the class at `path`, `package.module.Class` or `package.module:Class`, and instantiate it.

        `open_default_group` is called before a mixin is made. Raises `ConfigError` if the class is not usable.
        """
        arguments = view_arguments(worker)
        if path is None:
            return cls(None, WorkerView(**arguments))
        kind = _find_class(path)
        if _takes_worker(kind, path):
            return cls(_make(path, lambda: kind(worker)), WorkerView(**arguments))
        open_default_group()
        mixin = _make(path, lambda: _mix(kind)(**arguments))
        if not isinstance(mixin, WorkerView) or not hasattr(mixin, "model_runner"):
            raise _mistake(path, "its constructor must pass its keywords on: `super().__init__(**kwargs)`")
        return cls(mixin, mixin)

    def call(self, method: str, arguments: bytes) -> ExtensionReturned:
        """Call the method with `arguments` (of `pack_arguments`). Every failure is in the reply; nothing is raised."""
        found = next((one for one in (self._instance, self._view) if method in _methods(type(one))), None)
        if found is None:
            return ExtensionReturned(failure=Failure.of(self._unknown(method)))
        num_loads = self._model.num_loads
        try:
            args, kwargs = unpack_arguments(arguments)
            result = getattr(found, method)(*args, **kwargs)
            value = pack(result, name=f"the result of `{method}`")
        except Exception as error:  # the method is the user's code, and the meaning of its exceptions is the user's too
            return ExtensionReturned(failure=msgspec.structs.replace(Failure.of(error), is_user_error=False))
        return ExtensionReturned(value=value, has_loaded_weights=self._model.num_loads > num_loads)

    def _unknown(self, method: str) -> InvalidRequest:
        built_in = _methods(WorkerView)
        everywhere = f"every worker has {_listed(built_in)}"
        if self._instance is None:
            message = (
                f"the workers have no method `{method}`: {everywhere}; for methods of your own set the option "
                "`worker_extension_cls` to `package.module.Class`"
            )
            return InvalidRequest(message, param="method")
        kind = type(self._instance)
        own = [name for name in _methods(kind) if getattr(kind, name) is not getattr(WorkerView, name, None)]
        known = f"it has {_listed(own)}" if own else "it has none"
        return InvalidRequest(
            f"worker extension `{kind.__module__}:{kind.__qualname__}` has no public method `{method}`: {known}; "
            f"{everywhere}",
            param="method",
        )


def _methods(kind: type) -> list[str]:
    """Return the names of the public methods of a class, sorted."""
    return [name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name, None))]


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _takes_worker(kind: type, path: str) -> bool:
    """Whether the constructor takes one positional argument, the worker; otherwise the class is a mixin."""
    try:
        parameters = inspect.signature(kind).parameters.values()
    except ValueError:  # a constructor in C that does not describe itself
        return False
    positional = [one for one in parameters if one.kind in POSITIONAL]
    required = [one.name for one in positional if one.default is one.empty]
    if len(required) > 1:
        raise _mistake(
            path,
            f"its constructor needs {_listed(required)}: it must take the worker as its only argument, or keywords "
            "only (`**kwargs`), or be left out",
        )
    return len(positional) > 0


def _mix(kind: type) -> type:
    """Return the class of a mixin: the user's class, whose methods win, with the worker's view as its base."""
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind, WorkerView), names)


def _make(path: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:  # the class is the user's code
        raise _mistake(path, f"making it with the worker raised {type(error).__name__}: {error}") from error


def _find_class(path: str) -> type:
    module_name, _, class_name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or not class_name:
        raise _mistake(path, "it must be of the form `package.module.Class` or `package.module:Class`")
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
