"""A model by its id, which the nodes of workers and engines fetch for themselves."""

from __future__ import annotations

import pytest
from checkpoints import make_checkpoint
from hub_fakes import COMMIT, HubRepository, HubServer
from huggingface_hub import close_session
from ray_cluster import ACC

from eagleray import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
OPTIONS = {"num_threads": 1, "num_kv_blocks": 128, "max_num_seqs": 8, "ray_placement_timeout": 20}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with the model `org/tiny`, and for this program a cache of its own."""
    directory = make_checkpoint(tmp_path / "model", "llama")
    server = HubServer()
    server.repositories["org/tiny"] = HubRepository({path.name: path.read_bytes() for path in directory.iterdir()})
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "here"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield server
    close_session()
    server.close()


@pytest.mark.grid  # tests/unit/hub fetches, test_model_ids.py with processes
def test_llm_workers_and_engine_on_ray_fetch_the_model_once(cluster, hub, tmp_path):
    there = tmp_path / "there"
    with LLM(
        "org/tiny",
        data_parallel_backend="ray",
        tensor_parallel_size=2,
        executor="ray",
        ray_worker_resources=ACC,
        ray_runtime_env={"env_vars": {"HF_HUB_CACHE": str(there)}},
        **OPTIONS,
    ) as llm:
        (output,) = llm.generate("Hello", GREEDY, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 8
        assert llm.config.model.revision == COMMIT
    weights = f"GET /org/tiny/resolve/{COMMIT}/model.safetensors"
    assert hub.requests[weights] == 2  # for this program, and for the node
    assert (there / "models--org--tiny" / "snapshots" / COMMIT / "model.safetensors").is_file()
