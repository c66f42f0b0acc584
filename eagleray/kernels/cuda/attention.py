"""The launches of attentions: the cache is written for each token, then rows with one query and others are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagleray.kernels.cuda.attention_work import latent_split_keys
from eagleray.kernels.cuda.flash_attention import PromptAttention
from eagleray.kernels.cuda.launch import Frame, TensorSpec
from eagleray.kernels.cuda.metadata import MetadataSizes
from eagleray.kernels.cuda.triton.attention import AttentionTiling, attend_tiles, device_capability
from eagleray.kernels.cuda.triton.cache_write import write_keys_values
from eagleray.kernels.cuda.triton.decode_attention import SplitWorkspace, attend_decodes
from eagleray.kernels.cuda.triton.mla import (
    attend_latent_decodes,
    attend_latent_tiles,
    latent_decode_programs,
    mla_tiling,
    write_latents,
)
from eagleray.kernels.params import MLAParams
from eagleray.kernels.recording import AttentionOp, MLAAttentionOp, Value

MANY_VECTORS = 1 << 20
"""Queries of rows with several queries, times their heads, of which a tile takes some."""


@dataclass(slots=True, eq=False)
class PagedAttention:
    """The launches of an `AttentionOp`. `queries` are those of the model's dtype that the first one writes."""

    op: AttentionOp
    queries: Value
    tiling: AttentionTiling
    split_index: int
    """Index of the layer's rule in `DeviceMetadata.splits`."""
    num_programs: int
    prompt_attention: PromptAttention | None
    """Computes rows with several queries in place of our own kernel."""

    def write(self, frame: Frame) -> None:
        """Normalize and rotate queries and keys, and write keys and values to the cache."""
        params, metadata = self.op.params, frame.metadata
        write_keys_values(
            frame[self.op.qkv],
            frame.cos,
            frame.sin,
            metadata.positions,
            metadata.slot_mapping,
            self.op.cache,
            frame[self.queries],
            q_norm=params.q_norm,
            k_norm=params.k_norm,
            eps=params.norm_eps,
        )

    def attend(self, frame: Frame, workspace: Tensor) -> None:
        params, cache, metadata = self.op.params, self.op.cache, frame.metadata
        queries, out = frame[self.queries], frame[self.op.out]
        sizes, splits = metadata.sizes, metadata.splits[self.split_index]
        if num_decodes := sizes.num_decodes:
            num_splits = sizes.num_splits[self.split_index]
            attend_decodes(
                queries[:num_decodes],
                cache,
                metadata.block_table[:num_decodes],
                metadata.seq_lens[:num_decodes],
                splits.work,
                splits.num_work,
                splits.row_starts,
                SplitWorkspace.of(workspace, num_splits, params.num_heads, params.head_dim),
                out[:num_decodes],
                num_programs=self.num_programs,
                window=params.window,
                sinks=params.sinks,
            )
        if sizes.num_rows > num_decodes and self.prompt_attention is not None:
            self.prompt_attention(
                queries,
                cache,
                metadata.block_table,
                metadata.seq_lens,
                metadata.query_start_loc,
                out,
                num_decodes=num_decodes,
                num_tokens=frame.num_tokens,
                window=params.window,
            )
        elif sizes.num_tiles:
            attend_tiles(
                queries,
                cache,
                metadata.block_table,
                metadata.seq_lens,
                metadata.query_start_loc,
                metadata.tiles,
                out,
                tiling=self.tiling,
                window=params.window,
                sinks=params.sinks,
            )

    def scratch(self, sizes: MetadataSizes) -> Sequence[TensorSpec]:
        params = self.op.params
        size = SplitWorkspace.num_floats(sizes.num_splits[self.split_index], params.num_heads, params.head_dim)
        return [TensorSpec((size,), torch.float32)]


