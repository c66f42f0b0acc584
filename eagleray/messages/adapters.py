"""The low-rank adapters of an instance."""

from __future__ import annotations

import msgspec


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that an instance has loaded."""

    name: str
    number: int
    """Number of the load in the instance, from 1 on. An adapter that is replaced gets a new one."""
    path: str
    """Directory that it is read from."""
    digest: str = ""
    """Hash of its files; empty before they were read."""
