"""Cost of low-rank adapters in a pass on a CPU: time per token of 16 requests, with the products of the layers apart.

python benchmarks/lora_pass.py [--model dense-0.6b] [--rank 8] [--targets q_proj v_proj] [--repeat 20] [--threads 1]

32 adapters are loaded; no request has one, all share one, each has another of 16, or another of 32, of which every
second turn takes the other half. The variants alternate. The first table has the lowest times of whole passes with
the head. The second one runs each operation alone and adds up the lowest times of all layers, which other programs on
the machine disturb less.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forward import BLOCK, make_batch
from lora import ALL_TARGETS, NUM_ADAPTERS, NUM_REQUESTS, write_adapter
from shapes import SHAPES, make

from eagleray.kernels.cpu.abi import abi
from eagleray.kernels.cpu.program import NativeOp
from eagleray.kernels.forward_batch import AdapterGroups, ForwardBatch
from eagleray.kernels.kv_cache import KVCache
from eagleray.models.base import Model
from eagleray.models.registry import load_model
from eagleray_bench.alternating_runs import AlternatingRuns

CONTEXT = 32
SLOTS: dict[str, Callable[[int], Sequence[int]]] = {
    "no adapter": lambda turn: [-1] * NUM_REQUESTS,
    "1 shared": lambda turn: [0] * NUM_REQUESTS,
    "16 of 16": lambda turn: range(NUM_REQUESTS),
    "16 of 32": lambda turn: [turn % 2 * NUM_REQUESTS + i for i in range(NUM_REQUESTS)],
}
"""Slot of each request's adapter in each variant, by the number of the turn."""

Times = dict[str, dict[str, float]]
"""Lowest seconds, by name of the operation and variant."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dense-0.6b", choices=list(SHAPES))
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--targets", nargs="+", default=ALL_TARGETS, metavar="MODULE", help=f"some of {ALL_TARGETS}")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "eagleray-benchmarks")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    checkpoint = make(arguments.model, arguments.directory)
    model = load_model(
        checkpoint, dtype="auto", load_format="auto", device=torch.device("cpu"), seed=None, on_progress=None
    )
    model.enable_adapters(num_slots=NUM_ADAPTERS, max_rank=arguments.rank)
    assert model.adapters is not None
    with tempfile.TemporaryDirectory() as directory:
        for slot in range(NUM_ADAPTERS):
            model.adapters.load(
                slot, write_adapter(Path(directory) / str(slot), checkpoint, arguments.rank, arguments.targets)
            )
    load = os.getloadavg()[0]
    print(f"{arguments.model}, rank {arguments.rank}, {' '.join(arguments.targets)}, {arguments.threads} threads")
    print(f"load {load:.1f}; lowest times in ms")
    with torch.inference_mode():
        _print(*_measure(model, arguments.repeat, arguments.threads))


def _measure(model: Model, repeat: int, threads: int) -> tuple[Times, Times]:
    """Return the times of whole passes, and those of operations, added up over the layers."""
    batch = make_batch(NUM_REQUESTS, 1, CONTEXT)
    num_blocks = int(batch.block_table.max()) + 1
    cache = KVCache.allocate(
        model.cache_shape(BLOCK), num_blocks=num_blocks, dtype=model.dtype, device=torch.device("cpu")
    )
    hidden = model.forward(batch, cache)
    program: Any = model._run._program  # type: ignore[attr-defined]
    ops = [op for op in program.ops if isinstance(op, NativeOp)]
    passes: Times = {"pass": {}, "head": {}}
    lowest: dict[int, dict[str, float]] = defaultdict(dict)
    for turn in range(repeat):
        for variant in AlternatingRuns(count=1).order(list(SLOTS)):
            chosen = _with_adapters(batch, SLOTS[variant](turn))
            _keep(passes["pass"], variant, _seconds(lambda chosen=chosen: model.forward(chosen, cache)))
            _keep(passes["head"], variant, _seconds(lambda: model.logits(hidden)))
            for i, op in enumerate(ops):  # the program still has the batch of the pass
                _keep(lowest[i], variant, _seconds(lambda op=op: _run(program, model, op, threads)))
    sums: Times = defaultdict(lambda: defaultdict(float))
    for i, op in enumerate(ops):
        name = f"product {op.args.n} x {op.args.k}" if op.operation == abi.OP_MULTIPLY else "other operations"
        for variant, seconds in lowest[i].items():
            sums[name][variant] += seconds
    sums["head"] = passes["head"]
    return passes, sums


def _with_adapters(batch: ForwardBatch, slots: Sequence[int]) -> ForwardBatch:
    return replace(batch, adapters=AdapterGroups.of(np.array(slots, dtype=np.int32)))


def _run(program: Any, model: Model, op: NativeOp, threads: int) -> None:
    """Run one operation."""
    one = (abi.COp * 1)(abi.COp(op.operation, ctypes.addressof(op.args)))
    kind = int(model.dtype == torch.bfloat16)
    program._library.er_run(kind, one, 1, program._buffers, program._batch, threads)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _keep(lowest: dict[str, float], variant: str, seconds: float) -> None:
    lowest[variant] = min(seconds, lowest.get(variant, seconds))


def _print(*tables: Times) -> None:
    for table in tables:
        print(f"\n{'':<22}" + "".join(f"{variant:>12}" for variant in SLOTS))
        for name, times in table.items():
            print(f"{name:<22}" + "".join(f"{1e3 * times[variant]:>12.3f}" for variant in SLOTS))
        head = min(table["head"].values())  # the same work in all variants
        totals = [head + sum(times[variant] for name, times in table.items() if name != "head") for variant in SLOTS]
        print(f"{'total':<22}" + "".join(f"{1e3 * total:>12.3f}" for total in totals))
        print(f"{'ratio':<22}" + "".join(f"{total / totals[0]:>12.3f}" for total in totals))


if __name__ == "__main__":
    main()
