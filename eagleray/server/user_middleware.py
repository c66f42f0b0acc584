"""ASGI middleware of the user around the application, named by the option `middleware`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp

from eagleray.errors import ConfigError


def with_middleware(app: ASGIApp, names: Sequence[str]) -> ASGIApp:
    """Return the application inside the middleware of these names, of which the last is outermost.

    A class is called with the application. An async function gets a request and a function that calls the next handler.
    Raises `ConfigError` for a name that cannot be used.
    """
    for name in names:
        found = _load(name)
        if isinstance(found, type):
            make: Any = found
            try:
                app = make(app)
            except Exception as error:
                raise ConfigError(f"option `middleware`: {name}(app) failed: {_shown(error)}") from error
        elif inspect.iscoroutinefunction(found):
            app = BaseHTTPMiddleware(app, found)
        else:
            raise ConfigError(
                f"option `middleware`: {name} is neither a class nor an async function, but {type(found).__name__}"
            )
    return app


def _load(name: str) -> Any:
    module_name, _, attribute = name.rpartition(":" if ":" in name else ".")
    if not module_name or not attribute:
        raise ConfigError(f"option `middleware`: expected a name such as package.module.Name, but got {name!r}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module may raise anything
        raise ConfigError(f"option `middleware`: cannot import {module_name!r}: {_shown(error)}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(f"option `middleware`: there is no {attribute!r} in {module.__file__}") from None


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
