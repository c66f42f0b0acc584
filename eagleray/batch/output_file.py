"""The file of a batch's answers. A batch that was killed reads it when it starts again, and continues."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

import msgspec

from eagleray.batch.rows import DUPLICATE, RowError, RowResult
from eagleray.errors import ConfigError

READ_BYTES = 2**20


class _WrittenRow(msgspec.Struct):
    """Fields of a line that identify the row it answers."""

    id: str
    custom_id: str | None
    error: RowError | None


class OutputFile:
    """Appends answers, each line as a whole. Create it with `open`."""

    def __init__(self, descriptor: int, row_ids: set[str], custom_ids: set[str]) -> None:
        self._descriptor = descriptor
        self.row_ids = row_ids
        """Ids of the rows that have an answer."""
        self.custom_ids = custom_ids
        """The `custom_id`s of these rows, without those of duplicates."""

    @classmethod
    def open(cls, path: Path, *, name: str | None = None) -> OutputFile:
        """Open or create the file. A line that was cut off because its writer was killed is removed.

        `name`: location that errors name, by default the path. Raises `ConfigError` for a file that has other content,
        which is left as it is.
        """
        shown = f"output file {name or str(path)!r}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"{shown}: {error.strerror}: name a file that can be written") from None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(f"{shown} is not a regular file: name one, because a batch reads its earlier answers")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return cls(descriptor, *_read_answered(descriptor, shown))
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(f"{shown}: another batch is writing it: name another file") from None
        except BaseException:
            os.close(descriptor)
            raise

    def append(self, result: RowResult) -> None:
        """Write a line. Raises `ConfigError` if there is no room: what was written before stays whole."""
        line = msgspec.json.encode(result) + b"\n"
        end = os.lseek(self._descriptor, 0, os.SEEK_END)
        written = 0
        try:
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
        except OSError as error:
            os.ftruncate(self._descriptor, end)
            raise ConfigError(f"the output cannot be written: {error.strerror}: make room, and start again") from None

    def close(self) -> None:
        os.close(self._descriptor)


def _read_answered(descriptor: int, shown: str) -> tuple[set[str], set[str]]:
    """Return the ids of the rows that the file answers, and the rows' own ids. Cuts off a last line without its end."""
    if not _may_be_output(descriptor):
        raise ConfigError(f"{shown}: it is not a batch's output: name another file")
    row_ids: set[str] = set()
    custom_ids: set[str] = set()
    decoder = msgspec.json.Decoder(_WrittenRow)
    end = 0
    with open(descriptor, "rb", buffering=READ_BYTES, closefd=False) as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                row = decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                raise ConfigError(f"{shown}: line {number} is not a batch's answer: name another file") from None
            row_ids.add(row.id)
            is_duplicate = row.error is not None and row.error.code == DUPLICATE
            if row.custom_id is not None and not is_duplicate:  # the row that has the id may not be answered yet
                custom_ids.add(row.custom_id)
            end += len(line)
        else:
            return row_ids, custom_ids
    os.ftruncate(descriptor, end)
    return row_ids, custom_ids


def _may_be_output(descriptor: int) -> bool:
    """Whether the file begins like a line that this module writes, which may be cut off. Asked before lines are read,
    because those of other files may not fit into memory."""
    beginning = b'{"id":"batch_req_'
    return beginning.startswith(os.pread(descriptor, len(beginning), 0))
