"""Models: they turn the token ids of a batch into logits, over a paged KV cache.

`registry.load_model` reads the config.json of a checkpoint directory into a `ModelSpec` (spec) and makes a `Model`
(base) of `layers` and `moe`, which declare their tensors (weights). Then it loads these (loading), and the layers make
their operations with the `kernels` of the device. A family (llama, qwen2, …) is a subclass in its own file.
`sharding` says which part of a layer a tensor-parallel rank has, `parallel.mesh` which layers a pipeline stage has.
Driven by the worker.
"""
