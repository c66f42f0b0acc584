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


def stored_as(spec: ModelSpec) -> WeightFormat | None:
    """Return the format of a checkpoint's weights, of which a backend may keep the numbers; None: they are plain."""
    if spec.stored_format is not None:
        return spec.stored_format.kept_as
    if spec.fp8_block is not None:
        return WeightFormat.FP8
    return WeightFormat.MXFP4 if spec.is_mxfp4 else None


def dummy_quantizers(spec: ModelSpec, kernels: KernelBackend) -> Quantizers:
    """Return the functions that quantize random weights as those of a quantized checkpoint are, about: the sizes of
    groups may be others."""
    if spec.stored_format is None or (kept := spec.stored_format.kept_as) not in kernels.kept_formats:
        return {}
    return dict.fromkeys((WeightRole.FEED_FORWARD, WeightRole.ATTENTION), kernels.quantizer(kept))


def quantizers(spec: ModelSpec, kernels: KernelBackend, wanted: WeightFormat | None) -> Quantizers:
    """Return the functions that quantize a model to `wanted`; None: its weights are kept."""
    if wanted is None:
        return {}
    return {
        role: kernels.quantizer(kind, is_head=role is WeightRole.HEAD)
        for role, kind in formats_by_role(spec, wanted).items()
    }
