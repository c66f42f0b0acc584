"""The attributes and methods of a worker that code written for vLLM's workers uses, under the same names.

A worker extension that is a mixin gets them as its own (`WorkerView` is its base class), and the methods are the
built-in ones of `LLM.collective_rpc`. Made by `extension`, from a loaded worker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from eagleray.hub.locate import checkpoint_dir
from eagleray.hub.model_json import read_config
from eagleray.weights.disk import DirectoryReceiver

if TYPE_CHECKING:
    from eagleray.models.base import Model
    from eagleray.worker.startup import LoadedWorker


class HfConfig:
    """The checkpoint's config.json. Its fields are attributes, objects inside it too; it cannot be changed."""

    def __init__(self, fields: dict[str, Any]) -> None:
        object.__setattr__(self, "_fields", fields)

    def __getattr__(self, name: str) -> Any:
        fields: dict[str, Any] = object.__getattribute__(self, "_fields")
        if name not in fields:
            raise AttributeError(f"config.json has no field `{name}`")
        value = fields[name]
        return HfConfig(value) if isinstance(value, dict) else value

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"`{name}` cannot be changed: the model is loaded")

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of the fields."""
        return dict(self._fields)


@dataclass(frozen=True, slots=True)
class ModelView:
    """The model that is served."""

    model: str
    """Directory of the checkpoint."""
    dtype: torch.dtype
    """Number format of the weights and the computation."""
    max_model_len: int
    """Longest sequence, in tokens."""
    hf_config: HfConfig


@dataclass(frozen=True, slots=True)
class ParallelView:
    """The worker's place among the workers of the deployment."""

    rank: int
    """Rank in the engine."""
    world_size: int
    """Number of workers of the engine."""
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    data_parallel_rank: int
    """Number of the engine."""
    enable_expert_parallel: bool


@dataclass(frozen=True, slots=True)
class LoadView:
    """The options with which the weights were loaded."""

    load_format: str


@dataclass(frozen=True, slots=True)
class EngineView:
    """The configuration of the engine: `vllm_config` of a worker."""

    model_config: ModelView
    parallel_config: ParallelView
    load_config: LoadView


@dataclass(frozen=True, slots=True)
class ModelRunnerView:
    """The holder of the model: `model_runner` of a worker."""

    model: Model
    """This rank's part of the model. `load_weights` and `named_parameters` stay as they are; all other attributes may
    change without notice."""
    vllm_config: EngineView
    model_config: ModelView
    device: torch.device


class WorkerView:
    """A worker, as extensions see it. The attributes are those of vLLM's workers, the methods can be called by RPC."""

    rank: int
    """Number of the worker in its engine, from 0."""
    local_rank: int
    """Number of the worker's GPU; on CPUs its number among the workers of its engine on this node."""
    device: torch.device
    """Device that the worker computes on."""
    vllm_config: EngineView
    model_config: ModelView
    parallel_config: ParallelView
    load_config: LoadView
    model_runner: ModelRunnerView

    def __init__(self, *, worker: LoadedWorker, vllm_config: EngineView, rank: int, local_rank: int, **_: Any) -> None:
        """Set the attributes. The keywords are those of `view_arguments`."""
        self.rank, self.local_rank, self.device = rank, local_rank, worker.device
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.parallel_config = vllm_config.parallel_config
        self.load_config = vllm_config.load_config
        self.model_runner = ModelRunnerView(worker.model, vllm_config, self.model_config, worker.device)

    def check_health(self) -> None:
        """Return if the worker can compute. Raises the error of a GPU that has failed."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def liveness_probe(self) -> None:
        """Do nothing: the reply shows that the worker handles calls."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Load whole tensors under their names in the checkpoint, see `Model.load_weights`. Every rank takes its part.
        Return the sorted names that the model has."""
        return sorted(self.model_runner.model.load_weights((name, tensor) for name, tensor in weights))

    def weight_checksums(self) -> dict[str, str]:
        """Return the SHA-256, in hexadecimal digits, of the memory of every tensor that this rank has, under keys such
        as `dp0:pp0:tp0:model.norm.weight`. Tensors that are packed together have that of their common memory."""
        place = self.parallel_config
        pp_rank, tp_rank = divmod(self.rank, place.tensor_parallel_size)
        prefix = f"dp{place.data_parallel_rank}:pp{pp_rank}:tp{tp_rank}:"
        checksums: dict[str, str] = {}
        for group in self.model_runner.model.weight_groups():
            digest = hashlib.sha256()
            for memory in chain.from_iterable(group.places()):
                digest.update(memory.cpu().numpy().data)
            checksums |= {prefix + param.name: digest.hexdigest() for param in group.params}
        return checksums

    def reload_weights(
        self, weights_path: str | None = None, weights_iterator: Iterable[tuple[str, Tensor]] | None = None
    ) -> None:
        """Load these weights, or those of a directory with safetensors files, by default the model's own."""
        if weights_iterator is not None:
            self.load_weights(weights_iterator)
            return
        info = {"weight_dir": self.model_config.model if weights_path is None else weights_path}
        for bucket in DirectoryReceiver().receive(info, lambda sent: None):
            self.load_weights(bucket)


def view_arguments(worker: LoadedWorker) -> dict[str, Any]:
    """Return the keyword arguments that make a `WorkerView`. vLLM gives its workers those of the same names."""
    setup = worker.setup
    config, parallel = setup.config, setup.config.parallel
    directory = checkpoint_dir(config.model)
    view = EngineView(
        ModelView(
            model=str(directory),
            dtype=worker.model.dtype,
            max_model_len=worker.max_model_len,
            hf_config=HfConfig(read_config(config.model)),
        ),
        ParallelView(
            rank=worker.rank,
            world_size=setup.topology.world_size,
            tensor_parallel_size=parallel.tensor_parallel_size,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            data_parallel_size=parallel.data_parallel_size,
            data_parallel_rank=setup.worker.engine.rank,
            enable_expert_parallel=parallel.enable_expert_parallel,
        ),
        LoadView(config.model.load_format),
    )
    number = setup.topology.local_ranks(worker.rank).index(worker.rank)
    local_rank = number if worker.device.index is None else worker.device.index
    return {"worker": worker, "vllm_config": view, "rank": worker.rank, "local_rank": local_rank}
