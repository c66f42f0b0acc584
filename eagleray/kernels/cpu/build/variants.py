"""Variants of the kernels: the sets of instructions for which a wheel has a library.

Nothing here imports torch, because a wheel is built without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from eagleray.errors import ConfigError

NATIVE = "native"
"""Name for the instructions of the processor that compiles."""

NATIVE_FLAGS = ("-march=native",)

PREBUILT_DIRECTORY = Path(__file__).parent.with_name("prebuilt")
"""Directory of the libraries in an installed wheel. A source tree has none."""


@dataclass(frozen=True)
class Variant:
    """A set of instructions."""

    name: str
    architecture: str
    baseline: str
    """Flag of the compiler for a processor without further features."""
    features: Mapping[str, str]
    """Features that a processor needs, under their names in `torch.cpu.get_capabilities`, each with its flag."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of the compiler."""
        return (self.baseline, *self.features.values())

    @property
    def prebuilt(self) -> Path:
        """Path of the library in an installed wheel."""
        return PREBUILT_DIRECTORY / f"kernels-{self.name}.so"

    def lacking(self, capabilities: Mapping[str, object]) -> list[str]:
        """Return the features that a processor with these capabilities lacks."""
        return [feature for feature in self.features if not capabilities.get(feature)]


AVX2 = {feature: f"-m{feature}" for feature in ("avx2", "f16c", "bmi", "bmi2", "lzcnt")} | {"fma3": "-mfma"}
AVX512 = AVX2 | {f"avx512_{part}": f"-mavx512{part}" for part in ("f", "bw", "cd", "dq", "vl")}
AVX512_BF16 = AVX512 | {f"avx512_{part}": f"-mavx512{part}" for part in ("bf16", "vbmi", "vnni")}


AMX_FEATURES = ("amx_tile", "amx_bf16", "amx_int8")
AMX = AVX512_BF16 | {feature: f"-m{feature.replace('_', '-')}" for feature in AMX_FEATURES}

VARIANTS = (
    Variant("amx", "x86_64", "-march=x86-64", AMX),
    Variant("avx512_bf16", "x86_64", "-march=x86-64", AVX512_BF16),
    Variant("avx512", "x86_64", "-march=x86-64", AVX512),
    Variant("avx2", "x86_64", "-march=x86-64", AVX2),
    Variant("portable", "x86_64", "-march=x86-64", {}),
    Variant("neon_bf16", "aarch64", "-march=armv8.2-a", {"bf16": "-march=armv8.2-a+bf16"}),
    Variant("neon", "aarch64", "-march=armv8-a", {}),
)
"""All variants, the fastest of each architecture first."""


def variants_of(architecture: str) -> list[Variant]:
    """Return the variants for processors of an architecture, under its name in `uname -m`."""
    return [variant for variant in VARIANTS if variant.architecture == architecture]


def best_variant(architecture: str, capabilities: Mapping[str, object]) -> Variant | None:
    """Return the fastest variant that a processor supports, or None for an architecture without variants."""
    return next((each for each in variants_of(architecture) if not each.lacking(capabilities)), None)


def named_variant(name: str, architecture: str, capabilities: Mapping[str, object]) -> Variant | None:
    """Return the variant that the user names, or None for `NATIVE`. Raises `ConfigError` if there is no such variant or
    the processor does not support it."""
    variants = {variant.name: variant for variant in variants_of(architecture)}
    if name == NATIVE:
        return None
    if name not in variants:
        choices = ", ".join([*variants, NATIVE])
        raise ConfigError(f"variable EAGLERAY_CPU_KERNELS: `{name}` is none of {choices}")
    if lacking := variants[name].lacking(capabilities):
        raise ConfigError(
            f"variable EAGLERAY_CPU_KERNELS: this processor lacks {', '.join(lacking)}, which {name} needs; unset the "
            "variable to have the kernels chosen"
        )
    return variants[name]
