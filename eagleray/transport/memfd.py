"""Memory shared by several processes of a host. It has no name, so that nothing can be left behind.

The creator holds a file without a name (memfd); another process opens it through the creator's `/proc` entry. A random
number in its first bytes proves that it is the right file, and not one of a process with the same number in another
container or on another host. The memory lasts as long as any process has it open.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets

from eagleray.errors import ConfigError

NAME = "eagleray"
NONCE_BYTES = 16


def open_descriptor(pid: int, descriptor: int, flags: int) -> int:
    """Reopen the file that process `pid` has open as `descriptor`. Raises `OSError`."""
    return os.open(f"/proc/{pid}/fd/{descriptor}", flags | os.O_NONBLOCK | os.O_CLOEXEC)


class Region:
    """Mapped memory and the views into it, which are created here so that `close` can release them.

    Owns the descriptor. The first `NONCE_BYTES` bytes are the nonce.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            # populated, because page faults would delay a step
            mapped = stack.enter_context(mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
            self._bytes = stack.enter_context(memoryview(mapped))
            self.descriptor = descriptor
            self._stack = stack.pop_all()

    @classmethod
    def create(cls, size: int) -> Region:
        """Create memory of zeros, except for the nonce. Raises `ConfigError` if the system does not have enough."""
        descriptor = os.memfd_create(NAME)
        try:
            # reserved now, because later a lack of memory would raise SIGBUS
            os.posix_fallocate(descriptor, 0, size)
            region = cls(os.dup(descriptor), size)
        except OSError as error:
            raise ConfigError(
                f"the queue between the engine and its workers needs {size} bytes of shared memory, which the system "
                f"refused ({error.strerror}): free memory, raise the limit of the container, or use fewer workers"
            ) from error
        finally:
            os.close(descriptor)
        region._bytes[:NONCE_BYTES] = secrets.token_bytes(NONCE_BYTES)
        return region

    @classmethod
    def attach(cls, *, pid: int, descriptor: int, size: int, nonce: bytes) -> Region:
        """Map the memory that process `pid` has created. Raises `OSError` if it cannot be reached from here."""
        # Checked before it is opened: opening another kind of file might have side effects.
        target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
        if not target.startswith(f"/memfd:{NAME} "):
            raise OSError(f"process {pid} of this host has other memory than was expected")
        ours = open_descriptor(pid, descriptor, os.O_RDWR)
        try:
            actual = os.fstat(ours).st_size
            found = os.pread(ours, NONCE_BYTES, 0)
            if (actual, found) != (size, nonce):
                raise OSError(f"process {pid} of this host has other memory than was expected")
        except OSError:
            os.close(ours)
            raise
        return cls(ours, size)

    @property
    def nonce(self) -> bytes:
        return bytes(self._bytes[:NONCE_BYTES])

    def bytes(self, offset: int, size: int) -> memoryview:
        """Return a view of bytes that is valid until `close`."""
        return self._stack.enter_context(self._bytes[offset : offset + size])

    def words(self, offset: int, size: int) -> memoryview:
        """Return a view of words of eight bytes; `offset` and `size` are in bytes."""
        return self._stack.enter_context(self.bytes(offset, size).cast("Q"))

    def close(self) -> None:
        """Unmap the memory. The views raise `ValueError` afterwards. Idempotent."""
        self._stack.close()
