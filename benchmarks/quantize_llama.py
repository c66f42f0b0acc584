"""Quantization of a GGUF file in bf16 by llama.cpp. Run by `peer_engines.py` in the Python that has llama-cpp-python.

python benchmarks/quantize_llama.py IN.gguf OUT.gguf Q8_0|Q4_K_M
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import llama_cpp
from measure_llama import quiet


def main() -> None:
    source, target, kind = sys.argv[1:]
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    unfinished = Path(target).with_suffix(".unfinished")
    if llama_cpp.llama_model_quantize(source.encode(), str(unfinished).encode(), params) != 0:
        sys.exit(f"llama.cpp cannot quantize {source} to {kind}")
    unfinished.rename(target)


if __name__ == "__main__":
    main()
