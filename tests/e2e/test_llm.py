"""The Python API: `LLM` and its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import msgspec
import pytest
from checkpoints import make_checkpoint
from oracle import oracle
from processes import children_of
from serving import is_running

from eagleray import LLM, RequestOutputKind, SamplingParams
from eagleray.errors import CheckpointError, ConfigError, EngineFailed, InvalidRequest, PromptTooLong

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
OPTIONS = {"num_threads": 1, "max_model_len": 400}
SECONDS = 60.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3_moe")


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(str(checkpoint), max_num_batched_tokens=64, tool_call_parser="hermes", **OPTIONS) as llm:
        yield llm


def test_generate_texts_return_greedy_outputs(llm, checkpoint):
    outputs = llm.generate(["Hello world", "def main():"], GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["Hello world", "def main():"]
    for output in outputs:
        (choice,) = output.outputs
        oracle(checkpoint).assert_greedy(output.prompt_token_ids, choice.token_ids)
        assert choice.text == llm.get_tokenizer().decode(choice.token_ids, skip_special_tokens=True)
        assert (choice.index, choice.finish_reason, choice.stop_reason, choice.logprobs) == (0, "length", None, None)
        assert output.finished


def test_generate_prompt_forms_are_equivalent(llm):
    ids = llm.get_tokenizer().encode("Hello", add_special_tokens=True)
    prompts = ["Hello", ids, {"prompt": "Hello"}, {"prompt_token_ids": ids}]
    texts = {output.outputs[0].text for output in llm.generate(prompts, GREEDY, use_tqdm=False)}
    assert len(texts) == 1
    assert {llm.generate("Hello", GREEDY)[0].outputs[0].text} == texts


def test_generate_params_for_each_prompt(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 2, 3)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]
    with pytest.raises(InvalidRequest, match="2 entries for 3 prompts"):
        llm.generate(["a", "b", "c"], params[:2])


def test_generate_several_choices_have_logprobs(llm):
    params = SamplingParams(n=2, seed=3, max_tokens=5, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (output,) = llm.generate("Hello world", params, use_tqdm=False)
    assert [choice.index for choice in output.outputs] == [0, 1]
    for choice in output.outputs:
        assert len(choice.logprobs) == 5
        for token_id, entries in zip(choice.token_ids, choice.logprobs, strict=True):
            assert len(entries) in (2, 3)
            assert entries[token_id].logprob <= 0
        chosen = [
            entries[token_id].logprob for token_id, entries in zip(choice.token_ids, choice.logprobs, strict=True)
        ]
        assert choice.cumulative_logprob == pytest.approx(sum(chosen))
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_generate_given_tokens_have_the_log_probabilities_of_the_run_that_sampled_them(llm):
    sampled = llm.generate("Hello world", SamplingParams(seed=3, max_tokens=8, logprobs=2, ignore_eos=True))[0].outputs[
        0
    ]
    given = sampled.token_ids
    replay = SamplingParams(trace_decode_token_ids=given, max_tokens=None, logprobs=2, stop_token_ids=given, stop="e")
    (again,) = llm.generate("Hello world", replay)[0].outputs
    assert (again.token_ids, again.finish_reason, again.text) == (given, "length", sampled.text)
    for first, second in zip(sampled.logprobs, again.logprobs, strict=True):
        assert {token: entry.rank for token, entry in first.items()} == {
            token: entry.rank for token, entry in second.items()
        }
        numbers = {token: entry.logprob for token, entry in first.items()}
        assert numbers == pytest.approx({token: entry.logprob for token, entry in second.items()}, abs=1e-3)
    unlikely = SamplingParams(trace_decode_token_ids=[7, 7, 7], max_tokens=2, temperature=0, logprobs=0)
    assert llm.generate("Hello world", unlikely)[0].outputs[0].token_ids == [7, 7]


def test_generate_scores_given_ids_as_the_likeliest_of_the_prompt(llm):
    """The ids are those that `prompt_logprobs` reports, over several steps of a chunked prompt."""
    prompt = llm.get_tokenizer().encode("Hello world, and again " * 12, add_special_tokens=True)
    assert len(prompt) > 64  # tokens of a step
    reported = SamplingParams(max_tokens=1, prompt_logprobs=2)
    (expected,) = llm.generate([prompt], reported, use_tqdm=False)
    rows = [list(position)[:2] for position in expected.prompt_logprobs[1:]]
    scored = SamplingParams(max_tokens=1, prompt_logprob_token_ids=rows[5:], prompt_logprob_start=5)
    (output,) = llm.generate([prompt], scored, use_tqdm=False)
    assert output.prompt_logprobs is None
    numbers = [
        [position[token].logprob for token in ids]
        for position, ids in zip(expected.prompt_logprobs[6:], rows[5:], strict=True)
    ]
    assert output.prompt_token_id_logprobs.shape == (len(prompt) - 6, 2)
    assert output.prompt_token_id_logprobs.tolist() == [pytest.approx(row, abs=1e-3) for row in numbers]


def test_chat_renders_conversations(llm):
    conversation = [{"role": "user", "content": "Hi"}]
    (one,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    two = llm.chat([conversation, conversation], GREEDY, use_tqdm=False)
    assert [output.outputs[0].text for output in two] == [one.outputs[0].text] * 2
    rendered = llm.get_tokenizer().apply_chat_template(conversation, add_generation_prompt=True)
    assert one.prompt == rendered


def test_chat_with_a_required_tool_returns_its_call(llm):
    parameters = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    function = {"name": "weather", "parameters": parameters | {"additionalProperties": False}}
    conversation = [{"role": "user", "content": "Hi"}]
    tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    params = SamplingParams(max_tokens=200, seed=1)
    (output,) = llm.chat(conversation, params, use_tqdm=False, parallel_tool_calls=False, **tools)
    (answer,) = output.outputs
    (call,) = answer.tool_calls
    assert (call.name, answer.content, answer.reasoning) == ("weather", None, None)
    assert call.arguments in answer.text and json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    (plain,) = llm.chat(conversation, GREEDY, use_tqdm=False)[0].outputs
    assert (plain.content, plain.tool_calls) == (plain.text, [])
    with pytest.raises(InvalidRequest, match="tool_choice"):
        llm.chat(conversation, tool_choice="required")
    tools["tools"] += [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]
    with pytest.raises(InvalidRequest, match=r"`tools\[1\]\.function\.parameters`: .*not supported: `not`") as refused:
        llm.chat(conversation, params, **tools)
    assert refused.value.param == "tools[1].function.parameters"


def test_stream_yields_outputs_of_every_prompt_as_asked(llm):
    # Long enough that a reader who is late still finds more than one output: those that wait are merged.
    long = msgspec.structs.replace(GREEDY, max_tokens=390)
    expected = [output.outputs[0] for output in llm.generate(["a", "b"], long, use_tqdm=False)]
    params = [long, msgspec.structs.replace(long, output_kind=RequestOutputKind.DELTA)]
    outputs: dict[int, list] = {0: [], 1: []}
    for index, output in llm.stream(["a", "b"], params):
        outputs[index].append(output)
    for parts in outputs.values():
        assert len(parts) > 1
        assert [output.finished for output in parts] == [False] * (len(parts) - 1) + [True]
    whole, deltas = outputs[0], outputs[1]
    assert whole[-1].outputs[0].token_ids == expected[0].token_ids
    lengths = [len(output.outputs[0].token_ids) for output in whole]
    assert lengths == sorted(lengths)
    assert "".join(output.outputs[0].text for output in deltas) == expected[1].text
    assert list(chain.from_iterable(output.outputs[0].token_ids for output in deltas)) == expected[1].token_ids


def test_stream_left_early_aborts_requests(llm):
    long = msgspec.structs.replace(GREEDY, max_tokens=390)
    for _, output in llm.stream(["a", "b"], long):
        assert not output.finished
        break
    wait_until(lambda: llm._instance.client.num_in_flight == 0)


WRONG = [1, 2, 10**6]


def test_generate_wrong_prompt_among_several_the_error_names_its_index(llm):
    with pytest.raises(InvalidRequest, match=r"^prompt 2: "):
        llm.generate(["a", "b", WRONG], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequest, match=r"^(?!prompt )"):
        llm.generate([WRONG], GREEDY, use_tqdm=False)


def test_generate_errors_returned_take_the_place_of_outputs(llm):
    params = [GREEDY, GREEDY, {"max_tokens": 0}, {"max_tokens": 3, "temperature": 0, "ignore_eos": True}]
    first, wrong, empty, last = llm.generate(["a", WRONG, "b", "c"], params, use_tqdm=False, errors="return")
    assert len(first.outputs[0].token_ids) == GREEDY.max_tokens
    assert (wrong.index, empty.index) == (1, 2)
    assert str(10**6) in wrong.message
    assert "max_tokens" in empty.message
    assert len(last.outputs[0].token_ids) == 3


def test_generate_takes_an_iterator_and_a_dictionary_of_parameters(llm):
    outputs = llm.generate((text for text in "abc"), {"max_tokens": 4, "ignore_eos": True}, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 4, 4]
    with pytest.raises(InvalidRequest, match=r"have no field 'max_token'; did you mean `max_tokens`\?"):
        llm.generate("a", {"max_token": 4}, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="`SamplingParams` or a dictionary of its fields, but got int"):
        llm.generate("a", 4, use_tqdm=False)


def test_generate_as_completed_reads_an_iterator_only_so_far_ahead(llm):
    num_read = 0

    def prompts():
        nonlocal num_read
        for num_read in range(1, 21):
            yield WRONG if num_read == 5 else f"text {num_read}"

    results, most_ahead = {}, 0
    iteration = llm.generate_as_completed(prompts(), GREEDY, errors="return", max_in_flight=3)
    for index, result in iteration:
        results[index] = result
        most_ahead = max(most_ahead, num_read - len(results) + 1)
    assert sorted(results) == list(range(20))
    assert [index for index, result in results.items() if not hasattr(result, "outputs")] == [4]
    assert most_ahead <= 3 + 1
    assert llm._instance.client.num_in_flight == 0


def test_enqueue_prompts_run_and_wait_returns_all_in_order(llm):
    expected = llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False)
    ids = llm.enqueue(["a", "b"], GREEDY) + llm.enqueue("c", GREEDY)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert [output.outputs[0].token_ids for output in outputs] == [output.outputs[0].token_ids for output in expected]
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_generate_as_completed_yields_shorter_outputs_first(llm):
    params = [msgspec.structs.replace(GREEDY, max_tokens=count) for count in (200, 5, 60)]
    outputs = list(llm.generate_as_completed(["a", "b", "c"], params))
    assert [index for index, _ in outputs] == [1, 2, 0]
    assert [len(output.outputs[0].token_ids) for _, output in outputs] == [5, 60, 200]
    assert all(output.finished for _, output in outputs)


def test_generate_one_invalid_prompt_runs_none(llm):
    with pytest.raises(PromptTooLong, match="400"):
        llm.generate(["fine", [5] * 400], GREEDY)
    with pytest.raises(InvalidRequest, match="empty"):
        llm.generate(["fine", ""], GREEDY)
    with pytest.raises(InvalidRequest, match="logprobs"):
        llm.generate("fine", SamplingParams(logprobs=21))
    assert len(llm.generate("fine", GREEDY)[0].outputs[0].token_ids) == 20


def test_collective_rpc_without_an_extension_has_built_in_methods_alone(llm):
    assert llm.collective_rpc("check_health") == [None]
    with pytest.raises(InvalidRequest, match="the workers have no method `describe`: every worker has `check_h"):
        llm.collective_rpc("describe")


def test_llm_invalid_option_raises_before_start(checkpoint):
    with pytest.raises(ConfigError, match="`port` is for the HTTP server"):
        LLM(str(checkpoint), port=80)
    with pytest.raises(ConfigError, match="did you mean `max_model_len`"):
        LLM(str(checkpoint), max_model_lenn=80)
    with pytest.raises(CheckpointError, match="no such directory"):
        LLM("/no/such/model")


def test_llm_failed_start_raises_in_caller(checkpoint):
    with pytest.raises(ConfigError, match=r"the cache has room for 0 blocks, .* needs .* blocks: give the cache more"):
        LLM(str(checkpoint), kv_cache_memory=1)


def test_generate_without_restarts_killed_engine_raises_cause(checkpoint):
    with LLM(str(checkpoint), max_engine_restarts=0, num_threads=1) as llm:
        os.kill(child_of_ours("engine-0"), signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(EngineFailed, match="engine-0 is gone: it was killed by SIGKILL"):
                llm.generate("x", SamplingParams(max_tokens=100_000, ignore_eos=True))
        with pytest.raises(EngineFailed, match="SIGKILL"):
            llm.collective_rpc("anything")


SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=150, ignore_eos=True)
PROMPTS = [[3 + i, 4, 5] for i in range(20)]


def token_ids(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, SAMPLED, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def undisturbed(llm):
    return token_ids(llm)


@pytest.mark.grid  # test_fleet.py has a batch on two engines, one of which is killed while it computes
def test_generate_several_engines_share_batch(checkpoint, undisturbed):
    with LLM(str(checkpoint), data_parallel_size=2, **OPTIONS) as llm:
        pids = [child_of_ours("engine-0"), child_of_ours("engine-1")]
        before = [cpu_seconds(pid) for pid in pids]
        assert token_ids(llm) == undisturbed
        assert all(cpu_seconds(pid) > then for pid, then in zip(pids, before, strict=True))


@pytest.mark.parametrize("kind", [pytest.param("engine", marks=pytest.mark.grid), "worker"])
def test_generate_killed_process_keeps_outputs(checkpoint, undisturbed, kind):
    executor = {"engine": "in-process", "worker": "processes"}[kind]
    with LLM(str(checkpoint), executor=executor, **OPTIONS) as llm, ThreadPoolExecutor(1) as pool:
        engine = child_of_ours("engine-0")
        victim = engine if kind == "engine" else child_of(engine)
        before = cpu_seconds(victim)
        answer = pool.submit(token_ids, llm)
        while cpu_seconds(victim) < before + 0.05:  # until the engine computes
            assert not answer.done()
        os.kill(victim, signal.SIGKILL)
        assert answer.result(SECONDS) == undisturbed
        child_of_ours("engine-0.1")
        assert token_ids(llm) == undisturbed


REPETITIVE = SamplingParams(
    temperature=0.05,
    seed=5,
    n=3,
    max_tokens=200,
    ignore_eos=True,
    logprobs=1,
    logit_bias=dict.fromkeys(range(7, 10), 9.0),
)
"""The biases let outputs repeat themselves and each other, so that three quarters of the tokens are drafted."""

SPECULATION = {"method": "suffix", "suffix_decoding_max_spec_factor": 4}


def samples(llm: LLM) -> list[tuple[list[int], list[float]]]:
    """Return tokens and their log-probabilities."""
    outputs = [one for output in llm.generate(PROMPTS[:6], REPETITIVE, use_tqdm=False) for one in output.outputs]
    return [
        (one.token_ids, [at[token].logprob for token, at in zip(one.token_ids, one.logprobs, strict=True)])
        for one in outputs
    ]


EXPERT_GROUP = {"executor": "in-process", "enable_expert_parallel": True, "expert_dispatch": "all-to-all"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "speculation"),
    [
        ({"executor": "in-process"}, SPECULATION),
        ({"executor": "processes"}, SPECULATION),
        (EXPERT_GROUP, {"method": "draft_model", "num_speculative_tokens": 3}),
    ],
    ids=str,
)
def test_generate_with_drafts_killed_engine_keeps_outputs(checkpoint, llm, options, speculation):
    """The draft model is the model itself, which each engine has whole."""
    expected = samples(llm)
    if speculation["method"] == "draft_model":
        speculation = speculation | {"model": str(checkpoint)}
    options = OPTIONS | options | {"data_parallel_size": 2, "speculative_config": speculation}
    with LLM(str(checkpoint), **options) as drafting, ThreadPoolExecutor(1) as pool:
        assert samples(drafting) == expected
        engine = child_of_ours("engine-0")
        before = cpu_seconds(engine)
        answer = pool.submit(samples, drafting)
        while cpu_seconds(engine) < before + 0.05:  # until the engine computes
            assert not answer.done()
        os.kill(engine, signal.SIGKILL)
        assert answer.result(SECONDS) == expected
        child_of_ours("engine-0.1")
        assert samples(drafting) == expected


PROBE = """
import os
class Probe:
    def __init__(self, worker):
        pass
    def pid(self):
        return os.getpid()
