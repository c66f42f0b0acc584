"""The lowering of a recording to launches of Triton's kernels and torch's products.

An addition moves into the norm behind it, or into the weighted sum of the experts before it. Queries and keys are
normalized, rotated and written to the cache by one kernel. Gates follow their product.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from eagleray.kernels.cuda.adapters import AdaptedProduct, CudaAdapterSite
from eagleray.kernels.cuda.attention import LatentPagedAttention, PagedAttention
from eagleray.kernels.cuda.attention_work import SPLIT_KEYS, latent_split_keys
from eagleray.kernels.cuda.experts import CudaExperts
from eagleray.kernels.cuda.flash_attention import PromptAttention
from eagleray.kernels.cuda.launch import Frame, Launch, LaunchKind, LoweredLaunches, TensorSpec
from eagleray.kernels.cuda.linear import CudaEmbedding, CudaLinear
from eagleray.kernels.cuda.metadata import MetadataSizes, SplitRule
from eagleray.kernels.cuda.triton.attention import device_capability, prefill_tiling, queries_per_tile
from eagleray.kernels.cuda.triton.decode_attention import decode_programs
from eagleray.kernels.cuda.triton.embedding import embed
from eagleray.kernels.cuda.triton.gate import gate
from eagleray.kernels.cuda.triton.mla import latent_queries_per_tile
from eagleray.kernels.cuda.triton.norm import add, add_rms_norm, rms_norm
from eagleray.kernels.params import MLAParams
from eagleray.kernels.recording import (
    Access,
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


@dataclass(frozen=True, slots=True)
class AddNorm:
    """An addition, and a norm of the sum."""

    addition: AddOp
    norm: NormOp


@dataclass(frozen=True, slots=True)
class AddExperts:
    """Experts, and the addition of their result."""

    experts: ExpertsOp
    addition: AddOp


FusedOp = AnyOp | AddNorm | AddExperts


def fuse(recording: Recording) -> list[FusedOp]:
    """Merge operations that are next to each other."""
    num_reads = Counter(value for op in recording.ops for value in op.reads)
    num_reads[recording.result] += 1
    fused: list[FusedOp] = []
    for op in recording.ops:
        last = fused[-1] if fused else None
        if isinstance(op, AddOp) and isinstance(last, ExpertsOp) and last.out is op.x and num_reads[op.x] == 1:
            fused[-1] = AddExperts(last, op)
        elif isinstance(op, NormOp) and isinstance(last, AddOp) and last.out is op.x:
            fused[-1] = AddNorm(last, op)
        else:
            fused.append(op)
    return fused


def lower(recording: Recording, device: torch.device, *, prefills_by_fa3: bool = False) -> LoweredLaunches:
    """Return the launches of a recording, with their buffers. `prefills_by_fa3`: see `CudaBackend`."""
    lowering = _LaunchLowering(recording.dtype, device, PromptAttention() if prefills_by_fa3 else None)
    for op in fuse(recording):
        lowering.lower(op)
    launches = lowering.launches
    buffers = assign_buffers([launch.access for launch in launches], source=recording.source, result=recording.result)
    return LoweredLaunches(
        recording,
        launches,
        buffers,
        split_rules=lowering.split_rules,
        queries_per_tile=lowering.queries_per_tile,
        num_rotated=lowering.num_rotated,
        num_adapter_slots=lowering.num_adapter_slots,
        reserve=lowering.reserve,
    )


@dataclass
class _LaunchLowering:
    dtype: torch.dtype
    device: torch.device
    prompt_attention: PromptAttention | None
    launches: list[Launch] = field(default_factory=list)
    split_rules: list[SplitRule] = field(default_factory=list)
    queries_per_tile: int = 0
    num_rotated: int = 0
    num_adapter_slots: int = 0
    reserve: list[Callable[[int], None]] = field(default_factory=list)

    def lower(self, op: FusedOp) -> None:
        match op:
            case EmbedOp(table=CudaEmbedding() as table):
                self._launch(partial(_embed, table, op.out), Access((), (op.out,)))
            case RoundOp():
                self._launch(partial(_copy, op.x, op.out), Access((op.x,), (op.out,)))
            case LinearOp(weight=CudaLinear() as weight, adapters=None):
                self._linear(op, weight)
            case LinearOp(weight=CudaLinear() as weight, adapters=CudaAdapterSite() as site):
                adapted = AdaptedProduct.of(op, weight, site)
                self.num_adapter_slots = site.table.num_slots
                self._launch(adapted.compute, Access((op.x,), adapted.writes), scratch=adapted.scratch)
            case NormOp():
                self._launch(partial(_norm, op), Access((op.x,), (op.out,)))
            case AddOp():
                self._launch(partial(_add, op), Access(op.reads, (op.out,), {op.out: op.total}))
            case AddNorm(addition, norm):
                access = Access(addition.reads, (addition.out, norm.out), {addition.out: addition.total})
                self._launch(partial(_add_norm, addition, norm), access)
            case AttentionOp():
                self._attention(op)
            case MLAAttentionOp(weights=MLAParams() as params):
                self._mla_attention(op, params)
            case ExpertsOp():
                self._experts(op, None)
            case AddExperts(experts, addition):
                self._experts(experts, addition)
            case AllReduceOp():
                access = Access((op.x,), (op.out,), {op.out: op.x})
                if op.group.is_capturable:
                    self._launch(partial(_all_reduce_in_place, op.group, op.out), access)
                else:
                    self._launch(partial(_all_reduce, op.group, op.out), access, kind=LaunchKind.HOST)
            case HostOp():
                self._launch(partial(_host, op), Access(op.reads, (op.out,)), kind=LaunchKind.HOST)
            case _:
                raise TypeError(f"there is no launch for a {type(op).__name__} with weights of another backend")

    def _launch(
        self,
        function: Callable[..., None],
        access: Access,
        *,
        kind: LaunchKind = LaunchKind.ROWS,
        scratch: Callable[[MetadataSizes], Sequence[TensorSpec]] | None = None,
    ) -> None:
        launch = Launch(function, access, kind) if scratch is None else Launch(function, access, kind, scratch)
        self.launches.append(launch)

    def _linear(self, op: LinearOp, weight: CudaLinear) -> None:
        x, product = op.x, op.out
        if weight.is_float32 and self.dtype != torch.float32:
            x = op.x.another(op.x.size, is_float32=True)
            self._launch(partial(_copy, op.x, x), Access((op.x,), (x,)))
        has_own_gate = weight.is_gated and not weight.applies_gate
        if has_own_gate:
            product = op.out.another(2 * op.out.size, is_float32=False)
        self._launch(partial(_multiply, weight, x, product), Access((x,), (product,)))
        if has_own_gate:
            self._launch(partial(_gate, weight, product, op.out), Access((product,), (op.out,)))

    def _attention(self, op: AttentionOp) -> None:
        params = op.params
        tiling = prefill_tiling(params.head_dim, self.dtype, op.cache.dtype, device_capability(self.device))
        self._set_queries_per_tile(queries_per_tile(params.num_heads // params.num_kv_heads, tiling))
        self.num_rotated = params.head_dim // 2
        queries = op.out.another(op.out.size, is_float32=False)
        attention = PagedAttention(
            op,
            queries,
            tiling,
            split_index=self._split_index(params.window),
            num_programs=decode_programs(self.device),
            prompt_attention=self.prompt_attention,
        )
        self._launch(attention.write, Access((op.qkv,), (queries,)))
        access = Access((queries,), (op.out,))
        self._launch(attention.attend, access, kind=LaunchKind.ATTENTION, scratch=attention.scratch)

    def _mla_attention(self, op: MLAAttentionOp, params: MLAParams) -> None:
        attention = LatentPagedAttention.of(op, params, self.dtype, self.device)
        attention.split_index = self._split_index(None, latent_split_keys(params.num_heads))
        self._set_queries_per_tile(latent_queries_per_tile(params.num_heads, attention.prefill_tiling))
        self.num_rotated = params.rotated_dim // 2
        absorbed, latents = attention.absorbed, attention.latents
        self._launch(attention.absorb, Access((op.queries, op.latents), (absorbed,)))
        access = Access((absorbed,), (latents,))
        self._launch(attention.attend, access, kind=LaunchKind.ATTENTION, scratch=attention.scratch)
        self._launch(attention.expand, Access((latents,), (op.out,)))

    def _set_queries_per_tile(self, number: int) -> None:
        assert self.queries_per_tile in (0, number), "the layers' attentions have tiles of one size"
        self.queries_per_tile = number

    def _split_index(self, window: int | None, split_keys: int = SPLIT_KEYS) -> int:
        """Return the index of a rule among those of all layers."""
        rule = SplitRule(window, split_keys)
        if rule not in self.split_rules:
            self.split_rules.append(rule)
        return self.split_rules.index(rule)

    def _experts(self, op: ExpertsOp, addition: AddOp | None) -> None:
        products = op.products
        assert isinstance(products, CudaExperts)
        out = op.out if addition is None else addition.out
        total = None if addition is None else addition.total
        access = Access(op.reads, (out,)) if total is None else Access((*op.reads, total), (out,), {out: total})
        function, scratch = products.launch(op, out, accumulates=total is not None)
        self._launch(function, access, scratch=scratch)
        if op.trace is not None and op.trace.keeps_ids:
            self.reserve.append(op.trace.reserve)


def _embed(table: CudaEmbedding, out: Value, frame: Frame) -> None:
    embed(frame.metadata.token_ids, frame.last_tokens, table.weight, first=table.first, out=frame[out])


def _copy(x: Value, out: Value, frame: Frame) -> None:
    frame[out].copy_(frame[x])


def _norm(op: NormOp, frame: Frame) -> None:
    rms_norm(frame[op.x], op.weight, op.eps, out=frame[op.out])


def _add(op: AddOp, frame: Frame) -> None:
    add(frame[op.out], frame[op.x])  # the total is in the buffer of the sum


def _add_norm(addition: AddOp, norm: NormOp, frame: Frame) -> None:
    add_rms_norm(frame[addition.out], frame[addition.x], norm.weight, norm.eps, out=frame[norm.out])


def _multiply(weight: CudaLinear, x: Value, out: Value, frame: Frame) -> None:
    weight.multiply(frame[x], frame[out])


def _gate(weight: CudaLinear, product: Value, out: Value, frame: Frame) -> None:
    gate(frame[product], weight.clamp, out=frame[out])


def _all_reduce_in_place(group: TensorParallelGroup, value: Value, frame: Frame) -> None:
    group.all_reduce(frame[value])  # of padded rows too: all ranks have the same bucket


def _all_reduce(group: TensorParallelGroup, value: Value, frame: Frame) -> None:
    rows = frame.without_padding(value)
    total = group.all_reduce(rows)
    if total.data_ptr() != rows.data_ptr():
        rows.copy_(total)


def _host(op: HostOp, frame: Frame) -> None:
    frame.without_padding(op.out).copy_(op.function(*(frame.without_padding(value) for value in op.inputs)))
