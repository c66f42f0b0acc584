"""Times and bits of each variant of the CPU kernels, compared with kernels compiled for this processor.

python benchmarks/kernel_variants.py [CHECKPOINT] [--variants avx512_bf16 avx2 ...] [--rounds N]

All variants run in turn in one process, which compiles those that this installation lacks. Without a checkpoint, the
model is the embedded one.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from pathlib import Path

import torch
from forward import BLOCK, make_batch

from eagleray.kernels.cpu.build.library import native_library
from eagleray.kernels.cpu.build.processor import processor_capabilities
from eagleray.kernels.cpu.build.variants import NATIVE, best_variant
from eagleray.kernels.kv_cache import KVCache
from eagleray.models.base import Model
from eagleray.models.registry import load_model
from eagleray_bench.alternating_runs import AlternatingRuns

EMBEDDED = Path(__file__).parents[1] / "eagleray" / "demo_model"
CPU = torch.device("cpu")
PASSES = {"1 token": (1, 1), "16 rows of 1 token": (16, 1), "256 tokens": (1, 256)}
"""Rows, and new tokens of each, of the passes that are measured."""
CONTEXT = 128


class MeasuredVariant:
    """A model that computes with one variant, its shortest times in seconds and its logits."""

    def __init__(self, name: str, checkpoint: Path) -> None:
        self.name = name
        os.environ["EAGLERAY_CPU_KERNELS"] = name
        native_library.cache_clear()
        self._model: Model = load_model(
            checkpoint, dtype="auto", load_format="auto", device=CPU, seed=None, on_progress=None
        )
        self.seconds: dict[str, float] = {}
        self.logits: dict[str, torch.Tensor] = {}

    def measure(self) -> None:
        for label, (rows, tokens) in PASSES.items():
            batch = make_batch(rows, tokens, CONTEXT)
            batch.token_ids[:] %= self._model.spec.vocab_size
            shape, num_blocks = self._model.cache_shape(BLOCK), int(batch.block_table.max()) + 1
            cache = KVCache.allocate(shape, num_blocks=num_blocks, dtype=self._model.dtype, device=CPU)
            self.logits[label] = self._model.logits(self._model.forward(batch, cache)).clone()
            began = time.perf_counter()
            self._model.forward(batch, cache)
            self.seconds[label] = min(self.seconds.get(label, torch.inf), time.perf_counter() - began)


def main() -> None:
    best = best_variant(platform.machine(), processor_capabilities())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=EMBEDDED)
    parser.add_argument("--variants", nargs="+", default=[best.name] if best else [])
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    variants = [MeasuredVariant(name, arguments.checkpoint) for name in (NATIVE, *arguments.variants)]
    for variant in AlternatingRuns(count=arguments.rounds).order(variants):
        variant.measure()
    native = variants[0]
    for label in PASSES:
        print(label)
        for each in variants:
            ratio = each.seconds[label] / native.seconds[label]
            bits = "same bits" if torch.equal(each.logits[label], native.logits[label]) else "other bits"
            print(f"  {each.name:<12}{1e3 * each.seconds[label]:9.3f} ms {ratio:7.3f} of native's   {bits}")


if __name__ == "__main__":
    main()
