"""The formats that the weights of a model are quantized to when it is loaded."""

from __future__ import annotations

from eagleray.kernels.backend import KernelBackend
from eagleray.kernels.quantized import WeightFormat
from eagleray.models.spec import ModelSpec
from eagleray.models.weights import Quantizers, WeightRole


def formats_by_role(spec: ModelSpec, wanted: WeightFormat) -> dict[WeightRole, WeightFormat]:
    """Return the formats of a model that is quantized to `wanted`.

    Errors of the head show in every logit, so it has no less than 8 bits. Where experts are most of a model, its
    attention has 8 bits, too: it is small, and with 4 bits it causes more than half of the divergence of the outputs.
    """
    match wanted:
        case WeightFormat.INT4:
            attention = WeightFormat.INT4 if spec.moe is None else WeightFormat.INT8
            head = WeightFormat.INT8
        case WeightFormat.INT8:
            attention = head = WeightFormat.INT8
        case _:
            return {WeightRole.FEED_FORWARD: wanted, WeightRole.ATTENTION: wanted}
    return {WeightRole.FEED_FORWARD: wanted, WeightRole.ATTENTION: attention, WeightRole.HEAD: head}


def quantizers(spec: ModelSpec, kernels: KernelBackend, wanted: WeightFormat | None) -> Quantizers:
    """Return the functions that quantize a model to `wanted`; None: its weights are kept."""
    if wanted is None:
        return {}
    return {role: kernels.quantizer(kind) for role, kind in formats_by_role(spec, wanted).items()}
