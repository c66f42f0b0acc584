"""Worker extensions with the habits of the RL frameworks' own, loaded as they are: mixins of the worker.

One asserts that torch's default process group is there and takes its rank in it; it receives a weight in a group with a
trainer. One has a `__new__` of keywords only. One has its own `liveness_probe`.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from eagleray import LLM, SamplingParams
from eagleray.errors import RequestFailed

OPTIONS = {"max_model_len": 200, "num_threads": 1, "log_level": "warning"}
DEADLINE = timedelta(seconds=60)

MODULE = """
import os
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

DEADLINE = timedelta(seconds=60)

class Base:
    pass

class Receiver(Base):
    # no constructor, no import of the engine's, and attributes of its own
    def init_process_group(self, master_address, master_port, rank_offset, world_size, group_name, backend="gloo"):
        assert torch.distributed.is_initialized(), "default torch process group must be initialized"
        assert group_name != ""
        rank = torch.distributed.get_rank() + rank_offset
        store = TCPStore(master_address, master_port, is_master=False, timeout=DEADLINE)
        options = ProcessGroupGloo._Options()
        options._timeout = DEADLINE
        options._devices = [ProcessGroupGloo.create_device(hostname=master_address)]
        self._model_update_group = ProcessGroupGloo(PrefixStore(group_name, store), rank, world_size, options)
        return rank

    def update_weight(self, name, dtype, shape, empty_cache=False):
        assert dtype == self.model_config.dtype, f"mismatch dtype: src {dtype}, dst {self.model_config.dtype}"
        weight = torch.empty(shape, dtype=dtype, device=self.device)
        self._model_update_group.broadcast(weight, 0).wait()
        self.model_runner.model.load_weights(weights=[(name, weight)])

    def ranks(self):
        gathered = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(gathered, [self.rank, torch.distributed.get_rank()])
        return gathered

class Colocated:
    def __new__(cls, **kwargs):
        os.environ["PREPARED_BY_EXTENSION"] = str(kwargs["vllm_config"].parallel_config.world_size)
        instance = super().__new__(cls)
        instance._is_quantized = getattr(kwargs.get("vllm_config"), "quant_config", None) is not None
        return instance

    def describe(self):
        config = self.model_runner.vllm_config.model_config
        assert self.device is not None and self.local_rank == self.rank == 0
        return [os.environ["PREPARED_BY_EXTENSION"], self._is_quantized, config.hf_config.num_hidden_layers]

    def liveness_probe(self):
        return ["alive", self.parallel_config.rank]
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3")


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory):
    """Make the user's module importable in this process and all of its children."""
    directory = tmp_path_factory.mktemp("extension")
    (directory / "users_mixins.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(directory)])
        yield


def connect(llm, *, num_workers):
    """Return a group of this process, the trainer of rank 0, and the workers."""
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=DEADLINE, wait_for_workers=False)
    options = ProcessGroupGloo._Options()
    options._timeout = DEADLINE
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    size = 1 + num_workers
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(
            llm.collective_rpc, "init_process_group", 60, ("127.0.0.1", store.port, 1, size, "trainer")
        )
        group = ProcessGroupGloo(PrefixStore("trainer", store), 0, size, options)
        assert joined.result(60) == list(range(1, size))
    return group


def push(llm, group, name, weight):
    """Broadcast the weight to the workers, which load it."""
    with ThreadPoolExecutor(1) as pool:
        loaded = pool.submit(llm.collective_rpc, "update_weight", 60, (name, weight.dtype, weight.shape))
        group.broadcast(weight, 0).wait()
        loaded.result(60)


def generate(llm):
    """Return the tokens of a prompt of several blocks, and how many of its tokens were found in the cache."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": list(range(3, 43))}, params, use_tqdm=False)
    return output.outputs[0].token_ids, output.num_cached_tokens


@pytest.mark.parametrize(
    ("options", "num_workers"),
    [
        # the worker of the next test is in process
        pytest.param({"executor": "in-process"}, 1, marks=pytest.mark.grid),
        ({"executor": "processes", "tensor_parallel_size": 2}, 2),
    ],
    ids=["in-process", "processes"],
)
def test_mixin_receives_a_weight_by_its_rank_in_the_default_group(checkpoint, options, num_workers):
    name = "model.norm.weight"
    weight = load_file(checkpoint / "model.safetensors")[name]
    with LLM(str(checkpoint), worker_extension_cls="users_mixins.Receiver", **OPTIONS, **options) as llm:
        ranks = [[rank, rank] for rank in range(num_workers)]
        assert llm.collective_rpc("ranks") == [ranks] * num_workers
        (first, _), (second, num_cached) = generate(llm), generate(llm)
        assert first == second and num_cached > 0
        group = connect(llm, num_workers=num_workers)
        push(llm, group, name, -weight)
        changed, num_cached = generate(llm)
        assert changed != first and num_cached == 0, "blocks of the weights from before must not be found"
        assert llm.collective_rpc("load_weights", args=[[(name, weight)]]) == [[name]] * num_workers
        assert generate(llm) == (first, 0)
        with pytest.raises(RequestFailed, match=r"AssertionError: mismatch dtype: src torch\.int8"):
            llm.collective_rpc("update_weight", args=(name, torch.int8, weight.shape))
        assert llm.collective_rpc("check_health") == [None] * num_workers


def test_mixin_with_keywords_prepares_its_worker(checkpoint):
    with LLM(str(checkpoint), worker_extension_cls="users_mixins:Colocated", **OPTIONS) as llm:
        assert llm.collective_rpc("describe") == [["1", False, 3]]
        assert llm.collective_rpc("liveness_probe") == [["alive", 0]]
