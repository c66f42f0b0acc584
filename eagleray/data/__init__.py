"""Stages for Ray Data: a model generates, embeds, classifies or scores the rows of a dataset.

Needs Ray Data: `pip install "ray[data]>=2.60"`. See docs/ray_data.md.
"""

from eagleray.cluster.ray_libraries import explain_missing_library

MIN_RAY = (2, 60)
"""First version with the tested interface: `ActorPoolStrategy(max_concurrent_calls_per_actor=…)`, `repartition` with
`strict`, and checkpoints that commit files in two phases."""

if missing := explain_missing_library("ray.data", "eagleray.data", min_ray=MIN_RAY, extra="data"):
    raise ImportError(missing)

from eagleray.data.options import StageKeywords  # noqa: E402
from eagleray.data.pipeline import classify, embed, generate, score  # noqa: E402

__all__ = ["StageKeywords", "classify", "embed", "generate", "score"]