"""


def test_collective_rpc_calls_every_worker_of_every_engine(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "dp_probe.py").write_text(PROBE)
    monkeypatch.syspath_prepend(str(tmp_path))
    with LLM(str(checkpoint), data_parallel_size=2, worker_extension_cls="dp_probe:Probe", **OPTIONS) as llm:
        pids = [child_of_ours("engine-0"), child_of_ours("engine-1")]
        assert llm.collective_rpc("pid") == pids
        os.kill(pids[1], signal.SIGKILL)
        wait_until(lambda: not is_running(pids[1]))
        wait_until(lambda: child_of_ours("engine-1.1", None) is not None)
        assert llm.collective_rpc("pid") == [pids[0], child_of_ours("engine-1.1")]  # the call waits for the replacement


def child_of(pid: int) -> int:
    (child,) = children_of(pid)
    return child


def child_of_ours(label: str, *default: None) -> int | None:
    """Return the process id of this process's newest child with this label."""
    for pid in sorted(children_of(os.getpid()), key=start_time, reverse=True):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        if words[-1] == label.encode():
            return pid
    assert default, f"there is no {label}"
    return default[0]


def start_time(pid: int) -> int:
    """Return the time at which a process started, in ticks since the boot; ids begin anew now and then."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until(condition) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_llm_script_without_main_guard_leaves_no_process(checkpoint):
    script = f"""
        from eagleray import LLM, SamplingParams
        llm = LLM({str(checkpoint)!r}, log_level="warning")
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        print(len(llm.generate("x", params, use_tqdm=False)[0].outputs[0].token_ids))
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split()[0] == "3"
    assert run.stderr == ""


