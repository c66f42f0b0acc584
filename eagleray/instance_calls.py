"""The calls that concern an instance as a whole, one coroutine for each.

`LLM` and `AsyncLLM` have methods of the same names, parameters and docstrings, which run these in the instance's loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eagleray.client.control_requests import (
    init_transfer_request,
    naming_scaling_fields,
    pause_request,
    restart_request,
    scale_request,
    sleep_request,
    start_request,
    update_request,
    wake_up_request,
)
from eagleray.instance import LocalInstance
from eagleray.lora import LoRARequest, LoraRequests
from eagleray.messages.control import (
    AbortWeightUpdate,
    FinishWeightUpdate,
    GetWeightInfo,
    ResetPrefixCache,
    Resume,
    SetWeightVersion,
    ShutdownWeightTransfer,
)
from eagleray.messages.scaling import GetScaling

METHODS_ELSEWHERE = {
    "apply_model": "write a worker extension (`worker_extension_cls`) and call its methods by `collective_rpc`",
    "beam_search": "`SamplingParams.n` gives several completions",
    "classify": "`encode` gives the classes of a prompt",
    "embed": "`encode` gives the embedding of a prompt",
    "get_metrics": "outputs have `metrics`, and servers have /metrics",
    "reset_mm_cache": "prompts have no images, sound or video",
    "score": "`LLM.score` gives scores, and `encode` embeddings to compare",
    "start_draft_weight_update": "draft models keep their weights, and a layer for drafts is a part of every update",
    "start_profile": "profile the workers by a worker extension (`worker_extension_cls`)",
    "stop_profile": "profile the workers by a worker extension (`worker_extension_cls`)",
}
"""Methods of vLLM's `LLM` and `AsyncLLM` that are not here, and what there is instead."""


def missing_method(owner: object, name: str) -> AttributeError:
    """Return the error for a method that does not exist."""
    advice = f": {METHODS_ELSEWHERE[name]}" if name in METHODS_ELSEWHERE else ""
    return AttributeError(f"`{type(owner).__name__}` has no attribute `{name}`{advice}", name=name, obj=owner)


