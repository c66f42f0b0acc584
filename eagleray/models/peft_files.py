"""Adapters in PEFT's format: a directory with adapter_config.json and adapter_model.safetensors.

The files are untrusted. Fields of the configuration other than `KNOWN_FIELDS` must be unset, because they may change
the result, and every tensor must be a factor of a layer that can have an adapter. Every problem is a `CheckpointError`
that names the file and the field or the tensor.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from eagleray.config.json_files import read_json_object, shown
from eagleray.errors import CheckpointError, NotFound
from eagleray.models.checkpoint_files import DTYPE_NAMES, open_file
from eagleray.models.config_file import ConfigFile
from eagleray.models.weights import Param

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"

KNOWN_FIELDS = frozenset(
    (
        "peft_type",
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "bias",
        "init_lora_weights",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "lora_dropout",
        "megatron_core",
        "eva_config",
        "runtime_config",
        "qalora_group_size",
    )
)
"""Fields that are read, or that do not change the output of an adapter whose tensors are given."""

SAME_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` with which training does not change the model's own weights."""

FACTOR_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")

PLAIN_PATTERN = re.compile(r"\^?[\w.]+")
"""Keys of `rank_pattern` and `alpha_pattern` that are names of modules, or their ends."""

READ_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The fields of adapter_config.json that matter."""

    path: Path
    rank: int
    alpha: float
    uses_rslora: bool
    ranks: Mapping[str, Any]
    """Ranks of modules that have another one, by the ends of their names."""
    alphas: Mapping[str, Any]

    @classmethod
    def read(cls, directory: Path) -> AdapterConfig:
        """Read and check the file. Raises `CheckpointError`."""
        path = directory / CONFIG_FILE
        fields = read_json_object(path)
        config = ConfigFile(path, fields)
        if fields.get("peft_type") != "LORA":
            config.fail(f"`peft_type` must be LORA, but it is {shown(fields.get('peft_type'))}")
        if fields.get("bias", "none") != "none":
            config.fail(f"`bias` must be none, but it is {shown(fields['bias'])}: biases of adapters are not supported")
        if fields.get("init_lora_weights") not in SAME_BASE:
            config.fail(
                f"`init_lora_weights` {shown(fields['init_lora_weights'])} changes the model's weights too; save the "
                "adapter as plain LoRA (PEFT's `path_initial_model_for_weight_conversion`)"
            )
        for name, value in fields.items():
            if name not in KNOWN_FIELDS and value not in (None, False, [], {}, ""):
                config.fail(f"`{name}` is {shown(value)}, which is not supported: it must not be set")
        return cls(
            path,
            config.integer("r", None),
            config.number("lora_alpha", None),
            config.boolean("use_rslora", False),
            _pattern(config, "rank_pattern"),
            _pattern(config, "alpha_pattern"),
        )

    def rank_of(self, module: str) -> int:
        """Return the rank that the adapter of a module must have."""
        value = _find(self.ranks, module, self.rank)
        return ConfigFile(self.path, {"rank_pattern": value}).integer("rank_pattern", None)

    def scale_of(self, module: str) -> float:
        """Return the factor of the product of the adapter."""
        value = _find(self.alphas, module, self.alpha)
        alpha = ConfigFile(self.path, {}).positive("alpha_pattern", value)
        rank = self.rank_of(module)
        return alpha / math.sqrt(rank) if self.uses_rslora else alpha / rank


class AdapterFiles:
    """An adapter on disk, as a context manager. `params` are the weights of the whole model that can have adapters, by
    the names of their modules. All is checked before anything is read."""

    def __init__(self, directory: Path, params: Mapping[str, Param], *, max_rank: int) -> None:
        """Open and check the files. Raises `NotFound` if the directory does not exist, and `CheckpointError`."""
        if not directory.is_dir():
            raise NotFound(f"{directory}: there is no such directory")
        for name in (CONFIG_FILE, TENSOR_FILE):
            if not (directory / name).is_file():
                raise CheckpointError(f"{directory}: has no {name}, as an adapter that PEFT has saved does")
        self._path = directory / TENSOR_FILE
        self._config = AdapterConfig.read(directory)
        self._file = open_file(self._path)
        self._names: dict[str, dict[str, str]] = {}
        """Names of the tensors A and B, by module."""
        for name in self._file.keys():  # noqa: SIM118
            module, factor = self._parse(name, params)
            self._names.setdefault(module, {})[factor] = name
        for module in self._names:
            self._check(module, params[module], max_rank)
        if not self._names:
            raise CheckpointError(f"{self._path}: has no tensors")

    def __enter__(self) -> AdapterFiles:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def modules(self) -> Iterator[tuple[str, float]]:
        """Yield the names of the modules that have adapters, and their scales."""
        for module in self._names:
            yield module, self._config.scale_of(module)

    def factors(self, module: str) -> tuple[Tensor, Tensor]:
        """Read A [rank, in_features] and B [out_features, rank] of a module."""
        a, b = (self._file.get_tensor(self._names[module][factor]) for factor in "AB")
        return a, b

    def digest(self) -> str:
        """Return a hash of the files' content."""
        content = hashlib.blake2b(digest_size=16)
        for path in (self._config.path, self._path):
            with path.open("rb") as file:
                while part := file.read(READ_BYTES):
                    content.update(part)
        return content.hexdigest()

    def _parse(self, name: str, params: Mapping[str, Param]) -> tuple[str, str]:
        """Return the module and the factor of a tensor."""
        match = FACTOR_NAME.fullmatch(name)
        if match is None:
            self._fail(f"`{name}` is not a factor of a linear layer (base_model.model.MODULE.lora_A.weight)")
        module, factor = match.groups()
        if module not in params:
            known = sorted({known.rpartition(".")[2] for known in params})
            self._fail(
                f"`{name}`: the model has no {module} that can have an adapter; those that can are {', '.join(known)} "
                "of its attention and dense feed-forward layers"
            )
        return module, factor

    def _check(self, module: str, param: Param, max_rank: int) -> None:
        """Check the factors of a module."""
        rank, names = self._config.rank_of(module), self._names[module]
        if rank > max_rank:
            self._fail(f"the adapter of {module} has rank {rank}, more than option `max_lora_rank` {max_rank} allows")
        out_features, in_features = param.shape
        for factor, shape in (("A", [rank, in_features]), ("B", [out_features, rank])):
            if factor not in names:
                self._fail(f"`base_model.model.{module}.lora_{factor}.weight` is missing")
            stored = self._file.get_slice(names[factor])
            if list(stored.get_shape()) != shape:
                self._fail(f"`{names[factor]}` has shape {stored.get_shape()}, but {shape} is expected")
            if stored.get_dtype() not in DTYPE_NAMES:
                self._fail(f"`{names[factor]}` is of dtype {stored.get_dtype()}, not float32, float16 or bfloat16")

    def _fail(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: {problem}")


def _pattern(config: ConfigFile, name: str) -> Mapping[str, Any]:
    """Return a field that maps the ends of modules' names to numbers."""
    value = config.get(name) or {}
    if not isinstance(value, dict):
        config.fail(f"`{name}` must be an object, but it is {shown(value)}")
    for key in value:
        if not PLAIN_PATTERN.fullmatch(key):
            config.fail(f"`{name}` has {shown(key)}: only names of modules are supported, no regular expressions")
    return value


def _find(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first key that is the name of a module, or the end of the name after a dot."""
    for key, value in pattern.items():
        name = key.removeprefix("^")
        if module == name or (name == key and module.endswith(f".{name}")):
            return value
    return default
