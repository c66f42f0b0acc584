"""Divergence of models with quantized weights, or with a quantized cache, from their own bfloat16, on texts.

python benchmarks/quantization_error.py [CHECKPOINT] [--formats int8 int4 fp8] [--cache-formats int8 fp8]
    [--texts FILE ...] [--tokens N]

Every text is computed once in each format. The figures are means over its tokens: the divergence (Kullback-Leibler, in
nats) of the predictions from those of bfloat16, and the share of tokens whose likeliest successor is the same. Without
a checkpoint it is the embedded demo model.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forward import BLOCK
from tokenizers import Tokenizer
from torch import Tensor

import eagleray
from eagleray.kernels.forward_batch import ForwardBatch
from eagleray.kernels.kv_cache import KVCache
from eagleray.models.base import Model
from eagleray.models.registry import load_model

ROOT = Path(__file__).parents[1]
DEMO_MODEL = Path(eagleray.__file__).parent / "demo_model"
TEXTS = [ROOT / "README.md", ROOT / "docs" / "architecture.md", DEMO_MODEL / "MODEL_CARD.md"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=DEMO_MODEL)
    parser.add_argument("--formats", nargs="+", default=["int8", "int4", "fp8"])
    parser.add_argument("--cache-formats", nargs="+", default=["int8", "fp8"])
    parser.add_argument("--texts", type=Path, nargs="+", default=TEXTS)
    parser.add_argument("--tokens", type=int, default=1500, help="most tokens of a text")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.checkpoint / "tokenizer.json"))
    texts = [tokenizer.encode(path.read_text()).ids[: arguments.tokens] for path in arguments.texts]
    exact = predictions(arguments.checkpoint, texts)
    print(f"{sum(map(len, texts))} tokens of {', '.join(path.name for path in arguments.texts)}")
    formats = [(kind, {"quantization": kind}) for kind in arguments.formats]
    formats += [(f"{kind} cache", {"kv_cache_dtype": kind}) for kind in arguments.cache_formats]
    for name, options in formats:
        found = predictions(arguments.checkpoint, texts, **options)
        divergence = torch.cat([(a.exp() * (a - b)).sum(-1) for a, b in zip(exact, found, strict=True)])
        same = torch.cat([a.argmax(-1) == b.argmax(-1) for a, b in zip(exact, found, strict=True)])
        print(f"{name:<10} divergence {divergence.mean():.6f}  same likeliest token {100 * same.float().mean():.1f} %")


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
