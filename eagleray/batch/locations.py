"""Locations of the files of a batch: paths of this host, and URLs that fsspec reads and writes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from eagleray.errors import ConfigError

JOURNALS = Path("~/.cache/eagleray/batches")
"""Directory of outputs whose batches have not ended."""


@contextlib.contextmanager
def opened_input(location: str) -> Iterator[IO[bytes]]:
    """Open the requests. Raises `ConfigError`."""
    if "://" in location:
        with _explaining("--input-file", location):
            file = _fsspec(location).open(location, "rb").open()
    else:
        try:
            file = Path(location).expanduser().open("rb")
        except OSError as error:
            raise ConfigError(f"--input-file {location!r}: {error.strerror}") from None
    with file:
        yield file


@contextlib.contextmanager
def local_output(location: str) -> Iterator[Path]:
    """Yield the path of a file to append to. If the output is at a URL, it is copied there when the block ends, also by
    an error, because object stores cannot append. The next run of the batch begins with that copy, or with the local
    file if this process is killed before. Raises `ConfigError`."""
    if "://" not in location:
        yield Path(location).expanduser()
        return
    with _explaining("--output-file", location):
        system, remote = _fsspec(location).core.url_to_fs(location)
    journal = JOURNALS.expanduser() / f"{hashlib.sha256(location.encode()).hexdigest()[:16]}.jsonl"
    journal.parent.mkdir(parents=True, exist_ok=True)
    with _explaining("--output-file", location):
        if not journal.exists() and system.exists(remote):
            system.get_file(remote, str(journal))
    try:
        yield journal
    finally:
        with _explaining(
            "--output-file", location, kept=f"; the answers are in {journal}, and the next run sends them"
        ):
            system.put_file(str(journal), remote)
        journal.unlink()


def _fsspec(location: str) -> Any:
    try:
        import fsspec
    except ImportError:
        raise ConfigError(f"{location!r}: URLs need fsspec: install it with `pip install 'eagleray[fsspec]'`") from None
    return fsspec


@contextlib.contextmanager
def _explaining(option: str, location: str, *, kept: str = "") -> Iterator[None]:
    """Raise a `ConfigError` in place of any error, because every file system raises errors of its own."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{option} {location!r}: {type(error).__name__}: {str(error)[:300]}{kept}") from None
