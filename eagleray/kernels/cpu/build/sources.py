"""The files of a library and their compilation.

Nothing here imports torch, because a wheel is built without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eagleray.kernels.cpu.abi import HEADER, fingerprint
from eagleray.kernels.cpu.build.compiler import LINK_FLAGS, Compiler, compile_library
from eagleray.kernels.cpu.build.openmp import NativeUnavailable

SOURCE_DIRECTORY = HEADER.parent


@dataclass(frozen=True)
class LibrarySources:
    """Contents of C++ files and of the headers beside them.

    Copies of the contents are compiled, so a file that changes meanwhile cannot end up under the wrong key.
    """

    names: Sequence[str]
    """File names of the sources."""
    contents: dict[str, bytes]
    """Contents of sources and headers, by file name."""

    @classmethod
    def read(cls, sources: Sequence[Path]) -> LibrarySources:
        """Read files. Raises `NativeUnavailable` if there are none."""
        if not sources:
            raise NativeUnavailable(f"there are no sources of kernels in {SOURCE_DIRECTORY}: install eagleray again")
        names = [source.name for source in sources]
        assert len(set(names)) == len(names), "they are compiled in one directory"
        headers = {header for source in sources for header in source.parent.glob("*.h")}
        return cls(names, {path.name: path.read_bytes() for path in (*sources, *sorted(headers))})

    def key(self, compiler: Compiler) -> str:
        """Return a key that differs whenever the compiled library may.

        It contains the compiler's macros, which tell the features of the processor, so machines can share a cache in a
        common home directory.
        """
        digest = hashlib.sha256()
        command = repr((compiler.command, compiler.flags, LINK_FLAGS, self.names))
        parts = [command.encode(), compiler.macros.encode()]
        for name in sorted(self.contents):
            parts += [name.encode(), self.contents[name]]
        for part in parts:
            digest.update(hashlib.sha256(part).digest())
        return digest.hexdigest()[:32]

    def compile(self, compiler: Compiler, directory: Path, on_compiled: Callable[[], object] = lambda: None) -> Path:
        """Compile the library in an empty directory and return its path. Raises `NativeUnavailable`."""
        for file, content in self.contents.items():
            (directory / file).write_bytes(content)
        if (interface := self.contents.get(HEADER.name)) is not None:
            # The library reports the header that is compiled here, which may differ from the one that `abi` read.
            report = f'-DABI_FINGERPRINT="{fingerprint(interface)}"'
            compiler = replace(compiler, flags=(*compiler.flags, report))
        return compile_library(compiler, self.names, directory=directory, on_compiled=on_compiled)
