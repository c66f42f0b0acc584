"""Experts with packed weights: parameters for ops of a pass, and products that code which routes itself can call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from eagleray.errors import CheckpointError
from eagleray.kernels.backend import ExpertProducts
from eagleray.kernels.cpu.abi import CStruct, abi
from eagleray.kernels.cpu.grouped import Grouping
from eagleray.kernels.cpu.linear import NativeLinear, threads_for
from eagleray.kernels.expert_slots import ExpertSlotMap
from eagleray.kernels.params import RouterParams
from eagleray.kernels.recording import LinearWeight

SCORINGS = {"softmax": abi.SCORING_SOFTMAX, "sigmoid": abi.SCORING_SIGMOID}
GROUP_SCORES = {"max": abi.GROUP_SCORE_MAX, "top2": abi.GROUP_SCORE_TOP2}

SINGLE_THREAD_ROWS = 128
"""Up to this number of rows one thread has routed them before another one wakes."""
SINGLE_THREAD_NUMBERS = 1 << 18
"""Up to this number of summands one thread sums them."""
EXPERT_TOKENS = 512
"""Tokens that go through the experts together, so few that intermediate results stay in the processor's cache."""


def c_router_params(router: RouterParams, num_experts: int) -> CStruct:
    """Convert to C. The struct points into `router`."""
    router.check(num_experts)
    bias = router.correction_bias
    return abi.CRouterParams(
        num_experts=num_experts,
        top_k=router.top_k,
        scoring=SCORINGS[router.scoring],
        correction_bias=None if bias is None else bias.data_ptr(),
        num_groups=router.num_groups,
        top_groups=router.top_groups,
        group_score=GROUP_SCORES[router.group_score],
        renormalize=router.renormalize,
        renormalize_eps=router.renormalize_eps,
        scale=router.scale,
        round_weights=router.round_weights,
    )


def c_slot_map(slots: ExpertSlotMap | None, num_experts: int) -> CStruct:
    """Convert to C. The struct points into the arrays of `slots`."""
    if slots is None:
        return abi.CExpertSlotMap()
    assert slots.table.shape[0] == len(slots.num_copies) == num_experts
    assert all(a.flags.c_contiguous and a.dtype.name == "int32" for a in (slots.table, slots.num_copies))
    return abi.CExpertSlotMap(
        table=slots.table.ctypes.data, num_copies=slots.num_copies.ctypes.data, max_copies=slots.table.shape[1]
    )


def native_route(
    library: ctypes.CDLL, scores: Tensor, router: RouterParams, dtype: torch.dtype, num_threads: int
) -> tuple[Tensor, Tensor]:
    """See `KernelBackend.route`. Ids are int32 and weights float32, rounded to `dtype` if they are to be rounded."""
    n, num_experts = scores.shape
    assert scores.dtype == torch.float32 and scores.stride(1) == 1
    ids = torch.empty((n, router.top_k), dtype=torch.int32)
    weights = torch.empty((n, router.top_k), dtype=torch.float32)
    library.er_route(
        c_router_params(router, num_experts),
        scores.data_ptr(),
        scores.stride(0),
        n,
        ids.data_ptr(),
        weights.data_ptr(),
        int(dtype == torch.bfloat16),
        1 if n <= SINGLE_THREAD_ROWS else num_threads,
    )
    return ids, weights


