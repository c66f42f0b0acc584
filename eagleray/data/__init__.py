"""Stages for Ray Data: a model generates, embeds, classifies or scores the rows of a dataset.

Needs Ray Data: `pip install "eagleray[data]"`. See docs/ray_data.md.
"""

from eagleray.data import requirements

requirements.check()

from eagleray.data.options import StageKeywords  # noqa: E402
from eagleray.data.pipeline import classify, embed, generate, score  # noqa: E402

__all__ = ["StageKeywords", "classify", "embed", "generate", "score"]
