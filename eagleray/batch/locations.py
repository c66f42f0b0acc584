"""Locations of the files of a batch: paths of this host, and URLs that fsspec reads and writes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from eagleray.errors import ConfigError
from eagleray.hub.file_lock import free_lock
from eagleray.hub.fsspec_errors import fsspec_problem

JOURNALS = Path("~/.cache/eagleray/batches")
"""Directory of outputs whose batches have not ended."""


@contextlib.contextmanager
def opened_input(location: str) -> Iterator[IO[bytes]]:
    """Open the requests. Raises `ConfigError`, as reading does where the file is at a URL."""
    file: IO[bytes]
    if "://" in location:
        with _explaining("--input-file", location):
            import fsspec

            remote = fsspec.open(location, "rb").open()
        # Remote files of fsspec have no `readline` with a limit.
        file = io.BufferedReader(_RemoteInput(remote, location))
    else:
        try:
            file = Path(location).expanduser().open("rb")
        except OSError as error:
            raise ConfigError(f"--input-file {location!r}: {error.strerror}") from None
    with file:
        yield file


class _RemoteInput(io.RawIOBase):
    """The open file of the requests at a URL. An error while it is read names the option too."""

    def __init__(self, file: Any, location: str) -> None:
        self._file, self._location = file, location

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with _explaining("--input-file", self._location):
            return int(self._file.readinto(buffer))

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


@contextlib.contextmanager
def local_output(location: str) -> Iterator[Path]:
    """Yield the path of a file to append to. If the output is at a URL, it is copied there when the block ends, also by
    an error, because object stores cannot append. The next run of the batch begins with that copy, or with the local
    file if this process is killed before. Raises `ConfigError`."""
    if "://" not in location:
        yield Path(location).expanduser()
        return
    journal = JOURNALS.expanduser() / f"{hashlib.sha256(location.encode()).hexdigest()[:16]}.jsonl"
    with contextlib.ExitStack() as stack:
        try:
            journal.parent.mkdir(parents=True, exist_ok=True)
            is_free = stack.enter_context(free_lock(journal.with_suffix(".lock"), is_temporary=True))
        except OSError as error:
            raise ConfigError(
                f"--output-file {location!r}: its answers are collected in {str(journal.parent)!r} until the batch "
                f"ends, and nothing can be written there: {error.strerror}; make that possible, or name a local file"
            ) from None
        if not is_free:
            raise ConfigError(f"--output-file {location!r}: another batch is writing it: name another file")
        with _explaining("--output-file", location):
            system, remote = _find(location)
            if not journal.exists():
                _fetch(system, remote, journal)
        try:
            yield journal
        finally:
            kept = f"; the answers are in {journal}, and the next run sends them"
            with _explaining("--output-file", location, kept=kept):
                _send(system, journal, remote)
            journal.unlink()


def _find(location: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    from fsspec.core import url_to_fs

    system, remote = url_to_fs(location)
    system.invalidate_cache()
    return system, remote


def _fetch(system: Any, remote: str, journal: Path) -> None:
    """Copy the answers of an earlier run to the journal, as a whole. Without such a file, write an empty one to both
    places, so that a location that cannot be written is an error before the rows are answered."""
    part = journal.with_suffix(".part")
    try:
        if system.exists(remote):
            system.get_file(remote, str(part))
        else:
            part.write_bytes(b"")
            _send(system, part, remote)
        os.replace(part, journal)
    finally:
        part.unlink(missing_ok=True)


def _send(system: Any, file: Path, remote: str) -> None:
    options: dict[str, Any] = {}
    if remote.startswith(("http://", "https://")):  # the form in which stores take files at signed URLs
        options = {"method": "put", "headers": {"Content-Length": str(file.stat().st_size)}}
    system.put_file(str(file), remote, **options)


@contextlib.contextmanager
def _explaining(option: str, location: str, *, kept: str = "") -> Iterator[None]:
    """Raise a `ConfigError` in place of any error."""
    try:
        yield
    except Exception as error:
        raise ConfigError(f"{option} {location!r}: {fsspec_problem(error, location)}{kept}") from None
