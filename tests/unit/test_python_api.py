"""Names of the Python API: what `eagleray` exports, and what methods of other engines lead to."""

from __future__ import annotations

import subprocess
import sys

import pytest

import eagleray
from eagleray import LLM, AsyncLLM


def test_eagleray_exports_every_name_lazily():
    code = (
        "import sys, eagleray\n"
        "print(sorted({'torch', 'zmq', 'tokenizers', 'msgspec'} & set(sys.modules)))\n"
        "print(all(hasattr(eagleray, name) for name in eagleray.__all__), 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["[]", "True False"]
    assert sorted(eagleray.__all__, key=str) == sorted([*eagleray.MODULES, "__version__"], key=str)


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_llm_missing_method_names_another_way(kind):
    llm = kind.__new__(kind)  # a method that is not there needs no instance
    with pytest.raises(AttributeError, match="has no attribute `apply_model`: write a worker extension"):
        llm.apply_model(len)
    with pytest.raises(AttributeError, match=r"has no attribute `nothing`$"):
        llm.nothing  # noqa: B018
