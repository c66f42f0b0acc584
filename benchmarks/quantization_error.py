"""Divergence of models with quantized weights, or with a quantized cache, from their own bfloat16, on texts.

python benchmarks/quantization_error.py [CHECKPOINT] [--formats int8 int4 fp8] [--cache-formats int8 fp8]
    [--texts FILE ...] [--tokens N] [--llama-python LLAMA/bin/python]

Every text is computed once in each format. The figures are means over its tokens: the divergence (Kullback-Leibler, in
nats) of the predictions from those of bfloat16, and the share of tokens whose likeliest successor is the same. Without
a checkpoint it is the embedded demo model. With `--llama-python`, a Python that has llama-cpp-python, the same follows
for llama.cpp's formats, computed by llama.cpp and compared with its own bfloat16, and the size of the files.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forward import BLOCK
from gguf_file import convert, quantize_by_llama
from tokenizers import Tokenizer
from torch import Tensor

import eagleray
from eagleray.kernels.forward_batch import ForwardBatch
from eagleray.kernels.kv_cache import KVCache
from eagleray.models.base import Model
from eagleray.models.registry import load_model

ROOT = Path(__file__).parents[1]
DEMO_MODEL = Path(eagleray.__file__).parent / "demo_model"
GGUF_FORMATS = ("Q8_0", "Q4_K_M", "Q4_0")
TEXTS = [ROOT / "README.md", ROOT / "docs" / "architecture.md", DEMO_MODEL / "MODEL_CARD.md"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=DEMO_MODEL)
    parser.add_argument("--formats", nargs="+", default=["int8", "int4", "fp8"])
    parser.add_argument("--cache-formats", nargs="*", default=["int8", "fp8"])
    parser.add_argument("--texts", type=Path, nargs="+", default=TEXTS)
    parser.add_argument("--tokens", type=int, default=1500, help="most tokens of a text")
    parser.add_argument("--llama-python", metavar="PYTHON")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.checkpoint / "tokenizer.json"))
    texts = [tokenizer.encode(path.read_text()).ids[: arguments.tokens] for path in arguments.texts]
    exact = predictions(arguments.checkpoint, texts)
    print(f"{sum(map(len, texts))} tokens of {', '.join(path.name for path in arguments.texts)}")
    formats = [(kind, {"quantization": kind}) for kind in arguments.formats]
    formats += [(f"{kind} cache", {"kv_cache_dtype": kind}) for kind in arguments.cache_formats]
    for name, options in formats:
        print(f"{name:<10} {difference(exact, predictions(arguments.checkpoint, texts, **options))}", flush=True)
    if arguments.llama_python:
        for line in lines_of_llama(arguments.llama_python, arguments.checkpoint, texts):
            print(line, flush=True)


def difference(exact: list[Tensor], found: list[Tensor]) -> str:
    """Describe how far the predictions `found` are from `exact`; each is [tokens, vocabulary] of a text."""
    divergence = torch.cat([(a.exp() * (a - b)).sum(-1) for a, b in zip(exact, found, strict=True)])
    same = torch.cat([a.argmax(-1) == b.argmax(-1) for a, b in zip(exact, found, strict=True)])
    return f"divergence {divergence.mean():.6f}  same likeliest token {100 * same.float().mean():.1f} %"


def lines_of_llama(python: str, checkpoint: Path, texts: list[list[int]]) -> Iterator[str]:
    """Yield a line for each of llama.cpp's formats."""
    with tempfile.TemporaryDirectory() as directory:
        plain, ids, out = (Path(directory) / name for name in ("plain.gguf", "texts.json", "logits.npy"))
        convert(checkpoint, plain)
        ids.write_text(json.dumps(texts))

        def llama_predictions(file: Path) -> list[Tensor]:
            subprocess.run([python, Path(__file__).with_name("llama_logits.py"), file, ids, out], check=True)
            logits = torch.from_numpy(np.load(out))
            return [part.log_softmax(-1) for part in logits.split([len(tokens) for tokens in texts])]

        exact = llama_predictions(plain)
        for kind in GGUF_FORMATS:
            file = Path(directory) / f"{kind}.gguf"
            quantize_by_llama(python, plain, file, kind)
            size = file.stat().st_size / plain.stat().st_size
            yield f"{kind:<10} {difference(exact, llama_predictions(file))}  {size:.3f} of the file in bf16"


def predictions(checkpoint: Path, texts: list[list[int]], **options: Any) -> list[Tensor]:
    """Return the logarithms of the probabilities [tokens, vocabulary] of each text's successors."""
    model = load_model(
        checkpoint,
        dtype="bfloat16",
        load_format="auto",
        device=torch.device("cpu"),
        seed=None,
        on_progress=None,
        **options,
    )
    return [logits(model, tokens).log_softmax(-1) for tokens in texts]


def logits(model: Model, tokens: list[int]) -> Tensor:
    """Return the logits [tokens, vocabulary] of one sequence, which is computed in one step."""
    num_blocks = -(-len(tokens) // BLOCK)
    cache = KVCache.allocate(
        model.cache_shape(BLOCK), num_blocks=num_blocks, dtype=model.cache_dtype, device=torch.device("cpu")
    )
    positions = np.arange(len(tokens), dtype=np.int32)
    batch = ForwardBatch(
        token_ids=np.array(tokens, np.int32),
        positions=positions,
        slot_mapping=positions,
        block_table=np.arange(num_blocks, dtype=np.int32)[None],
        seq_lens=np.array([len(tokens)], np.int32),
        query_start_loc=np.array([0, len(tokens)], np.int32),
        num_decodes=0,
    )
    return model.logits(model.forward(batch, cache)).float().clone()


if __name__ == "__main__":
    main()
