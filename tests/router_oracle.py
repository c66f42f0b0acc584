"""transformers as the reference for the experts that compute a token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracle import MARGIN, oracle


class RouterOracle:
    """The choices of a checkpoint's routers."""

    def __init__(self, checkpoint: Path) -> None:
        self._oracle = oracle(checkpoint)
        modules = self._oracle.model.named_modules()
        self._routers = [module for _, module in modules if type(module).__name__.lower().endswith("topkrouter")]
        assert self._routers, "the model has no routers"

    def choices(self, token_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return experts [num_tokens, num_layers, top_k], the best first, and the scores by which they are ranked
        [num_tokens, num_layers, num_experts]."""
        outputs: list[Any] = []
        hooks = [router.register_forward_hook(lambda *call: outputs.append(call[-1])) for router in self._routers]
        try:
            self._oracle.logits(token_ids)
        finally:
            for hook in hooks:
                hook.remove()
        pairs = zip(self._routers, outputs, strict=True)
        ranks = torch.stack([_ranked_by(router, output[0].float()) for router, output in pairs], dim=1)
        experts = torch.stack([output[-1] for output in outputs], dim=1)
        order = ranks.gather(-1, experts).argsort(dim=-1, descending=True)  # DeepSeek's routers do not sort
        return experts.gather(-1, order).numpy(), ranks.numpy()


def _ranked_by(router: Any, logits: torch.Tensor) -> torch.Tensor:
    """Return the scores by which a router ranks experts. DeepSeek-V3 has a bias that is used only for the choice."""
    bias = getattr(router, "e_score_correction_bias", None)
    return logits if bias is None else logits.sigmoid() + bias


@cache
def router_oracle(checkpoint: Path) -> RouterOracle:
    return RouterOracle(checkpoint)


def assert_rows(checkpoint: Path, token_ids: Sequence[int], rows: np.ndarray, *, start: int = 0) -> None:
    """Assert that `rows` are the routed experts of a whole sequence from `start` on, for all tokens but the last
    one."""
    assert_some_rows(checkpoint, token_ids, rows, start=start)
    assert start + len(rows) == len(token_ids) - 1


def assert_some_rows(checkpoint: Path, token_ids: Sequence[int], rows: np.ndarray, *, start: int = 0) -> None:
    """Assert that `rows` are the routed experts of consecutive tokens. Experts with almost equal scores may be
    swapped."""
    experts, ranks = (array[start : start + len(rows)] for array in router_oracle(checkpoint).choices(token_ids))
    assert rows.shape == experts.shape
    assert rows.dtype == (np.uint8 if ranks.shape[-1] <= 256 else np.uint16)
    ordered = np.sort(rows, axis=-1)
    assert (ordered[..., 1:] != ordered[..., :-1]).all(), "an expert is named twice"
    found = np.take_along_axis(ranks, rows.astype(np.int64), axis=-1)
    behind = np.abs(found - np.take_along_axis(ranks, experts, axis=-1))
    wrong = np.argwhere((rows != experts) & (behind > MARGIN))
    assert not len(wrong), (
        f"of {len(rows)} rows from {start}: {len(wrong)} experts are others, first {wrong[:3].tolist()}"
    )
