"""The lowering of a recording to the ops of the CPU kernels: C structs, with Python calls between them.

An addition that follows a product or the experts is merged into their op, which then adds its result to the hidden
state as it is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from eagleray.kernels.cpu.abi import CStruct, abi
from eagleray.kernels.cpu.adapters import NativeAdapterSite
from eagleray.kernels.cpu.experts import NativeProducts, c_router_params, c_slot_map
from eagleray.kernels.cpu.linear import NativeEmbedding, NativeLinear
from eagleray.kernels.cpu.mla import NativeMLA
from eagleray.kernels.cpu.program import HostCall, LoweredOps, NativeOp
from eagleray.kernels.expert_trace import ExpertTrace
from eagleray.kernels.params import AttentionParams
from eagleray.kernels.recording import (
    AddOp,
    AllReduceOp,
    AnyOp,
    AttentionOp,
    EmbedOp,
    ExpertsOp,
    HostOp,
    LinearOp,
    MLAAttentionOp,
    NormOp,
    Recording,
    RoundOp,
    Value,
    assign_buffers,
)
from eagleray.parallel.group import TensorParallelGroup

CACHE_FORMATS: dict[torch.dtype, int] = {torch.int8: abi.CACHE_INT8, torch.float8_e4m3fn: abi.CACHE_FP8}
"""Formats of caches that have scales, by the dtype of their codes."""


@dataclass(frozen=True, slots=True)
class FoldedOp:
    """A recorded operation, and the addition of its result that the same op performs."""

    op: AnyOp
    addition: AddOp | None = None

    @property
    def out(self) -> Value:
        return self.op.out if self.addition is None else self.addition.out

    @property
    def total(self) -> Value | None:
        return None if self.addition is None else self.addition.total

    def takes(self, addition: AddOp) -> bool:
        """Whether `addition` adds the result of this op, which can do it. An op adds at most once."""
        can_add = isinstance(self.op, ExpertsOp) or (isinstance(self.op, LinearOp) and not self.op.weight.is_gated)
        return can_add and self.addition is None and self.op.out is addition.x


def fold_additions(recording: Recording) -> list[FoldedOp]:
    """Merge additions into the operations right before them whose results nothing else reads."""
    num_reads = Counter(value for op in recording.ops for value in op.reads)
    num_reads[recording.result] += 1
    folded: list[FoldedOp] = []
    for op in recording.ops:
        if isinstance(op, AddOp) and folded and folded[-1].takes(op) and num_reads[op.x] == 1:
            folded[-1] = FoldedOp(folded[-1].op, op)
        else:
            folded.append(FoldedOp(op))
    return folded


def lower(recording: Recording) -> LoweredOps:
    """Return the ops of a recording, with their buffers."""
    lowering = _OpLowering()
    for folded in fold_additions(recording):
        lowering.lower(folded)
    ops = lowering.ops
    buffers = assign_buffers([op.access for op in ops], source=recording.source, result=recording.result)
    for op in ops:
        if isinstance(op, NativeOp):
            for name, value in (op.reads | op.writes).items():
                setattr(op.args, name, buffers.numbers[value])
    return LoweredOps(recording, ops, buffers, lowering.reserve)


@dataclass
class _OpLowering:
    ops: list[NativeOp | HostCall] = field(default_factory=list)
    reserve: list[Callable[[int], None]] = field(default_factory=list)

    def lower(self, folded: FoldedOp) -> None:
        op = folded.op
        match op:
            case EmbedOp(table=NativeEmbedding() as table):
                self._native(abi.OP_EMBED, table.c_embed(), {}, {"out": op.out})
            case RoundOp():
                self._native(abi.OP_ROUND, abi.CElementwise(size=op.x.size), {"x": op.x}, {"out": op.out})
            case LinearOp(weight=NativeLinear() as weight, adapters=NativeAdapterSite() | None as adapters):
                assert adapters is None or not op.out.is_sequence_sharded, "adapters are by tokens of the whole batch"
                args = weight.c_multiply(adds=folded.addition is not None, adapters=adapters)
                self._native(abi.OP_MULTIPLY, args, {"x": op.x}, {"out": folded.out}, folded.total)
            case NormOp():
                args = abi.CNormalize(size=op.x.size, weight=op.weight.data_ptr(), eps=op.eps)
                self._native(abi.OP_NORMALIZE, args, {"x": op.x}, {"out": op.out})
            case AttentionOp():
                writes = {"queries": op.out.another(op.out.size, is_float32=False), "out": op.out}
                self._native(abi.OP_ATTEND, _c_attend(op), {"qkv": op.qkv}, writes)
            case MLAAttentionOp(weights=NativeMLA() as weights):
                args = abi.CAttendMLA(params=weights.c_params(op.block_size), cache=op.cache.data_ptr())
                writes = {"prepared": op.out.another(op.queries.size, is_float32=False), "out": op.out}
                self._native(abi.OP_ATTEND_MLA, args, {"queries": op.queries, "latents": op.latents}, writes)
            case ExpertsOp():
                self._experts(op, folded)
            case AddOp():
                self._native(abi.OP_ADD, abi.CElementwise(size=op.x.size), {"x": op.x}, {"out": op.out}, op.total)
            case AllReduceOp():
                self.ops.append(HostCall(partial(_all_reduce, op.group), [op.out], consumed=op.x))
            case HostOp():
                self._host(op)
            case _:
                raise TypeError(f"the CPU has no op for a {type(op).__name__} with weights of another backend")

    def _native(
        self,
        operation: int,
        args: CStruct,
        reads: dict[str, Value],
        writes: dict[str, Value],
        total: Value | None = None,
    ) -> None:
        self.ops.append(NativeOp(operation, args, reads, writes, total))

    def _host(self, op: HostOp) -> None:
        def compute(*rows: Tensor) -> None:
            rows[-1].copy_(op.function(*rows[:-1]))

        self.ops.append(HostCall(compute, [*op.inputs, op.out]))

    def _experts(self, op: ExpertsOp, folded: FoldedOp) -> None:
        """The experts' op adds to rows, so these begin as zeros if there is nothing else to add to."""
        assert isinstance(op.products, NativeProducts)
        total = folded.total
        if total is None:
            total = op.out.another(op.out.size, is_float32=True)
            self._native(abi.OP_CLEAR, abi.CElementwise(size=total.size), {}, {"out": total})
        args = abi.CComputeExperts(
            router=c_router_params(op.router, op.scores.size),
            experts=op.products.c_experts,
            slot_map=c_slot_map(op.slots, op.scores.size),
            counts=None if op.trace is None else op.trace.counts[op.layer].data_ptr(),
        )
        reads = {"x": op.x, "scores": op.scores}
        self._native(abi.OP_COMPUTE_EXPERTS, args, reads, {"hidden": folded.out}, total)
        if op.trace is not None and op.trace.keeps_ids:
            self.reserve.append(partial(_reserve_trace, args, op.trace, op.layer))


