"""The updates of one model's weights: at most one is open, and all use the same memory.

Owned by the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import ReferenceType

from torch import Tensor

from eagleray.errors import WeightsMismatch
from eagleray.kernels.cpu.huge_pages import WeightChunk
from eagleray.models.layers.layer import WeightGroup
from eagleray.models.part import ModelPart
from eagleray.models.staging import StagingMemory
from eagleray.models.tensor_names import TensorNames
from eagleray.models.update import WeightUpdate


class ModelUpdates:
    """`find_groups` returns the groups that the rank has now, `find_names` the names of the whole model."""

    def __init__(
        self,
        part: ModelPart,
        *,
        find_groups: Callable[[], Iterable[WeightGroup]],
        find_names: Callable[[], TensorNames],
        num_threads: int,
    ) -> None:
        self.kept_fp8: frozenset[str] = frozenset()
        """See `StoredWeights`."""
        self.refusal = ""
        """Reason why the weights cannot be replaced; empty if they can."""
        self.num_loads = 0
        """Number of calls of `load` that replaced weights without an update."""
        self._has_replaced = False
        """Whether an earlier update has replaced weights."""
        self._part = part
        self._find_groups = find_groups
        self._find_names = find_names
        self._num_threads = num_threads
        self._names: TensorNames | None = None
        self._staging: StagingMemory | None = None
        self._open: WeightUpdate | None = None
        self._loading: WeightUpdate | None = None
        """The groups that `load` has replaced, and the tensors that wait since."""

    @property
    def has_new_weights(self) -> bool:
        """Whether an update is open, or tensors wait since a `load`."""
        return self._is_open or (self._loading is not None and self._loading.is_waiting)

    @property
    def has_replaced(self) -> bool:
        """Whether any weight was replaced since the model was loaded."""
        updates = (self._open, self._loading)
        return self._has_replaced or any(update is not None and update.has_replaced for update in updates)

    def prepare(self) -> list[ReferenceType[WeightChunk]]:
        """Reserve addresses for the new weights of updates that are not in place, and return their chunks, whose pages
        may be requested in advance. They are freed with the memory of updates."""
        self._staging = self._staging or StagingMemory(self._part.device)
        return self._staging.prepare(part for group in self._find_groups() for part in group.places()[0])

    def start(self, *, in_place: bool) -> WeightUpdate:
        """See `Model.start_update`."""
        self._check_allowed()
        assert not self._is_open, "an update is open"
        self.forget()
        self._has_replaced = self.has_replaced
        self._open = self._make(in_place=in_place, mirrors=not in_place)
        return self._open

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """See `Model.load_weights`."""
        self._check_allowed()
        if self._open is not None and self._open.is_open:
            return self._open.add(weights)
        self._loading = self._loading or self._make()
        self.num_loads += 1
        names = self._loading.add(weights)
        mismatch = self._loading.tied_mismatch()
        self._loading.apply()  # in any case: only some ranks may find the difference, and all must have the same
        if mismatch is not None:
            raise mismatch
        return names

    def forget(self) -> None:
        """Forget which groups `load` has replaced, and the tensors that wait."""
        if self._loading is not None:
            self._has_replaced = self.has_replaced
            self._loading.drop()
            self._loading = None

    def release(self) -> None:
        """Free the memory, unless there are new weights in it."""
        if not self.has_new_weights:
            self.forget()
            self._has_replaced = self.has_replaced
            self._open = self._staging = None

    def _check_allowed(self) -> None:
        """Raise `WeightsMismatch` if the weights cannot be replaced, or have a format in which no trainer has them."""
        if self.refusal:
            raise WeightsMismatch(self.refusal)
        if (stored := self._part.spec.stored_format) is not None:
            raise WeightsMismatch(
                f"the model's weights are stored as {stored.method}, and such weights cannot be updated; start the "
                "instance with a checkpoint of plain weights, or of FP8 weights with a scale for each block"
            )

    @property
    def _is_open(self) -> bool:
        return self._open is not None and self._open.is_open

    def _make(self, *, in_place: bool = False, mirrors: bool = False) -> WeightUpdate:
        self._names = self._names or self._find_names()
        self._staging = self._staging or StagingMemory(self._part.device)
        return WeightUpdate(
            self._find_groups(),
            self._names,
            self._part.rules,
            self._part.kernels,
            self._staging,
            kept_fp8=self.kept_fp8,
            num_threads=self._num_threads,
            in_place=in_place,
            mirrors=mirrors,
        )