def run_script(script: str) -> subprocess.CompletedProcess:
    """Run a script after the import of `LLM` and some helpers."""
    text = "import gc, os, signal, sys, threading, time\nfrom eagleray import LLM, SamplingParams\n"
    text += f"""
def children():
    sys.path.insert(0, {str(Path(__file__).parents[1])!r})
    from processes import children_of

    return children_of(os.getpid())


def wait_for_no_children():
    deadline = time.monotonic() + 20
    while children():
        assert time.monotonic() < deadline, "an engine was left running"
        time.sleep(0.05)


signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

{textwrap.dedent(script)}"""
    run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return run


def test_llm_interrupted_start_leaves_no_process(checkpoint):
    run = run_script(f"""
        def interrupt_when_spawned():
            while not children():
                time.sleep(0.01)
            time.sleep(0.1)  # importing torch takes longer than this
            interrupt()

        threading.Thread(target=interrupt_when_spawned).start()
        try:
            LLM({str(checkpoint)!r}, log_level="warning")
        except KeyboardInterrupt:
            assert not children(), "an engine was left running"
            print("interrupted")
    """)
    assert (run.stdout, run.stderr) == ("interrupted\n", "")


def test_llm_collected_in_loop_thread_stops_engines(checkpoint):
    run_script(f"""
        def collect():
            gc.collect()
            collected.set()

        gc.disable()
        collected = threading.Event()
        cycle = [LLM({str(checkpoint)!r})]
        cycle.append(cycle)
        loop = cycle[0]._thread.loop
        del cycle
        loop.call_soon_threadsafe(collect)
        assert collected.wait(20)
        wait_for_no_children()
    """)


def test_llm_fork_exits_and_leaves_engine_running(checkpoint):
    run = run_script(f"""
        llm = LLM({str(checkpoint)!r})
        if fork := os.fork():
            deadline = time.monotonic() + 20
            while os.waitpid(fork, os.WNOHANG) == (0, 0):
                assert time.monotonic() < deadline, "the fork does not end"
                time.sleep(0.05)
            params = SamplingParams(max_tokens=1, ignore_eos=True)
            print(llm.generate("x", params, use_tqdm=False)[0].outputs[0].finish_reason)
        else:
            try:
                llm.generate("x")
            except ValueError as error:
                print(error, flush=True)
    """)
    refusal, answer = run.stdout.splitlines()
    assert "forked" in refusal
    assert answer == "length"