class InstanceCalls:
    """The calls of one instance. Used in its loop."""

    def __init__(self, instance: LocalInstance) -> None:
        self._instance = instance
        self._control = instance.control
        self.loras = LoraRequests(instance.client, instance.control)

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> dict[str, Any]:
        """Run no steps until `resume_generation`, and return the numbers of requests kept and aborted.

        `mode`: `abort` ends the running requests, which deliver the tokens so far; `wait` lets them finish; `keep`
        freezes them, and they continue after the pause. Requests that come meanwhile wait. The prefix cache is emptied
        unless `clear_cache` is False or the mode is `keep`.
        """
        return await self._control(pause_request(mode, clear_cache))

    async def resume_generation(self) -> None:
        """End a pause."""
        await self._control(Resume())

    async def sleep(self, level: int = 1, mode: str = "abort", tags: Sequence[str] | None = None) -> dict[str, Any]:
        """Free memory until `wake_up`, and return the level and `freed_bytes`.

        Level 1 frees the cache, and on GPUs the weights, which move to the host. Level 2 also drops the weights. Level
        0 only stops the steps. `mode`: see `pause_generation`. `tags`: `weights` or `kv_cache` for only one of them.
        """
        return await self._control(sleep_request(level, mode, tags))

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """End the sleep of these parts, by default of all. Return whether steps may run again."""
        answer = await self._control(wake_up_request(tags))
        return bool(answer["status"] == "awake")

    async def release_kv_cache_memory(self) -> None:
        """Free the memory of the cache until `wake_up`; the weights stay. Running requests are kept."""
        await self._control(sleep_request(1, "keep", ["kv_cache"]))

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache. Return False if requests hold blocks of it.

        With `reset_running_requests` these requests give up their blocks and are computed again. `reset_connector` has
        no effect, since there are no caches outside of the engines.
        """
        answer = await self._control(ResetPrefixCache(reset_running_requests=reset_running_requests))
        return bool(answer["success"])

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """Connect to the trainer. `request` has `init_info`, see docs/rl.md."""
        await self._control(init_transfer_request(request))

    async def shutdown_weight_transfer_engine(self) -> None:
        """Leave the trainer's group."""
        await self._control(ShutdownWeightTransfer())

    async def start_weight_update(self, is_checkpoint_format: bool = True) -> dict[str, Any]:
        """Open an update of the weights. Names of tensors are those of the checkpoint; other formats are refused."""
        return await self._control(start_request(is_checkpoint_format))

    async def update_weights(self, request: Any) -> dict[str, Any]:
        """Receive tensors of the open update. `request` has `update_info`, see docs/rl.md.

        With `weight_dir` instead, the directory of a checkpoint, one call starts, reads and finishes an update.
        """
        return await self._control(update_request(request))

    async def finish_weight_update(
        self, weight_version: str | None = None, require_complete: bool = False
    ) -> dict[str, Any]:
        """Commit the open update: from the next step on, all engines compute with the new weights.

        Returns the number and the version of the new weights, and the names of the weights that the update lacks. With
        `require_complete` an update that lacks a weight is refused.
        """
        return await self._control(FinishWeightUpdate(weight_version=weight_version, require_complete=require_complete))

    async def abort_weight_update(self) -> None:
        """Drop the open update; the weights from before stay."""
        await self._control(AbortWeightUpdate())

    async def update_weight_version(self, new_version: str) -> None:
        """Rename the weights."""
        await self._control(SetWeightVersion(new_version))

    async def get_weight_version(self) -> str:
        """Return the trainer's name of the weights."""
        answer = await self._control(GetWeightInfo())
        return str(answer["weight_version"])

    async def get_weight_info(self) -> dict[str, Any]:
        """Return the state of the instance, and the number and version of its weights and of those of every engine."""
        return await self._control(GetWeightInfo())

    async def is_paused(self) -> bool:
        """Return whether steps are paused."""
        return bool(self._instance.client.state.pause)

    async def is_sleeping(self) -> bool:
        """Return whether weights, cache or steps sleep."""
        return bool(self._instance.client.state.asleep)

    # The number of engines.

    async def scale(
        self,
        data_parallel_size: int | None = None,
        *,
        remove_ranks: Sequence[int] = (),
        drain_timeout: float = 0.0,
        operation_id: str | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Change the number of engines while requests run, and return the status of the operation at its end.

        Engines that are added get requests as soon as all of them are ready. `remove_ranks`: engines that go, by
        default those of the highest ranks; without `data_parallel_size` no others replace them. Their requests may
        finish for `drain_timeout` seconds, and then continue on other engines. `operation_id`: calls with the same
        id that ask for the same are one operation. `timeout`: seconds until `DeadlineExceeded` is raised, by default
        ten minutes; the operation goes on then, as `scaling_status` shows.

        Raises `InvalidRequest` for a number that is impossible, `WrongState` if another operation replaced this one,
        and the error of an engine that did not start; the engines are those from before then.
        """
        with naming_scaling_fields():
            request = scale_request(data_parallel_size, remove_ranks, drain_timeout=drain_timeout)
            return await self._control(request, timeout, operation_id)

    async def scale_elastic_ep(self, new_data_parallel_size: int, drain_timeout: float = 300) -> None:
        """Change the number of engines, see `scale`."""
        with naming_scaling_fields(data_parallel_size="new_data_parallel_size"):
            await self._control(scale_request(new_data_parallel_size, drain_timeout=drain_timeout))

    async def restart_engines(
        self,
        /,
        ranks: Sequence[int] = (),
        *,
        drain_timeout: float = 0.0,
        operation_id: str | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Replace engines by new processes, one after another, by default all, and return the status of the operation.

        Requests continue meanwhile. `options`: options that all engines have from now on, such as `max_num_seqs` or
        `model`; None stands for the default. If an engine cannot start with them, its error is raised, and all
        engines have the options from before. The other parameters are those of `scale`.

        Raises `InvalidRequest` for an option that cannot be changed, and for a checkpoint that does not fit.
        """
        request = restart_request(ranks, drain_timeout, options)
        return await self._control(request, timeout, operation_id)

    async def scaling_status(self, operation_id: str | None = None) -> dict[str, Any]:
        """Return the status of a call of `scale` or `restart_engines`, by default of the one that runs, or the last.

        Raises `NotFound` for an id that no call had; the last 100 are kept.
        """
        return await self._control(GetScaling(operation_id=operation_id))

    # Adapters.

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter on all engines, or replace it (`load_inplace`): running requests keep the adapter that they
        began with. Returns False if it is loaded already, from the same directory.

        Raises `NotFound` if there is no such directory, and `CheckpointError` if the adapter does not fit the model.
        """
        return await self.loras.add(lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        """Unload the adapter with this `lora_int_id`. Running requests finish with it.

        Returns False if no such adapter is loaded.
        """
        return await self.loras.remove(lora_id)

    async def list_loras(self) -> set[int]:
        """Return the `lora_int_id`s of the adapters that this object has loaded."""
        return self.loras.ids()

    # Workers.

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of the worker extension (option `worker_extension_cls`), or a built-in one, on every worker of
        every engine.

        Returns the results by engine, then by rank of the worker. Waits for engines that are coming back. Arguments and
        results are None, bool, int, float, str, bytes, lists, tuples (which become lists), dicts, numpy arrays, tensors
        on the host, dtypes and sizes of torch, and handles of CUDA tensors (`reduce_tensor`), nested. `timeout`:
        seconds for the workers; None: ten minutes. No tokens are generated during the call.

        Raises `InvalidRequest` for a call that is impossible or cannot be sent, `RequestFailed` if the method raised on
        a rank (the engines continue), `DeadlineExceeded`, and `EngineFailed` if an engine exits during the call, which
        is not repeated then.
        """
        return await self._instance.call_workers(method, args, kwargs, timeout)
