"""A trainer that makes the calls of slime to an SGLang server of the user's own: its routes, fields and order.

Written from what slime sends and reads. Weights go by broadcasts of a torch group between this process and the workers.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import httpx
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _new_process_group_helper, _world, rendezvous

SECONDS = 120.0
GROUP = "slime-pp_0"


class SGLangTrainer:
    """Rank 0 of the group; the workers of the server follow."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._pool = ThreadPoolExecutor(1)
        info = self._json(http.get("/server_info"))
        self.num_gpus = int(info["num_gpus"])
        self._group: Any = None

    # Rollouts.

    def generate(self, input_ids: list[int], **sampling_params: Any) -> tuple[list[int], list[float], str, str]:
        """Return new tokens, their log-probabilities, the kind of end, and the version of the weights."""
        sampling_params = {
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": -1,
            "stop": None,
            "stop_token_ids": None,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
            **sampling_params,
        }
        body = {"input_ids": input_ids, "sampling_params": sampling_params, "return_logprob": True}
        answer = self._json(self._http.post("/generate", json=body))
        assert isinstance(answer["text"], str)
        meta_info = answer["meta_info"]
        tokens = [entry[1] for entry in meta_info["output_token_logprobs"]]
        logprobs = [entry[0] for entry in meta_info["output_token_logprobs"]]
        assert meta_info["prompt_tokens"] == len(input_ids)
        assert meta_info["completion_tokens"] == len(tokens)
        return tokens, logprobs, meta_info["finish_reason"]["type"], meta_info["weight_version"]

    def abort_until_idle(self) -> None:
        deadline = time.monotonic() + SECONDS
        while True:
            self._post("abort_request", {"abort_all": True})
            if not self.num_requests():
                return
            assert time.monotonic() < deadline, "requests go on after they were aborted"
            time.sleep(0.05)

    def num_requests(self) -> int:
        loads = self._json(self._http.get("/v1/loads", params={"include": "core"}))["loads"]
        return sum(load["num_total_reqs"] for load in loads)

    # Weights.

    def connect(self) -> None:
        """Join a group with all workers, after leaving an earlier one."""
        if self._group is not None:
            self.disconnect()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        fields = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "group_name": GROUP}
        size = self.num_gpus + 1
        joined = self._pool.submit(
            self._post, "init_weights_update_group", {**fields, "world_size": size, "backend": "gloo"}
        )
        limit = timedelta(seconds=SECONDS)
        store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, size, timeout=limit))
        store.set_timeout(limit)
        self._group, _ = _new_process_group_helper(
            size, rank, [], "gloo", dist.PrefixStore(GROUP, store), group_name=GROUP, timeout=limit
        )
        _world.pg_group_ranks[self._group] = {index: index for index in range(size)}
        joined.result(SECONDS)

    def disconnect(self) -> None:
        left = self._pool.submit(self._post, "destroy_weights_update_group", {"group_name": GROUP})
        dist.destroy_process_group(self._group)
        self._group = None
        left.result(SECONDS)

    def update_weights(self, chunks: Iterable[Sequence[tuple[str, torch.Tensor]]], version: int) -> None:
        """Pause, empty the cache, send the chunks, and continue."""
        self._post("pause_generation", {})
        self._flush_cache()
        for chunk in chunks:
            self._send(chunk, version)
        self._post("continue_generation", {})

    def close(self) -> None:
        if self._group is not None:
            self.disconnect()
        self._pool.shutdown()

    def _flush_cache(self) -> None:
        deadline = time.monotonic() + SECONDS
        while self._http.get("/flush_cache").status_code != 200:
            assert time.monotonic() < deadline, "the cache is not emptied"
            time.sleep(0.05)

    def _send(self, chunk: Sequence[tuple[str, torch.Tensor]], version: int) -> None:
        body = {
            "names": [name for name, _ in chunk],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in chunk],
            "shapes": [list(tensor.shape) for _, tensor in chunk],
            "group_name": GROUP,
            "flush_cache": False,
            "weight_version": str(version),
        }
        answered = self._pool.submit(self._post, "update_weights_from_distributed", body)
        for work in [dist.broadcast(tensor, 0, group=self._group, async_op=True) for _, tensor in chunk]:
            work.wait()
        answered.result(SECONDS)

    def get_weight_version(self) -> str:
        version: str = self._json(self._http.get("/get_weight_version"))["weight_version"]
        return version

    def update_weights_from_disk(self, model_path: str, version: int) -> None:
        self._post("update_weights_from_disk", {"model_path": model_path, "weight_version": str(version)})

    def _post(self, route: str, body: dict[str, Any]) -> Any:
        return self._json(self._http.post(f"/{route}", json=body))

    def _json(self, response: httpx.Response) -> Any:
        assert response.status_code == 200, response.text
        return response.json()
