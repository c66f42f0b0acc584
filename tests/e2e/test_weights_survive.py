"""Weights of a trainer on two engines, of which one or all are killed: tokens stay those of transformers."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from checkpoints import make_checkpoint
from oracle import oracle
from processes import children_of
from safetensors.torch import load_file

from eagleray import LLM, SamplingParams
from eagleray.errors import TransferBroken
from eagleray.weights import Sender, SharedMemorySender

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [12, 13], [14]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SECONDS = 120.0


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return checkpoints that differ in their weights alone."""
    return [make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", seed=seed) for seed in range(4)]


@pytest.fixture(scope="module")
def llm(checkpoints):
    llm = LLM(str(checkpoints[0]), data_parallel_size=2, num_threads=1, dtype="float32", max_model_len=64)
    yield llm
    llm.close()


def weights_in(directory):
    return load_file(directory / "model.safetensors")


def tokens(llm):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


def assert_serves(llm, directory):
    """Raise unless the tokens are those of transformers with the weights of the directory."""
    for prompt, output in zip(PROMPTS, tokens(llm), strict=True):
        oracle(directory).assert_greedy(prompt, output)


def wait_until_ready(llm):
    deadline = time.monotonic() + SECONDS
    while not all(it["state"] == "ready" for it in llm.get_weight_info()["engines"]) or len(engines(llm)) < 2:
        assert time.monotonic() < deadline, llm.get_weight_info()
        time.sleep(0.05)


def engines(llm):
    return [(it["rank"], it["incarnation"]) for it in llm.get_weight_info()["engines"]]


def kill_one(llm):
    before = engines(llm)
    os.kill(children_of(os.getpid())[-1], signal.SIGKILL)
    deadline = time.monotonic() + SECONDS
    while engines(llm) == before:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_weights_pushed_killed_engine_is_replaced_with_a_copy(llm, checkpoints):
    with SharedMemorySender() as sender:
        llm.start_weight_update()
        llm.update_weights({"update_info": sender.write(weights_in(checkpoints[1]).items())})
        assert llm.finish_weight_update("one", require_complete=True)["missing"] == []
    kill_one(llm)
    wait_until_ready(llm)
    assert [it["weight_version"] for it in llm.get_weight_info()["engines"]] == ["one", "one"]
    for _ in range(3):  # requests of both engines
        assert_serves(llm, checkpoints[1])


def test_weights_of_a_directory_all_engines_killed_read_it_again(llm, checkpoints):
    wait_until_ready(llm)
    llm.update_weights({"weight_dir": str(checkpoints[2])})
    for child in children_of(os.getpid()):
        os.kill(child, signal.SIGKILL)
    assert_serves(llm, checkpoints[2])
    wait_until_ready(llm)
    assert_serves(llm, checkpoints[2])


def test_engine_killed_while_a_group_receives_breaks_it_and_keeps_the_old_weights(llm, checkpoints):
    wait_until_ready(llm)
    before = tokens(llm)
    weights = list(weights_in(checkpoints[3]).items())
    with ThreadPoolExecutor() as pool:
        for is_broken in (True, False):
            sender = Sender(2, timeout=SECONDS)
            connected = pool.submit(sender.connect)
            llm.init_weight_transfer_engine({"init_info": sender.init_info})  # waits until both engines are there
            connected.result(SECONDS)
            llm.start_weight_update()
            update = pool.submit(llm.update_weights, {"update_info": Sender.update_info(weights)})
            if is_broken:
                time.sleep(0.2)  # the workers wait in a broadcast by now, or will find their group closed
                kill_one(llm)
                with pytest.raises(TransferBroken, match="SIGKILL"):
                    update.result(SECONDS)
                with pytest.raises(TransferBroken):
                    sender.send([("large", torch.zeros(2**23)), *weights])
                assert tokens(llm) == before
            else:
                sender.send(weights)
                update.result(SECONDS)
                llm.finish_weight_update()
    assert_serves(llm, checkpoints[3])
