"""The open safetensors files of a checkpoint, as one collection of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from eagleray.errors import CheckpointError
from eagleray.models.checkpoint_files import full_names, header_bytes, open_file, weight_files

ALL = slice(None)


class TensorFiles:
    """The tensors of a checkpoint directory, by the names that models have. Every problem is a `CheckpointError` that
    names the file and the tensor."""

    def __init__(self, directory: Path) -> None:
        with ExitStack() as stack:
            self._paths = weight_files(directory)
            self._files = [stack.enter_context(open_file(path)) for path in self._paths]
            owners = {name: index for index, file in enumerate(self._files) for name in file.keys()}  # noqa: SIM118
            self._stored_names = full_names(owners)
            self._owners = {name: owners[stored] for name, stored in self._stored_names.items()}
            self.header_bytes = sum(map(header_bytes, self._paths))
            """Bytes of everything in the files but tensors."""
            self.close = stack.pop_all().close

    @property
    def names(self) -> Set[str]:
        return self._owners.keys()

    def paths(self, names: Iterable[str]) -> str:
        """Return the paths of the files that have these tensors."""
        return ", ".join(sorted({str(self._path(name)) for name in names}))

    def kind(self, name: str) -> str:
        """Return the dtype of a tensor in its file, or "" if it is missing."""
        return str(self.slice_of(name).get_dtype()) if name in self._owners else ""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that is there."""
        return tuple(self.slice_of(name).get_shape())

    def slice_of(self, name: str) -> Any:
        """Return the slice of a tensor that is there, of which safetensors reads what is indexed."""
        return self._files[self._owners[name]].get_slice(self._stored_names[name])

    def read(
        self, name: str, kinds: Sequence[str], shape: tuple[int, ...], rows: slice = ALL, columns: slice = ALL
    ) -> Tensor:
        """Read a tensor of one of these dtypes and of this shape, or a part of a matrix."""
        self.check(name, kinds, shape)
        whole: Tensor = self.slice_of(name)
        is_part = rows != ALL or columns != ALL
        return whole[rows, columns] if is_part else whole[:] if shape else whole[...]

    def check(self, name: str, kinds: Sequence[str], shape: tuple[int, ...]) -> None:
        """Fail unless a tensor is there, is of one of these dtypes and has this shape."""
        if name not in self._owners:
            raise self.missing(name, shape)
        if (kind := self.kind(name)) not in kinds:
            self.fail(name, f"is stored as {kind}; supported are {', '.join(kinds)}")
        if (found := self.shape(name)) != shape:
            self.fail(name, f"has the shape {list(found)}, but config.json implies {list(shape)}")

    def missing(self, name: str, shape: tuple[int, ...], *, other: str = "") -> CheckpointError:
        """Return the error for a tensor that is not there. `other`: another one that could stand for it."""
        searched = ", ".join(map(str, self._paths))
        lacks = f", and so is {other!r}" if other else ""
        return CheckpointError(f"tensor {name!r} of shape {list(shape)} is missing{lacks}; searched in {searched}")

    def fail(self, name: str, problem: str) -> NoReturn:
        """Raise the error for a tensor that is there."""
        raise CheckpointError(f"{self._path(name)}: tensor {name!r} {problem}")

    def _path(self, name: str) -> Path:
        return self._paths[self._owners[name]]