def aligned(memory: Tensor) -> int:
    """Return the first address in `memory` that is a multiple of 64."""
    return -(-memory.data_ptr() // 64) * 64


class ExpertScratch:
    """Working memory that the layers share, because one thread computes them one after another."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.int64)

    def reserve(self, size: int) -> int:
        """Return the address of `size` bytes, a multiple of 64. Overwrites what earlier calls returned."""
        words = -(-size // 8) + 8
        if words > len(self._memory):
            self._memory = torch.empty(words, dtype=torch.int64)
        return aligned(self._memory)


class NativeProducts(ExpertProducts):
    """See `ExpertProducts`. A row's numbers do not depend on the other rows."""

    def __init__(
        self,
        library: ctypes.CDLL,
        gate_up: Sequence[LinearWeight],
        down: Sequence[LinearWeight],
        scratch: ExpertScratch,
        *,
        num_threads: int,
    ) -> None:
        self._gate_up, self._down = _linears(gate_up), _linears(down)
        self.num_slots = len(self._down)
        assert len(self._gate_up) == self.num_slots > 0
        parts = self._gate_up, self._down
        weights = [_pointers([one.packed for one in part]) for part in parts]
        biases = [_pointers([one.bias for one in part if one.bias is not None]) for part in parts]
        assert all(len(bias) in (0, self.num_slots) for bias in biases), "all experts have a bias, or none"
        self._pointers = weights, biases
        gate_up_grouping, down_grouping = map(_common_grouping, parts)
        self.c_experts = abi.CExperts(
            num_slots=self.num_slots,
            hidden=self._down[0].n,
            inner=self._down[0].k,
            gate_up=ctypes.addressof(weights[0]),
            down=ctypes.addressof(weights[1]),
            gate_up_grouping=None if gate_up_grouping is None else gate_up_grouping.pointer,
            down_grouping=None if down_grouping is None else down_grouping.pointer,
            gate_up_bias=ctypes.addressof(biases[0]) if len(biases[0]) else None,
            down_bias=ctypes.addressof(biases[1]) if len(biases[1]) else None,
            epilogue=self._gate_up[0].epilogue,
            swiglu=self._gate_up[0].swiglu,
        )
        """The experts as a C struct, which points into this object."""
        self._library = library
        self._scratch = scratch
        self._num_threads = num_threads
        self._dtype = self._down[0].dtype
        self._num_bytes = self._gate_up[0].packed.nbytes + self._down[0].packed.nbytes
        self._kind = int(self._dtype == torch.bfloat16)

    def pairs(self, x: Tensor, slots: Tensor) -> Tensor:
        x, slots = self._check(x, slots)
        n, k = slots.shape
        outputs = torch.empty((n, k, x.shape[1]), dtype=torch.float32)
        if n * k > 0:
            rows = x.data_ptr(), x.shape[1], n, slots.data_ptr(), k
            self._library.er_compute_pairs(self.c_experts, *rows, outputs.data_ptr(), *self._arguments(n, k))
        return outputs

    def sums(self, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        x, slots = self._check(x, slots)
        weights = weights.contiguous()
        assert weights.dtype == torch.float32 and weights.shape == slots.shape
        n, k = slots.shape
        total = torch.zeros(x.shape, dtype=torch.float32)
        if n * k > 0:
            rows = x.data_ptr(), x.shape[1], n, slots.data_ptr(), k
            self._library.er_sum_pairs(
                self.c_experts, *rows, weights.data_ptr(), total.data_ptr(), *self._arguments(n, k)
            )
        return total

    def weighted_sum(self, outputs: Tensor, weights: Tensor) -> Tensor:
        n, k, size = outputs.shape
        outputs, weights = outputs.contiguous(), weights.contiguous()
        assert outputs.dtype == weights.dtype == torch.float32 and weights.shape == (n, k)
        total = torch.zeros((n, size), dtype=torch.float32)
        places = torch.arange(n * k, dtype=torch.int32)
        self._library.er_combine(
            *(part.data_ptr() for part in (outputs, places, weights)),
            *(n, k, size, total.data_ptr(), size),
            1 if outputs.numel() <= SINGLE_THREAD_NUMBERS else self._num_threads,
        )
        return total

    def storage(self, slot: int) -> list[Tensor]:
        return [*self._gate_up[slot].storage(), *self._down[slot].storage()]

    def _check(self, x: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return both in the layout of C."""
        assert x.dtype == self._dtype and x.shape[1] == self.c_experts.hidden and len(x) == len(slots)
        return x.contiguous(), slots.to(torch.int32).contiguous()

    def _arguments(self, n: int, k: int) -> tuple[int, int, int, int]:
        """Return the scratch memory, the number of rows that it serves, the number format, and the threads."""
        tokens = min(EXPERT_TOKENS, 1 << (n - 1).bit_length())
        size = self._library.er_experts_scratch_size(self.c_experts, k, tokens, self._kind)
        num_weights = 3 * k * self.c_experts.hidden * self.c_experts.inner
        threads = threads_for(num_weights, k * self._num_bytes, n, self._num_threads)
        return self._scratch.reserve(size), tokens, self._kind, threads


def _linears(weights: Sequence[LinearWeight]) -> list[NativeLinear]:
    assert all(isinstance(weight, NativeLinear) for weight in weights)
    return [weight for weight in weights if isinstance(weight, NativeLinear)]


def _common_grouping(experts: Sequence[NativeLinear]) -> Grouping | None:
    """Return the layout of the experts' weights, None for plain ones. Raises `CheckpointError` if they differ, because
    one op computes all experts, and a slot may get any of them."""
    groupings = {expert.grouping for expert in experts}
    if len(groupings) > 1:
        raise CheckpointError(
            "the experts of a layer are stored in different formats, but all must have the same format, size of "
            "groups and dtype of scales; quantize all of them alike"
        )
    return groupings.pop()


def _pointers(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
