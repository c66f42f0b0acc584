"""Libraries of Ray that only some packages need, Serve and Data: the check that they are installed."""

from __future__ import annotations

import importlib
import re


def explain_missing_library(library: str, package: str, *, min_ray: tuple[int, int], extra: str) -> str | None:
    """Return a sentence if `library`, a module of Ray, cannot be imported or Ray is older than `min_ray`; else None.

    `package` needs the library, and `extra` of Ray installs it.
    """
    least = ".".join(map(str, min_ray))
    install = f'pip install "ray[{extra}]>={least}", on every node of the cluster'
    try:
        version: str = importlib.import_module("ray").__version__
        match = re.match(r"(\d+)\.(\d+)", version)
        if match is None or (int(match[1]), int(match[2])) < min_ray:
            return f"{package} needs Ray {least} or newer, but Ray {version} is installed: {install}"
        importlib.import_module(library)
    except ImportError as error:
        return f"{package} needs {library}, which cannot be imported here ({error}): {install}"
    return None
