"""The targets for one H200, and the judgement of a figure. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

NOT_MEASURED = "not measured"

MAX_SHARE = 1.05
"""A larger share of a floor is an error of the floor or of the measurement."""


class TargetUnit(Enum):
    """Meaning of a target's value."""

    SHARE = "share of the floor"
    FACTOR = "factor"
    PART = "part of the time"
    MILLISECONDS = "ms"
    SECONDS = "s"


@dataclass(frozen=True)
class GpuTarget:
    key: str
    name: str
    unit: TargetUnit
    must: float
    aim: float

    @property
    def is_most(self) -> bool:
        """Whether a value must not be higher, rather than not lower."""
        return self.aim < self.must

    @property
    def bound(self) -> str:
        """The target in words."""
        return f"{'at most' if self.is_most else 'at least'} {self.show(self.must)}"

    def verdict(self, value: float) -> str:
        """Return `aim` or `must`, the best that the value reaches, or `fails`; or `implausible`."""
        if self.unit is TargetUnit.SHARE and value > MAX_SHARE:
            return "implausible"
        for name, bound in (("aim", self.aim), ("must", self.must)):
            if value <= bound if self.is_most else value >= bound:
                return name
        return "fails"

    def show(self, value: float) -> str:
        match self.unit:
            case TargetUnit.SHARE | TargetUnit.PART:
                return f"{100 * value:.1f} %".replace(".0 %", " %")
            case TargetUnit.FACTOR:
                return f"{value:.2f} x"
            case unit:
                return f"{value:.2f} {unit.value}"


TARGETS = [
    GpuTarget("8b-1", "Qwen3-8B bf16, 1 request, context 1k", TargetUnit.SHARE, 0.75, 0.85),
    GpuTarget("8b-32", "Qwen3-8B bf16, 32 requests", TargetUnit.SHARE, 0.70, 0.80),
    GpuTarget("8b-prompt", "Qwen3-8B bf16, prompt of 8,192", TargetUnit.SHARE, 0.60, 0.70),
    GpuTarget("8b-throughput", "Qwen3-8B bf16, 256 x (1,000 in, 1,000 out)", TargetUnit.SHARE, 0.60, 0.75),
    GpuTarget("8b-fp8", "Qwen3-8B FP8, 1 request, time / bf16's", TargetUnit.FACTOR, 0.62, 0.55),
    GpuTarget("30b-1", "Qwen3-30B-A3B bf16, 1 request", TargetUnit.SHARE, 0.55, 0.70),
    GpuTarget("30b-32", "Qwen3-30B-A3B bf16, 32 requests", TargetUnit.SHARE, 0.70, 0.80),
    GpuTarget("gpt-oss-1", "gpt-oss-20b, MXFP4, 1 request", TargetUnit.SHARE, 0.50, 0.65),
    GpuTarget("0.6b-1", "Qwen3-0.6B, 1 request", TargetUnit.MILLISECONDS, 1.0, 0.75),
    GpuTarget(
        "lora-unused", "adapters enabled / not, none used, tokens/s (0.6B, 32 rows)", TargetUnit.FACTOR, 0.98, 1.0
    ),
    GpuTarget("lora", "8 adapters of rank 16 / none, tokens/s (0.6B, 32 rows)", TargetUnit.FACTOR, 0.70, 0.80),
    GpuTarget("idle-1", "GPU idle in decode, 1 row (Qwen3-8B)", TargetUnit.PART, 0.03, 0.01),
    GpuTarget("idle-32", "GPU idle in decode, 32 rows", TargetUnit.PART, 0.03, 0.01),
    GpuTarget("idle-256", "GPU idle in decode, 256 rows", TargetUnit.PART, 0.03, 0.01),
    GpuTarget("routed", "routed experts on / off, tokens/s (Qwen3-30B-A3B, 32 rows)", TargetUnit.FACTOR, 0.98, 1.0),
    GpuTarget("capture", "all graphs captured, kernels cached (Qwen3-8B)", TargetUnit.SECONDS, 5.0, 2.0),
]
