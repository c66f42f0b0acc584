"""Times of the operations of a forward pass: each native operation runs alone, summed up by kind.

python benchmarks/forward.py CHECKPOINT [--tokens N] [--rows N] [--context N] [--threads N] [--cpu-time]
    [--quantization int8] [--kv-cache-dtype int8] [--steps 1 2 4 8 16]

The pass computes `--tokens` new tokens for each of `--rows` rows that have `--context` cached tokens. An operation that
runs alone has to wake the team of threads first, so the sum of all is above the whole. `--cpu-time` measures
processor time in place of elapsed time, for a machine that runs other programs, too; use one thread with it, because
waiting threads consume processor time.

With `--steps` there are other figures instead: the time of steps of these numbers of tokens, divided among the rows,
with logits for every token, as in a step that checks drafts.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagleray.kernels.cpu.abi import abi
from eagleray.kernels.cpu.program import NativeOp
from eagleray.kernels.forward_batch import ForwardBatch
from eagleray.kernels.kv_cache import KVCache
from eagleray.models.base import Model
from eagleray.models.registry import load_model

BLOCK = 16
NAMES = {
    abi.OP_EMBED: "embed",
    abi.OP_NORMALIZE: "normalize",
    abi.OP_MULTIPLY: "multiply",
    abi.OP_ATTEND: "attend",
    abi.OP_ATTEND_MLA: "attend, latent",
    abi.OP_COMPUTE_EXPERTS: "experts",
    abi.OP_ADD: "add",
    abi.OP_CLEAR: "clear",
    abi.OP_ROUND: "round",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--quantization", choices=("int8", "int4", "fp8"))
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "int8", "fp8"])
    parser.add_argument("--steps", type=int, nargs="+", metavar="TOKENS")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    model = load_model(
        arguments.checkpoint,
        dtype="auto",
        load_format="auto",
        quantization=arguments.quantization,
        device=torch.device("cpu"),
        seed=None,
        on_progress=None,
        kv_cache_dtype=arguments.kv_cache_dtype,
    )
    if arguments.steps:
        print_steps(model, arguments, clock)
        return
    batch = make_batch([arguments.tokens] * arguments.rows, arguments.context)
    num_blocks = int(batch.block_table.max()) + 1
    cache = KVCache.allocate(
        model.cache_shape(BLOCK), num_blocks=num_blocks, dtype=model.cache_dtype, device=torch.device("cpu")
    )
    whole = _best(lambda: model.forward(batch, cache), arguments.repeat, clock)
    hidden = model.forward(batch, cache)[batch.query_start_loc[1:] - 1]
    head = _best(lambda: model.logits(hidden), arguments.repeat, clock)
    print(f"forward {1e3 * whole:.3f} ms, head {1e3 * head:.3f} ms ({batch.num_tokens} tokens, {arguments.rows} rows)")

    program: Any = model._run._program  # type: ignore[attr-defined]
    totals: dict[str, float] = defaultdict(float)
    work: dict[str, float] = defaultdict(float)
    ops = [op for op in program.ops if isinstance(op, NativeOp)]
    for op in ops:
        one = (abi.COp * 1)(abi.COp(op.operation, ctypes.addressof(op.args)))
        seconds = _best(
            lambda one=one: program._library.er_run(
                int(model.dtype == torch.bfloat16), one, 1, program._buffers, program._batch, arguments.threads
            ),
            arguments.repeat,
            clock,
        )
        name = NAMES[op.operation]
        if op.operation == abi.OP_MULTIPLY:
            name += f" {op.args.n} x {op.args.k}"
            work[name] += 2 * op.args.n * op.args.k * batch.num_tokens
        totals[name] += seconds
    for name, seconds in sorted(totals.items(), key=lambda item: -item[1]):
        rate = ""
        if name in work:
            rate = (
                f"{work[name] / seconds / 1e9:9.0f} GFLOP/s {work[name] / batch.num_tokens / seconds / 1e9:7.1f} GB/s"
            )
        print(f"{name:<24}{1e3 * seconds:10.3f} ms {rate}")


def print_steps(model: Model, arguments: argparse.Namespace, clock: Callable[[], float]) -> None:
    """Print milliseconds by the number of tokens, and the milliseconds for each further token since the line before."""
    rows, before = arguments.rows, None
    for count in arguments.steps:
        batch = make_batch([count // rows + (index >= rows - count % rows) for index in range(rows)], arguments.context)
        num_blocks = int(batch.block_table.max()) + 1
        cache = KVCache.allocate(
            model.cache_shape(BLOCK), num_blocks=num_blocks, dtype=model.cache_dtype, device=torch.device("cpu")
        )
        seconds = _best(lambda: model.logits(model.forward(batch, cache)), arguments.repeat, clock)  # noqa: B023
        line = f"{count:4} tokens of {rows} rows {1e3 * seconds:9.2f} ms"
        if before is not None:
            line += f" {1e3 * (seconds - before[1]) / (count - before[0]):8.2f} for each further one"
        print(line, flush=True)
        before = count, seconds


def make_batch(counts: Sequence[int], context: int) -> ForwardBatch:
    """Return a batch of rows with these numbers of new tokens, which ascend, behind `context` cached ones."""
    rows, blocks = len(counts), -(-(context + max(counts)) // BLOCK)
    table = np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks)
    positions = np.concatenate([np.arange(context, context + count, dtype=np.int32) for count in counts])
    owner = np.repeat(np.arange(rows), counts)
    return ForwardBatch(
        token_ids=np.random.default_rng(0).integers(10, 7000, len(positions), dtype=np.int32),
        positions=positions,
        slot_mapping=table[owner, positions // BLOCK] * BLOCK + positions % BLOCK,
        block_table=table,
        seq_lens=np.array(counts, dtype=np.int32) + context,
        query_start_loc=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        num_decodes=sum(count == 1 for count in counts),
    )


def _best(work: Callable[[], object], repeat: int, clock: Callable[[], float]) -> float:
    """Return the seconds of the fastest run, after one that does not count."""
    work()
    seconds = []
    for _ in range(repeat):
        began = clock()
        work()
        seconds.append(clock() - began)
    return min(seconds)


if __name__ == "__main__":
    main()
