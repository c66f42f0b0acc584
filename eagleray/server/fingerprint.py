"""The fingerprint of a server in answers: equal for servers whose answers to a seeded request are equal. Pure."""

from __future__ import annotations

from hashlib import blake2b

from eagleray.config.sections import Config


def system_fingerprint(config: Config, version: str) -> str:
    """Return the name of this version with this model, number format and parallelism.

    The number of engines counts where they share experts. Elsewhere answers do not depend on it, and scaling changes
    it.
    """
    model, parallel = config.model, config.parallel
    sizes = {
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "dp": parallel.data_parallel_size if parallel.enable_expert_parallel else 1,
    }
    names = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    if parallel.enable_expert_parallel:
        names.append("ep")
    hashed = repr((version, model.model, model.dtype, model.quantization, names))
    return "-".join(["eagleray", version, *names, blake2b(hashed.encode(), digest_size=4).hexdigest()])
