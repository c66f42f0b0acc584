"""Files that are mapped into memory, and reads of their tensors in pieces that stay in the caches.

Mapping small pages when they are first touched, and unmapping them, takes twice as long as reading their bytes.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from eagleray.errors import CheckpointError
from eagleray.kernels.cpu.huge_pages import WeightChunk

PIECE_BYTES = 2 << 20
"""Size of a piece that is read at once: it stays in the caches until it is packed."""


class MappedFile(mmap.mmap):
    """A file that is mapped and open for reading. Its tensors keep it alive, and must not be written to."""

    path: Path
    file: int
    """Descriptor of its own."""

    @classmethod
    def of(cls, part: Tensor) -> MappedFile | None:
        """Return the file that a tensor lies in, if it lies in one."""
        return _files.get(part.untyped_storage().data_ptr())

    @classmethod
    def open(cls, path: Path, file: int, size: int) -> Tensor:
        """Return the memory of the first `size` bytes, at least one, of an open file: uint8. The caller may close the
        descriptor `file`."""
        mapped = cls(file, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)  # torch wants it writable
        mapped.path, mapped.file = path, os.dup(file)
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        _files[whole.data_ptr()] = mapped
        return whole

    def read_into(self, out: memoryview, begin: int) -> None:
        """Read the bytes from `begin` on. Raises `CheckpointError` if the file ends before."""
        while len(out) > 0:
            count = os.preadv(self.file, [out], begin)
            if count == 0:
                raise CheckpointError(f"{self.path}: was truncated while it was read")
            begin += count
            out = out[count:]

    def __del__(self) -> None:
        if hasattr(self, "file"):
            os.close(self.file)


_files: WeakValueDictionary[int, MappedFile] = WeakValueDictionary()
"""Files by the address of their storage, which their tensors have in common."""


class RowReader(threading.local):
    """Reads rows of matrices that may lie in mapped files, into memory of each thread that uses it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def rows(self, matrices: Sequence[Tensor], multiple: int) -> Iterator[tuple[range, list[int]]]:
        """Yield, in order, ranges of the rows of contiguous matrices of one shape and dtype, and for each matrix the
        address of these rows, which is valid until the next range is requested. All ranges but the last have a multiple
        of `multiple` rows."""
        num_rows, columns = matrices[0].shape
        row_bytes = columns * matrices[0].itemsize
        files = [MappedFile.of(matrix) for matrix in matrices]
        addresses = [matrix.data_ptr() for matrix in matrices]
        if not any(files) or matrices[0].numel() == 0:
            yield range(num_rows), addresses
            return
        step = min(max(PIECE_BYTES // (row_bytes * multiple), 1) * multiple, num_rows)
        address, memory = self._buffer(len(matrices) * step * row_bytes)
        begins = [matrix.data_ptr() - matrix.untyped_storage().data_ptr() for matrix in matrices]
        for first in range(0, num_rows, step):
            rows, skipped = range(first, min(first + step, num_rows)), first * row_bytes
            there = [matrix + skipped for matrix in addresses]
            for index, file in enumerate(files):
                if file is not None:
                    offset = index * step * row_bytes
                    file.read_into(memory[offset : offset + len(rows) * row_bytes], begins[index] + skipped)
                    there[index] = address + offset
            yield rows, there

    def _buffer(self, num_bytes: int) -> tuple[int, memoryview]:
        if len(self._memory) < num_bytes:
            self._memory = WeightChunk.allocate(num_bytes)
        return self._memory.data_ptr(), memoryview(self._memory.numpy())  # type: ignore[arg-type]
