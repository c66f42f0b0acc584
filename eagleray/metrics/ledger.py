"""Counts of all API servers of an instance: each server writes a file of its own, and any of them adds up all.

A file is memory that its server shares with the system, so counts outlive a server that is killed, and its replacement
continues in the same file. Records have a fixed size and all exist from the beginning: nothing grows later, and a full
disk is an error at the start instead of a crash in the middle of a request.

prometheus_client has such files, too. They do not fit here: an environment variable, read at its first import, decides
the kind of every counter of a process; a file belongs to a process id, so each restart leaves one more to add up; a
server that is killed while its file grows leaves one that cannot be read; and system values of a process (its memory,
its files) are reported only for the process that is scraped.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from eagleray.transport.runtime_dir import no_room

RECORD_BYTES = 256
NUMBER = struct.Struct("d")
NAME_BYTES = RECORD_BYTES - NUMBER.size
"""Bytes of a record's name, a JSON array of strings padded with zeros. A number follows it."""

NUM_RECORDS = 8192
"""Capacity, more than the number of names: buckets are fixed, routes, methods and statuses are few, and engines with
labels of their own are limited (`requests.MAX_ENGINE_LABELS`)."""

PIECE_BYTES = 256 * RECORD_BYTES
"""Size of the pieces in which a file is read."""

NAME = msgspec.json.Decoder(tuple[str, ...])

PROCESS = "process"
"""Name of the record that holds the process id of the file's server; not a count."""

IN_FLIGHT = "requests_in_flight"
"""Name of the record that holds the number of requests that the file's server has not answered, about a second ago; not
a count."""

Labels = tuple[str, ...]
Totals = Mapping[str, Mapping[Labels, float]]
"""Numbers by name and label values; 0 for a combination that was never counted."""


class Tally:
    """One number of this server."""

    __slots__ = ("_numbers", "_place")

    def __init__(self, numbers: memoryview[float], place: int) -> None:
        self._numbers = numbers
        self._place = place

    def add(self, amount: float = 1.0) -> None:
        self._numbers[self._place] += amount

    def set(self, number: float) -> None:
        self._numbers[self._place] = number


class Ledger:
    """File of counters, made by `open`. For one thread; no two processes may be the same `server` at the same time."""

    def __init__(self, directory: Path, memory: mmap.mmap) -> None:
        self._directory = directory
        self._memory = memory
        self._bytes = memoryview(memory)
        self._numbers = self._bytes.cast("d")
        self._places = {name: place for place, (name, _) in enumerate(_records(memory[:]))}

    @classmethod
    def open(cls, directory: Path, server: int) -> Ledger:
        """Open the ledger of the instance whose files are in `directory`, to be written as this server.

        Raises `ConfigError` if there is no room for its file.
        """
        try:
            directory.mkdir(exist_ok=True)
            with (directory / str(server)).open("a+b") as file:
                file.write(bytes(NUM_RECORDS * RECORD_BYTES - file.tell()))
                file.flush()
                ledger = cls(directory, mmap.mmap(file.fileno(), NUM_RECORDS * RECORD_BYTES))
        except OSError as error:
            raise no_room(directory, error) from error
        ledger._numbers[ledger._place(PROCESS)] = os.getpid()
        return ledger

    def tally(self, name: str, *labels: str) -> Tally:
        """Return this server's number of that name, which continues its predecessor's."""
        return Tally(self._numbers, self._place(name, *labels))

    def totals(self) -> Totals:
        """Return the sums of all servers' numbers, including servers that have exited."""
        totals: defaultdict[str, defaultdict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        for records in self.servers().values():
            for (name, *labels), number in records.items():
                totals[name][tuple(labels)] += number
        return totals

    def servers(self) -> dict[int, dict[Labels, float]]:
        """Return the numbers of each server, by name and label values, including servers that have exited."""
        found = {int(path.name): dict(_records(_read(path))) for path in self._directory.iterdir()}
        return dict(sorted(found.items()))

    def processes(self) -> dict[int, int]:
        """Return process ids by server, including servers that have exited and were not replaced yet."""
        return {server: int(records[(PROCESS,)]) for server, records in self.servers().items() if (PROCESS,) in records}

    def close(self) -> None:
        """Close the file. No tally may be increased afterwards."""
        self._numbers.release()
        self._bytes.release()
        self._memory.close()

    def _place(self, *name: str) -> int:
        """Return the index of the record's number."""
        if name not in self._places:
            self._write_name(len(self._places), msgspec.json.encode(name))
            self._places[name] = len(self._places)
        return (self._places[name] + 1) * (RECORD_BYTES // NUMBER.size) - 1

    def _write_name(self, place: int, name: bytes) -> None:
        assert place < NUM_RECORDS, "more names than a ledger has records"
        assert len(name) <= NAME_BYTES, f"too long a name: {name!r}"
        start = place * RECORD_BYTES
        # The first byte comes last: whenever this process is killed, a name is there whole or not at all.
        self._bytes[start + 1 : start + NAME_BYTES] = name[1:].ljust(NAME_BYTES - 1, b"\0")
        self._bytes[start] = name[0]


def _read(path: Path) -> bytes:
    """Return the used part of a file, because most of its records are empty."""
    data = b""
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            data += piece
            if piece[-RECORD_BYTES:].startswith(b"\0"):  # the last record is empty, and so are all behind it
                break
    return data


def _records(data: bytes) -> Iterator[tuple[Labels, float]]:
    """Yield the names and numbers of a file, in order. The file may be short, because its server is just starting."""
    for start in range(0, len(data) - RECORD_BYTES + 1, RECORD_BYTES):
        if data[start] == 0:
            return
        name = data[start : start + NAME_BYTES].rstrip(b"\0")
        yield NAME.decode(name), NUMBER.unpack_from(data, start + NAME_BYTES)[0]
