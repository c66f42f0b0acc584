"""Updates of a model's weights that also update the layer of its checkpoint that drafts.

The layer is beside the model and has copies of the embedding and of the head. So each tensor that comes is offered to
both. A trainer may not train the layer: then its own tensors stay, and fewer of its proposals are right. Made by the
worker that has the layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from eagleray.log import get_logger
from eagleray.models.base import Model
from eagleray.models.deepseek_drafts import DeepSeekDrafts
from eagleray.worker.staged_update import StagedUpdate

logger = get_logger(__name__)


class LayerUpdates:
    """Starts the updates of `model` and `layer`. At most one is open."""

    def __init__(self, model: Model, layer: DeepSeekDrafts) -> None:
        self._model = model
        self._layer = layer
        self._is_left_behind = False
        """Whether the last update had no tensor of the layer, which is logged once."""

    def start(self, *, in_place: bool) -> StagedUpdate:
        """See `Model.start_update`."""
        parts = self._model.start_update(in_place=in_place), self._layer.start_update(in_place=in_place)
        return LayerUpdate(self, *parts, prefix=f"{self._layer.layer_name}.")

    def on_applied(self, *, has_layer: bool) -> None:
        """Log the first update in a row that did not have the layer."""
        if not has_layer and not self._is_left_behind:
            logger.warning(
                "an update of the weights has no tensor %s.*: the layer for drafts stays as it is, and fewer of its "
                "proposals may be right; no token changes by that",
                self._layer.layer_name,
            )
        self._is_left_behind = not has_layer


class LayerUpdate(StagedUpdate):
    """An update of a model, and of the layer whose tensors begin with `prefix`."""

    def __init__(self, updates: LayerUpdates, model: StagedUpdate, layer: StagedUpdate, *, prefix: str) -> None:
        self._updates = updates
        self._model = model
        self._layer = layer
        self._prefix = prefix
        self._has_layer = False

    def check(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `StagedUpdate.check`."""
        weights = list(weights)
        self._model.check(weights)
        self._layer.check(weights)

    def add(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """See `StagedUpdate.add`."""
        weights = list(weights)
        accepted = self._model.add(weights)
        self._layer.add(weights)
        of_layer = {name for name, _ in weights if name.startswith(self._prefix)}
        self._has_layer = self._has_layer or bool(of_layer)
        return accepted | of_layer

    def missing(self) -> Sequence[str]:
        """See `StagedUpdate.missing`."""
        return sorted({*self._model.missing(), *self._layer.missing()})

    def untouched(self) -> Sequence[str]:
        """Return the names of the model's weights of which nothing has come. A complete update need not have the
        layer."""
        return self._model.untouched()

    def apply(self) -> None:
        """See `StagedUpdate.apply`."""
        self._model.apply()
        self._layer.apply()
        self._updates.on_applied(has_layer=self._has_layer)

    def drop(self) -> None:
        """See `StagedUpdate.drop`."""
        self._model.drop()
        self._layer.drop()
