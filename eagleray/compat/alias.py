"""The name `vllm`, and those of its modules, for the modules of `eagleray.compat.vllm`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

NAME = "vllm"
PREFIX = "eagleray.compat."


class AliasFinder(MetaPathFinder, Loader):
    """Finds `vllm.x` as the module `eagleray.compat.vllm.x`: one module with two names."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != NAME and not name.startswith(NAME + "."):
            return None
        try:
            found = importlib.util.find_spec(PREFIX + name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ModuleNotFoundError(
                f"No module named {name!r}: `vllm` is eagleray here, which has those parts of it that steer and "
                "generate; see docs/rl.md",
                name=name,
            )
        return ModuleSpec(name, self, is_package=found.submodule_search_locations is not None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(PREFIX + spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has been executed under its own name."""


def install() -> None:
    """Make `import vllm` import `eagleray.compat.vllm` in this process, also where vLLM is installed. Idempotent."""
    if not any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, AliasFinder())