def _c_attend(op: AttentionOp) -> CStruct:
    """Convert to C. The struct points into `op`."""
    params = op.params
    return abi.CAttend(
        params=c_attention_params(params, op.block_size, op.cache.dtype),
        q_norm=None if params.q_norm is None else params.q_norm.data_ptr(),
        k_norm=None if params.k_norm is None else params.k_norm.data_ptr(),
        eps=params.norm_eps,
        cache=op.cache.data_ptr(),
    )


def c_attention_params(params: AttentionParams, block_size: int, cache_dtype: torch.dtype) -> CStruct:
    """Convert to C. The struct points into `params`, whose weights are float32."""
    return abi.CAttentionParams(
        num_heads=params.num_heads,
        num_kv_heads=params.num_kv_heads,
        head_dim=params.head_dim,
        block_size=block_size,
        window=params.window or 0,
        scale=params.head_dim**-0.5,
        sinks=None if params.sinks is None else params.sinks.data_ptr(),
        cache_format=CACHE_FORMATS.get(cache_dtype, abi.CACHE_PLAIN),
    )


def _all_reduce(group: TensorParallelGroup, rows: Tensor) -> None:
    total = group.all_reduce(rows)
    if total.data_ptr() != rows.data_ptr():
        rows.copy_(total)


def _reserve_trace(args: CStruct, trace: ExpertTrace, layer: int, num_rows: int) -> None:
    """Make room in the trace, and point the op at the new memory."""
    trace.reserve(num_rows)
    rows = trace.buffer(layer)
    args.trace = abi.CExpertTrace(ids=rows.data_ptr(), stride=rows.stride(0), is_wide=rows.dtype.itemsize == 2)
