"""Experts on a GPU: routed, sorted by slot, multiplied and summed up without a read by the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eagleray.kernels.backend import ExpertProducts
from eagleray.kernels.cuda.launch import Frame, TensorSpec
from eagleray.kernels.cuda.linear import CudaLinear, slot_weight, stack_weights, weight_memory
from eagleray.kernels.cuda.metadata import MetadataSizes
from eagleray.kernels.cuda.triton.grouped_linear import grouped_gated_linear, grouped_linear, pair_tile
from eagleray.kernels.cuda.triton.routing import (
    DeviceSlotMap,
    PairTiles,
    align,
    align_workspace,
    max_tiles,
    route,
)
from eagleray.kernels.cuda.triton.weighted_sum import weighted_sum
from eagleray.kernels.quantized import BlockWeight
from eagleray.kernels.recording import ExpertsOp, LinearWeight, Value


class CudaExperts(ExpertProducts):
    """The experts in this rank's slots. Their weights are moved into one tensor each for gate and up and for down, of
    which the given weights become views."""

    def __init__(self, gate_up: Sequence[LinearWeight], down: Sequence[LinearWeight], dtype: torch.dtype) -> None:
        self._linears = [_linears(gate_up), _linears(down)]
        self._dtype = dtype
        self.num_slots = len(down)
        assert len(gate_up) == self.num_slots > 0
        (self._gate_up, self._gate_up_bias), (self._down, self._down_bias) = (
            _stack(linears) for linears in self._linears
        )
        self._clamp = self._linears[0][0].clamp

    def pairs(self, x: Tensor, slots: Tensor) -> Tensor:
        num_tokens, top_k = slots.shape
        outputs = x.new_zeros((num_tokens, top_k, x.shape[1]))
        if num_tokens:
            specs = self._product_scratch(num_tokens, top_k, x.dtype)
            scratch = [torch.empty(spec.shape, dtype=spec.dtype, device=x.device) for spec in specs]
            self._multiply(x, slots.to(torch.int32).contiguous(), outputs, scratch)
        return outputs.float()

    def sums(self, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        return self.weighted_sum(self.pairs(x, slots), weights)

    def weighted_sum(self, outputs: Tensor, weights: Tensor) -> Tensor:
        num_tokens, top_k, size = outputs.shape
        out = outputs.new_zeros((num_tokens, size))
        if num_tokens:
            slots = torch.zeros((num_tokens, top_k), dtype=torch.int32, device=outputs.device)
            weighted_sum(outputs.contiguous(), weights.contiguous(), slots, out=out, accumulate=False)
        return out

    def storage(self, slot: int) -> list[Tensor]:
        return [part for linears in self._linears for part in linears[slot].storage()]

    def launch(
        self, op: ExpertsOp, out: Value, *, accumulates: bool
    ) -> tuple[Callable[..., None], Callable[[MetadataSizes], Sequence[TensorSpec]]]:
        """Return the function and the working memory of the launch that computes `op`. `accumulates`: the result is
        added to `out`."""
        top_k, dtype, num_experts = op.router.top_k, self._dtype, op.scores.size
        device = weight_memory(self._gate_up)[0].device
        slot_map = None if op.slots is None else DeviceSlotMap(*op.slots.on(device))

        def compute(frame: Frame, *scratch: Tensor) -> None:
            (ids, weights, own_slots, outputs), trace = scratch[:4], op.trace
            route(
                frame[op.scores],
                op.router,
                num_tokens=frame.metadata.num_tokens,
                dtype=dtype,
                ids=ids,
                weights=weights,
                slot_map=slot_map,
                slots=None if slot_map is None else own_slots,
                counts=None if trace is None else trace.counts[op.layer],
                traced_ids=trace.buffer(op.layer) if trace is not None and trace.keeps_ids else None,
            )
            found = ids if slot_map is None else own_slots
            self._multiply(frame[op.x], found, outputs, scratch[4:])
            weighted_sum(outputs, weights, found, out=frame[out], accumulate=accumulates)

        def scratch(sizes: MetadataSizes) -> Sequence[TensorSpec]:
            pairs = sizes.num_tokens, top_k
            return [
                TensorSpec(pairs, torch.int32),
                TensorSpec(pairs, torch.float32),
                TensorSpec(pairs, torch.int32),
                TensorSpec((*pairs, self._down.shape[1]), dtype),
                *self._product_scratch(sizes.num_tokens, top_k, dtype),
            ]

        assert op.slots is not None or num_experts == self.num_slots
        return compute, scratch

    def _product_scratch(self, num_tokens: int, top_k: int, dtype: torch.dtype) -> list[TensorSpec]:
        """Return the working memory of `_multiply`."""
        num_pairs = num_tokens * top_k
        tile = pair_tile(num_pairs, self.num_slots)
        capacity = max_tiles(num_pairs, self.num_slots, tile)
        return [
            TensorSpec((capacity * tile,), torch.int32),
            TensorSpec((capacity,), torch.int32),
            TensorSpec((1,), torch.int32),
            TensorSpec((align_workspace(num_pairs, self.num_slots),), torch.int32),
            TensorSpec((num_pairs, self._down.shape[2]), dtype),
        ]

    def _multiply(self, x: Tensor, slots: Tensor, outputs: Tensor, scratch: Sequence[Tensor]) -> None:
        """Write the output of the expert in each slot for each token to `outputs` [num_tokens, top_k, hidden_size],
        except for pairs without a slot."""
        sorted_pairs, tile_slot, num_tiles, workspace, inner = scratch
        tiles = PairTiles(sorted_pairs, tile_slot, num_tiles, pair_tile(slots.numel(), self.num_slots))
        align(slots, self.num_slots, tiles, workspace)
        grouped_gated_linear(x, self._gate_up, self._gate_up_bias, self._clamp, tiles, top_k=slots.shape[1], out=inner)
        grouped_linear(inner, self._down, self._down_bias, tiles, out=outputs.flatten(0, 1))


def _linears(weights: Sequence[LinearWeight]) -> list[CudaLinear]:
    assert all(isinstance(weight, CudaLinear) for weight in weights)
    return [weight for weight in weights if isinstance(weight, CudaLinear)]


def _stack(linears: Sequence[CudaLinear]) -> tuple[BlockWeight, Tensor | None]:
    """Return the weights [slots, out_features, in_features] and biases [slots, out_features] of all slots."""
    stacked = linears[0].stack
    if stacked is not None and stacked[0].shape[0] == len(linears) and all(it.stack is stacked for it in linears):
        return stacked
    weight = stack_weights([linear.weight for linear in linears])
    biases = [linear.bias for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(linears)), "all experts have a bias, or none"
    stacked = weight, torch.stack(biases) if biases else None
    for slot, linear in enumerate(linears):
        linear.stack = stacked
        linear.weight, linear.bias = slot_weight(weight, slot), None if stacked[1] is None else stacked[1][slot]
    return stacked