@dataclass(slots=True, eq=False)
class LatentPagedAttention:
    """The launches of an `MLAAttentionOp`. All queries are multiplied with the matrices of their heads ("absorbed"), so
    that they see the cached latents themselves, and so are the weighted sums of latents."""

    op: MLAAttentionOp
    params: MLAParams
    absorbed: Value
    """[num_tokens, num_heads * (rank + rotated_dim)]"""
    latents: Value
    """[num_tokens, num_heads * rank] weighted sums"""
    prefill_tiling: AttentionTiling
    decode_tiling: AttentionTiling
    num_programs: int
    split_index: int = 0
    """Index of the layer's rule in `DeviceMetadata.splits`."""

    @classmethod
    def of(
        cls, op: MLAAttentionOp, params: MLAParams, dtype: torch.dtype, device: torch.device
    ) -> LatentPagedAttention:
        capability = device_capability(device)
        rank = len(params.norm)
        decode_tiling = mla_tiling(params.num_heads, dtype, op.cache.dtype, capability)
        return cls(
            op,
            params,
            op.out.another(params.num_heads * (rank + params.rotated_dim), is_float32=False),
            op.out.another(params.num_heads * rank, is_float32=False),
            prefill_tiling=mla_tiling(MANY_VECTORS, dtype, op.cache.dtype, capability),
            decode_tiling=decode_tiling,
            num_programs=latent_decode_programs(device, decode_tiling),
        )

    def absorb(self, frame: Frame) -> None:
        """Write latents to the cache, and the absorbed queries."""
        params, metadata = self.params, frame.metadata
        queries = frame[self.op.queries]
        absorbed = frame[self.absorbed].view(len(queries), params.num_heads, -1)
        plain = queries.view(len(queries), params.num_heads, -1)[..., : params.plain_dim]
        torch.bmm(plain.transpose(0, 1), params.keys, out=absorbed[..., : len(params.norm)].transpose(0, 1))
        write_latents(
            frame[self.op.latents],
            queries,
            params.norm,
            params.norm_eps,
            frame.cos,
            frame.sin,
            metadata.positions,
            metadata.slot_mapping,
            self.op.cache,
            absorbed,
        )

    def attend(self, frame: Frame, workspace: Tensor) -> None:
        params, cache, metadata = self.params, self.op.cache, frame.metadata
        absorbed, out = (
            frame[value].view(-1, params.num_heads, value.size // params.num_heads)
            for value in (self.absorbed, self.latents)
        )
        sizes, splits = metadata.sizes, metadata.splits[self.split_index]
        if num_decodes := sizes.num_decodes:
            num_splits = sizes.num_splits[self.split_index]
            attend_latent_decodes(
                absorbed[:num_decodes],
                cache,
                metadata.block_table[:num_decodes],
                metadata.seq_lens[:num_decodes],
                splits.work,
                splits.num_work,
                splits.row_starts,
                SplitWorkspace.of(workspace, num_splits, params.num_heads, out.shape[2]),
                out[:num_decodes],
                scale=params.scale,
                tiling=self.decode_tiling,
                num_programs=self.num_programs,
                split_keys=latent_split_keys(params.num_heads),
            )
        if sizes.num_tiles:
            attend_latent_tiles(
                absorbed,
                cache,
                metadata.block_table,
                metadata.seq_lens,
                metadata.query_start_loc,
                metadata.tiles,
                out,
                scale=params.scale,
                tiling=self.prefill_tiling,
            )

    def expand(self, frame: Frame) -> None:
        """Multiply the weighted sums of latents with the matrices that make values of them."""
        params = self.params
        latents, out = (
            frame[value].view(-1, params.num_heads, value.size // params.num_heads).transpose(0, 1)
            for value in (self.latents, self.op.out)
        )
        torch.bmm(latents, params.values.transpose(1, 2), out=out)

    def scratch(self, sizes: MetadataSizes) -> Sequence[TensorSpec]:
        rank, num_splits = len(self.params.norm), sizes.num_splits[self.split_index]
        return [TensorSpec((SplitWorkspace.num_floats(num_splits, self.params.num_heads, rank),), torch.float32)]
