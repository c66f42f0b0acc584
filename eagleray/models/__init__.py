"""From a checkpoint directory to logits over a paged KV cache.

`registry.load_model` reads config.json into a `ModelSpec` (spec), the weights through `loading`, and builds a `Model`
(base) of `layers` and `moe`, which compute with the `kernels` of the device. A family (llama, qwen2, …) is a small
file that says what is special about it. Which part of a layer a tensor-parallel rank has is in `shares`; which layers
a pipeline stage has is in `parallel.Mesh`. Driven by the worker.
"""
