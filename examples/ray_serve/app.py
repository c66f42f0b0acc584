"""An application of Ray Serve: the HTTP API of eagleray in a replica, two once requests queue up.

serve run --app-dir examples/ray_serve app:app
"""

from __future__ import annotations

from eagleray.serve import build_app

app = build_app(
    None,  # the embedded model; else a checkpoint's directory or id, such as Qwen/Qwen3-0.6B
    num_threads=1,
    max_num_seqs=64,
    deployment={"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}},
)
