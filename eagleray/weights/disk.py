"""Backend `disk`: a directory with safetensors files, which every worker can read.

Files are mapped, and read when their tensors are packed, so each rank reads only the bytes of its part of the model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagleray.errors import CheckpointError, InvalidRequest, NotFound, WeightsMismatch
from eagleray.kernels.cpu.mapped_files import MappedFile
from eagleray.models.checkpoint_files import LENGTH_BYTES, header_bytes, open_file, weight_files
from eagleray.weights.receiver import CheckTensors, NamedTensors, ReceiverPosition
from eagleray.weights.tensors import FILE_BUCKET_BYTES, SentTensor, into_buckets, view_as

STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""Dtypes by their names in the headers of safetensors files."""


def open_receiver(init_info: Mapping[str, Any], position: ReceiverPosition, timeout: float) -> DirectoryReceiver:
    """Make the receiver of a worker, see `receiver.open_receiver`. `init_info` needs no fields."""
    return DirectoryReceiver()


class DirectoryReceiver:
    """See `receiver.WeightReceiver`. The only field of `update_info` is `weight_dir`."""

    def connect(self) -> None:
        """Do nothing: files are opened when tensors are received."""

    def receive(self, update_info: Mapping[str, Any], check: CheckTensors) -> Iterator[NamedTensors]:
        directory = update_info.get("weight_dir")
        if not isinstance(directory, str) or not directory:
            raise InvalidRequest(
                f"backend disk: `weight_dir` must be the path of a directory, but it is {directory!r:.80}",
                param="weight_dir",
            )
        with ExitStack() as stack:
            files = [(path, stack.enter_context(open_file(path))) for path in _weight_files(Path(directory))]
            headers = [list(_read_header(path, file)) for path, file in files]
            check([tensor for tensors in headers for tensor in tensors])
        for tensors, (path, _) in zip(headers, files, strict=True):
            memory = _map_tensors(path, tensors)
            for bucket in into_buckets(tensors, FILE_BUCKET_BYTES):
                yield [(tensor.name, view_as(memory[tensor.name], tensor)) for tensor in bucket]

    def close(self) -> None:
        """Do nothing: files are closed when their tensors are received."""


def directory_fingerprint(directory: str) -> str:
    """Return a text that changes when a weight file of the directory is replaced or written to."""
    stats = [(path, path.stat()) for path in _weight_files(Path(directory))]
    return " ".join(f"{path.name}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}" for path, stat in stats)


def _weight_files(directory: Path) -> list[Path]:
    try:
        is_directory = directory.is_dir()
    except OSError:  # a name that no directory can have
        is_directory = False
    if not is_directory:
        raise NotFound(f"{str(directory)!r:.200}: there is no such directory on the node of the workers")
    return weight_files(directory)


def _map_tensors(path: Path, tensors: Iterable[SentTensor]) -> dict[str, Tensor]:
    """Map a complete safetensors file that has these tensors. Returns the bytes of each, uint8. Raises
    `CheckpointError` if the file is another one meanwhile."""
    begin = header_bytes(path)
    with path.open("rb") as file:
        mapped = MappedFile.open(path, file.fileno(), os.fstat(file.fileno()).st_size)
        file.seek(LENGTH_BYTES)
        header = json.loads(file.read(begin - LENGTH_BYTES))
    memory = {}
    for tensor in tensors:
        first, last = header.get(tensor.name, {}).get("data_offsets", (0, 0))
        memory[tensor.name] = mapped[begin + first : begin + last]
        if len(memory[tensor.name]) != tensor.num_bytes:
            raise CheckpointError(f"{path}: was replaced while it was read")
    return memory


def _read_header(path: Path, file: Any) -> Iterator[SentTensor]:
    for name in file.keys():  # noqa: SIM118
        stored = file.get_slice(name)
        dtype = STORED_DTYPES.get(stored.get_dtype())
        if dtype is None:
            known = ", ".join(STORED_DTYPES)
            raise WeightsMismatch(f"{path}: tensor {name!r} is stored as {stored.get_dtype()}; supported are {known}")
        yield SentTensor(name, dtype, tuple(stored.get_shape()))
