"""New weights for engines that Ray starts, while requests are kept in flight."""

from __future__ import annotations

import threading
import time

import pytest
from checkpoints import make_checkpoint
from oracle import oracle
from safetensors.torch import load_file

from eagleray import LLM, SamplingParams
from eagleray.weights import SharedMemorySender

COUNT = 300
PARAMS = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
PROMPTS = [[index + 5] * 4 for index in range(64)]
OPTIONS = {"num_threads": 1, "max_model_len": 400, "dtype": "float32", "ray_address": "local"}


@pytest.mark.grid
@pytest.mark.timeout(300)
def test_ray_update_with_kept_requests_loses_none_and_names_versions(tmp_path):
    old, new = (make_checkpoint(tmp_path / name, "qwen3", seed=seed) for seed, name in enumerate(("old", "new")))
    sizes = {"data_parallel_size": 2, "data_parallel_backend": "ray", "executor": "ray", "tensor_parallel_size": 2}
    outputs = []
    with LLM(str(old), ray_worker_resources={"CPU": 0.25}, **sizes, **OPTIONS) as llm:
        undisturbed = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        running = threading.Thread(target=lambda: outputs.extend(llm.generate(PROMPTS, PARAMS, use_tqdm=False)))
        running.start()
        client = llm._instance.client
        while client.num_in_flight < len(PROMPTS) or client.num_queued_seqs:  # an engine counts what has arrived
            time.sleep(0.005)
        assert llm.pause_generation(mode="keep")["num_kept"] == len(PROMPTS)
        llm.start_weight_update()
        with SharedMemorySender() as sender:
            llm.update_weights({"update_info": sender.write(load_file(new / "model.safetensors").items())})
        llm.finish_weight_update(weight_version="new", require_complete=True)
        llm.resume_generation()
        running.join()
        (after,) = llm.generate([PROMPTS[0]], PARAMS, use_tqdm=False)
    oracle(new).assert_greedy(after.prompt_token_ids, after.outputs[0].token_ids)
    for output, tokens in zip(outputs, undisturbed, strict=True):
        spans = output.outputs[0].weight_versions
        num_old = spans[0].end if spans[0].version == "default" else 0
        assert spans[-1].version == "new"
        assert (spans[0].start, spans[-1].end) == (0, COUNT)
        assert output.outputs[0].token_ids[:num_old] == tokens[:num_old]
