"""Logits of texts by llama.cpp. Run by `quantization_error.py` in the Python that has llama-cpp-python.

python benchmarks/llama_logits.py FILE.gguf TEXTS.json OUT.npy

TEXTS.json has lists of token ids, each of which is computed as one sequence. OUT.npy is float32 [tokens of all texts,
vocabulary].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from measure_llama import LlamaEngine


def main() -> None:
    gguf, texts, target = sys.argv[1:]
    engine = LlamaEngine(gguf, {})
    np.save(target, np.concatenate([engine.logits(tokens) for tokens in json.loads(Path(texts).read_text())]))
    engine.close()


if __name__ == "__main__":
    main()
