"""`python -m eagleray.compat.vllm` prints the directory that makes `import vllm` import this package."""

from __future__ import annotations

from pathlib import Path

print(Path(__file__).parents[1] / "on_path")
