"""The update of a model's weights by tensors that a trainer pushes, under the names of the checkpoint.

New weights are packed beside the old ones and then replace them at their addresses, which never change: recorded passes
and captured graphs keep pointers to them. Made by the model, driven by the worker between steps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from eagleray.errors import WeightsMismatch, WrongState
from eagleray.kernels.backend import KernelBackend
from eagleray.kernels.cpu.huge_pages import WeightChunk
from eagleray.models.layers.layer import WeightGroup, storage_of
from eagleray.models.pushed_weights import FP8, MaskWeights, PartialWeights, Pushed, PushedWeights
from eagleray.models.staging import Scratch, StagingMemory, copy_memory
from eagleray.models.stored_weights import SCALES_SUFFIX, WeightRules
from eagleray.models.tensor_names import TensorNames, wrong_shape
from eagleray.models.weights import Param, Weights

BATCH_BYTES = 256 << 20
"""Bytes of tensors that are taken from an iterator before complete groups are packed."""

Item = TypeVar("Item")

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(eq=False)
class GroupUpdate:
    """The tensors of a group that have come, and the new weights of the group once it is complete."""

    group: WeightGroup
    rules: WeightRules
    came: dict[str, Pushed] = field(default_factory=dict)
    staged: list[Tensor] | None = None
    """Memory of the new weights, in the order of `WeightGroup.places`."""
    tied: list[Tensor] | None = None
    """Memory of the packed tensor that came under the name that is tied to the group's, and may differ from it."""
    has_equal_tied: bool = False
    """Whether that tensor came in one batch with the group's present one, and is equal to it."""
    is_touched: bool = False
    is_packed: bool = False
    """Whether the group was complete before in this update. From then on its tensors may come alone."""

    def local_size(self) -> int:
        """Return the number of elements on this rank."""
        return sum(param.local_size for param in self.group.params)

    def forms(self) -> Iterator[WeightGroup]:
        """Yield the group in each form in which it may come."""
        yield self.group
        if self.group.alternative is not None:
            yield self.group.alternative

    def params(self) -> Iterator[Param]:
        """Yield every tensor that may come, also in another form, and scales."""
        for form in self.forms():
            for param in form.params:
                yield param
                if self.rules.can_be_fp8(param):
                    yield self.rules.scales_of(param)

    def complete_form(self) -> WeightGroup | None:
        """Return the form whose tensors have all come, or None."""
        return next((form for form in self.forms() if not self.missing(form)), None)

    def is_decodable(self, name: str) -> bool:
        """Whether the weight of a tensor that has come has plain numbers, or FP8 numbers and scales."""
        weight = name.removesuffix(SCALES_SUFFIX)
        if weight not in self.came or weight not in {param.name for param in self.group.params}:
            return False
        kind = self.came[weight].tensor.dtype
        return kind in FLOATS or (kind == FP8 and f"{weight}{SCALES_SUFFIX}" in self.came)

    def replaced(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the memory of old weights, of each copy on this rank, with that of the new ones."""
        for place in self.group.places():
            yield from zip(place, self.staged or (), strict=True)

    def release(self, memory: StagingMemory) -> None:
        """Release the memory of the new weights."""
        memory.release(self.staged or ())
        self.staged = None

    def forget(self, memory: StagingMemory) -> None:
        """Forget the tensors that have come, and release the copies of them that are not the new weights themselves."""
        staged = {part.data_ptr() for part in self.staged or ()}
        for pushed in self.came.values():
            if pushed.tensor.data_ptr() not in staged:
                pushed.release(memory)
        self.came.clear()

    def missing(self, form: WeightGroup) -> list[str]:
        """Return the names that a form of the group lacks."""
        lacking = [param.name for param in form.params if param.name not in self.came]
        there = [param for param in form.params if param.name in self.came]
        scales = [self.rules.scales_of(param).name for param in there if self.came[param.name].tensor.dtype == FP8]
        return lacking + [name for name in scales if name not in self.came]


class WeightUpdate:
    """New weights for the groups of a model, until they are applied or dropped.

    Tensors that complete a group are packed; the others wait, as copies of this rank's shards. With `in_place`, packed
    weights replace the old ones at once. With `mirrors`, chunks of memory all of whose weights are new are exchanged
    with the old ones instead of being copied. `num_threads` threads pack and copy until the update is dropped.
    """

    def __init__(
        self,
        groups: Iterable[WeightGroup],
        names: TensorNames,
        rules: WeightRules,
        kernels: KernelBackend,
        memory: StagingMemory,
        *,
        kept_fp8: frozenset[str] = frozenset(),
        num_threads: int = 1,
        in_place: bool = False,
        mirrors: bool = False,
    ) -> None:
        self.is_open = True
        """Whether the update was not dropped yet."""
        self.has_replaced = False
        """Whether any weights of the model were replaced."""
        self._names = names
        self._rules = rules
        self._kernels = kernels.with_memory(memory)
        self._memory = memory
        self._scratch = Scratch(rules.device)
        self._kept_fp8 = kept_fp8
        self._in_place = in_place
        self._mirrors = mirrors
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, "update")
        self._lock = threading.Lock()  # a method of the workers may load weights while a trainer's are received
        self._groups = [GroupUpdate(group, rules) for group in _distinct(groups)]
        self._pending: dict[GroupUpdate, None] = {}
        """Groups of tensors that came since the last `apply`. A model may have ten thousands more."""
        self._owners: dict[str, list[tuple[GroupUpdate, Param]]] = {}
        for group in self._groups:
            for param in group.params():
                self._owners.setdefault(param.name, []).append((group, param))

    def add(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take whole tensors of any device and stride, and return the names of all that are not dropped. The tensors
        must not be changed until the call returns.

        Of equal names the last one counts, also in another call; but if a quantized group is complete already, it is
        expected as a whole again when one of its tensors comes. Raises `WeightsMismatch` for a name, shape or dtype
        that does not fit, and takes neither the tensor nor those beside it; and `WrongState` after `drop`.
        """
        accepted: set[str] = set()
        for batch in _batches(weights):
            with self._lock:
                accepted |= self._add_batch(batch)
        return accepted

    def check(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raise `WeightsMismatch` for a name that no rank has, or a shape or dtype that this rank cannot take. The
        tensors' elements are not read, so they may be on the device `meta`."""
        for name, tensor in weights:
            self._resolve(name, tensor)

    def missing(self) -> list[str]:
        """Return the names that begun groups lack. Raises `WeightsMismatch` if tied tensors have come that differ."""
        if (mismatch := self.tied_mismatch()) is not None:
            raise mismatch
        waiting = [group for group in self._pending if group.came]
        return sorted(name for group in waiting for name in min(map(group.missing, group.forms()), key=len))

    def tied_mismatch(self) -> WeightsMismatch | None:
        """Return an error if a tensor has come that is tied to one of this rank's and differs from it."""
        tied = [group for group in self._pending if group.tied is not None]
        return self._names.tied_mismatch() if not all(map(self._has_tied_numbers, tied)) else None

    def untouched(self) -> list[str]:
        """Return the names of this rank's tensors in groups for which nothing has come."""
        return sorted({param.name for group in self._groups if not group.is_touched for param in group.group.params})

    @property
    def is_waiting(self) -> bool:
        """Whether tensors have come that are neither applied nor dropped."""
        return any(group.came or group.staged is not None for group in [*self._pending])  # another thread may add some

    def apply(self) -> None:
        """Replace old weights by the new ones of complete groups, between two steps."""
        staged = [group for group in self._pending if group.staged is not None]
        self.has_replaced = self.has_replaced or bool(staged)
        replaced = [pair for group in staged for pair in group.replaced()]
        chunks = self._memory.replaceable_chunks(replaced)
        # first, because a mirror has the old weights after the exchange
        self._run(_copy_pair, [pair for pair in replaced if WeightChunk.of(pair[0]) not in chunks])
        left = {chunk for chunk in chunks if not self._memory.exchange(chunk)}
        self._run(_copy_pair, [pair for pair in replaced if WeightChunk.of(pair[0]) in left])
        for group in staged:
            group.release(self._memory)
        for group in self._pending:
            self._memory.release(group.tied or ())
            group.tied, group.has_equal_tied = None, False
        self._pending = {group: None for group in self._pending if group.came}

    def drop(self) -> None:
        """Drop the tensors that were not applied. The memory is kept for the next update."""
        self.is_open = False
        self._pool.shutdown()  # first: another thread may still be in `add`
        self._groups.clear()
        self._pending.clear()
        self._owners.clear()
        self._memory.reset()

    def _add_batch(self, batch: Mapping[str, Tensor]) -> set[str]:
        self._names.check_tied(batch)
        accepted, resolved = set[str](), dict[str, Tensor]()
        for name, tensor in batch.items():
            parts = self._resolve(name, tensor.detach())
            resolved |= parts
            if parts:
                accepted.add(name)
        touched = {group: None for name, tensor in resolved.items() for group in self._take(name, tensor)}
        self._pending |= touched
        complete = [group for group in touched if group.complete_form() is not None]
        # the largest first, so that no thread begins with one when the others have finished
        self._run(self._stage, sorted(complete, key=GroupUpdate.local_size, reverse=True))
        self._run(self._merge, [group for group in touched if group.came and self._can_merge(group)])
        for group in touched:
            for param in group.params():
                if param.name in group.came:
                    group.came[param.name] = group.came[param.name].copied(param, self._memory)
        self._take_tied(batch)
        self._synchronize()  # tensors may be overwritten now
        return accepted

    def _resolve(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the tensors of the checkpoint for which a pushed tensor stands. Raises `WeightsMismatch`."""
        parts = dict(self._names.resolve(name, tensor))
        for each, part in parts.items():
            for _, param in self._owners.get(each, ()):
                self._check(param, part)
        if self._names.tied is not None and name == self._names.tied[1]:
            for _, param in self._owners.get(self._names.tied[0], ()):
                self._check(replace(param, name=name), tensor)
        return parts

    def _check(self, param: Param, tensor: Tensor) -> None:
        """Raise `WeightsMismatch` unless the tensor has the shape and a dtype of `param`."""
        if tuple(tensor.shape) != param.shape:
            raise wrong_shape(param.name, tensor, param.shape)
        if param.dtype == torch.uint8:
            expected: Sequence[torch.dtype] = (torch.uint8,)
        else:
            expected = (*FLOATS, FP8) if f"{param.name}{SCALES_SUFFIX}" in self._owners else FLOATS
        if tensor.dtype not in expected:
            supported = ", ".join(map(_dtype_name, expected))
            raise WeightsMismatch(f"tensor {param.name!r} is of {_dtype_name(tensor.dtype)}; supported are {supported}")

    def _take(self, name: str, tensor: Tensor) -> Iterator[GroupUpdate]:
        for group, _ in self._owners.get(name, ()):
            group.is_touched = True
            if (earlier := group.came.pop(name, None)) is not None:
                earlier.release(self._memory)
            group.came[name] = Pushed(tensor)
            yield group

    def _take_tied(self, batch: Mapping[str, Tensor]) -> None:
        """Keep a tensor that has come under the tied name. It is compared at the end: the other one may come later."""
        if self._names.tied is None or self._names.tied[1] not in batch:
            return
        first, second = self._names.tied
        groups = [group for group, _ in self._owners.get(first, ())]
        for group in groups:
            self._memory.release(group.tied or ())
            group.tied, group.has_equal_tied = None, first in batch  # see `check_tied`
            self._pending[group] = None
        if first not in batch:
            pushed = Pushed(batch[second].detach())
            self._run(partial(self._pack_tied, pushed), groups)

    def _pack_tied(self, pushed: Pushed, group: GroupUpdate) -> None:
        (param,) = group.group.params
        group.tied = self._pack(group.group, PushedWeights(self._rules, {param.name: pushed}, self._scratch))

    def _has_tied_numbers(self, group: GroupUpdate) -> bool:
        """Whether the tensor that came under the tied name has the numbers of the group, the new ones if they came."""
        present = group.staged or group.group.places()[0]
        return all(torch.equal(one, other) for one, other in zip(group.tied or (), present, strict=True))

    def _stage(self, group: GroupUpdate) -> None:
        """Pack the new weights of a complete group."""
        form = group.complete_form()
        assert form is not None
        weights = PushedWeights(self._rules, group.came, self._scratch, kept_fp8=self._kept_fp8)
        places = group.group.places()
        self._finish(group, self._pack(form, weights, places[0]), places)

    def _can_merge(self, group: GroupUpdate) -> bool:
        """Whether tensors that have come can replace a part of the packed weights: these are the same numbers in
        another order, and not quantized ones."""
        names = {param.name for param in group.group.params}
        is_quantized = bool(self._rules.quantizers) or not names.isdisjoint(self._kept_fp8)
        return group.is_packed and not is_quantized and all(map(group.is_decodable, group.came))

    def _merge(self, group: GroupUpdate) -> None:
        """Replace the part of the packed weights that belongs to the tensors that have come. A mask, which is one for
        these tensors and zero for the others, is packed in the same way and selects that part."""
        form, places = group.group, group.group.places()
        new = self._pack(form, PartialWeights(self._rules, group.came, self._scratch), places[0])
        masks = self._pack(form, MaskWeights(self._rules, group.came, self._scratch))
        for old, part, mask in zip(group.staged or places[0], new, masks, strict=True):
            part.bitwise_and_(mask).bitwise_or_(mask.bitwise_not_().bitwise_and_(old))
        self._memory.release(masks)
        self._finish(group, new, places)

    def _pack(self, form: WeightGroup, weights: Weights, replaced: Sequence[Tensor] = ()) -> list[Tensor]:
        """Return the memory of packed weights. `replaced`: that of the old ones, which they are to replace."""
        self._scratch.reset()
        with self._memory.mirroring(replaced if self._mirrors else ()):
            return self._memory.keep(storage_of(form.make(weights, self._kernels)))

    def _finish(self, group: GroupUpdate, packed: list[Tensor], places: list[list[Tensor]]) -> None:
        sizes = [part.nbytes for part in packed]
        if any([part.nbytes for part in place] != sizes for place in places):
            self._memory.release(packed)
            group.forget(self._memory)
            name = group.group.params[0].name
            raise WeightsMismatch(f"tensor {name!r} has another quantization than the weights of the model have")
        if group.has_equal_tied:  # it must equal the new weights, too
            group.tied, group.staged = self._memory.keep(group.staged or places[0]), None
            group.has_equal_tied = False
        group.release(self._memory)
        group.staged = packed
        group.forget(self._memory)
        group.is_packed = True
        if self._in_place:
            self._replace(group)

    def _replace(self, group: GroupUpdate) -> None:
        self.has_replaced = True
        for pair in group.replaced():
            _copy_pair(pair)
        group.release(self._memory)

    def _run(self, function: Callable[[Item], None], items: Sequence[Item]) -> None:
        if not self.is_open:
            raise WrongState("the weight update was dropped")
        self._synchronize()
        left = deque(items)
        # one task for each thread, because to submit one takes longer than to pack a norm
        for _ in self._pool.map(partial(self._run_left, function), [left] * min(self._num_threads, len(items))):
            pass
        if left:
            raise WrongState("the weight update was dropped")
        self._synchronize()

    def _run_left(self, function: Callable[[Item], None], left: deque[Item]) -> None:
        """Call a function with items that no other thread has taken. If it raises an error, all threads end."""
        while self.is_open:
            try:
                item = left.popleft()
            except IndexError:
                return
            try:
                function(item)
            except BaseException:
                left.clear()
                raise

    def _synchronize(self) -> None:
        """Wait for the device: steps, trainers and the threads of this update have streams of their own."""
        if self._rules.device.type == "cuda":
            torch.cuda.synchronize(self._rules.device)


def _copy_pair(pair: tuple[Tensor, Tensor]) -> None:
    old, new = pair
    copy_memory(new, old)


def _distinct(groups: Iterable[WeightGroup]) -> Iterator[WeightGroup]:
    """Yield the groups that have tensors; an expert with several copies on this rank once."""
    seen: set[Param] = set()
    for group in groups:
        if group.params and group.params[0] not in seen:
            seen.add(group.params[0])
            yield group


def _batches(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    if isinstance(weights, list):  # all are there
        yield dict(weights)
        return
    batch: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in weights:
        batch[name] = tensor
        num_bytes += tensor.nbytes
        if num_bytes > BATCH_BYTES:
            yield batch
            batch, num_bytes = {}, 0
    if batch:
        yield batch


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
