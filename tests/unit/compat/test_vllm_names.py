"""The package that programs import as `vllm`: names, options, and a program that steers a model by them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from checkpoints import make_checkpoint

ROOT = Path(__file__).parents[3]
NAME_PATH = ROOT / "eagleray/compat/on_path"


def run_program(program: str) -> str:
    path = os.pathsep.join([str(NAME_PATH), str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_vllm_names_are_modules_of_this_package():
    out = run_program("""
        import vllm
        import vllm.inputs
        import eagleray.compat.vllm.inputs
        from vllm import LLM, AsyncEngineArgs, AsyncLLMEngine, EngineArgs, RequestOutput, SamplingParams
        from vllm.distributed.parallel_state import get_world_group
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
        from vllm.engine.arg_utils import AsyncEngineArgs as same_args
        from vllm.engine.async_llm_engine import AsyncLLMEngine as same_engine
        from vllm.logger import init_logger
        from vllm.outputs import CompletionOutput, EmbeddingRequestOutput, PoolingRequestOutput
        from vllm.pooling_params import PoolingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
        from vllm.utils import get_open_port, random_uuid
        from vllm.utils.network_utils import get_ip
        from vllm.v1.engine.async_llm import AsyncLLM
        import eagleray

        assert vllm.inputs is eagleray.compat.vllm.inputs
        assert same_args is AsyncEngineArgs and same_engine is AsyncLLMEngine is AsyncLLM
        assert SamplingParams is eagleray.SamplingParams
        assert tuple(map(int, vllm.__version__.split("."))) > (0, 8, 5)
        assert len(random_uuid()) == 32 and 0 < get_open_port() < 65536 and get_ip()
        try:
            import vllm.model_executor
        except ModuleNotFoundError as error:
            print(error)
    """)
    assert "No module named 'vllm.model_executor': `vllm` is eagleray here" in out


def test_vllm_path_is_printed_by_its_module():
    printed = subprocess.run([sys.executable, "-m", "eagleray.compat.vllm"], capture_output=True, text=True, check=True)
    assert Path(printed.stdout.strip()) == NAME_PATH


def test_vllm_structured_outputs_constrain_the_completion():
    from eagleray.compat.vllm.sampling_params import SamplingParams, StructuredOutputsParams

    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    assert params.structured_outputs.to_grammar().source == "a"


def test_vllm_program_generates_and_steers(tmp_path):
    checkpoint = make_checkpoint(tmp_path, "llama")
    out = run_program(f"""
        import asyncio
        from copy import deepcopy
        import vllm
        from vllm.inputs import TokensPrompt
        from vllm.utils import random_uuid

        class Rollouts:
            async def start(self):
                args = vllm.AsyncEngineArgs(
                    model={str(checkpoint)!r}, enforce_eager=True, tensor_parallel_size=1, seed=1,
                    distributed_executor_backend="uni", max_model_len=200, enable_prefix_caching=True,
                    dtype="float32", trust_remote_code=True, gpu_memory_utilization=None, enable_sleep_mode=True,
                    logprobs_mode="processed_logprobs", max_logprobs=1,
                )
                self.llm = vllm.AsyncLLMEngine.from_engine_args(args)
                assert not await self.llm.is_sleeping()

            async def generate(self, params):
                prompt = TokensPrompt(prompt_token_ids=[5, 6, 7])
                final = None
                async for output in self.llm.generate(prompt, deepcopy(params), request_id=random_uuid()):
                    final = output
                return final

        async def main():
            rollouts = Rollouts()
            await rollouts.start()
            params = vllm.SamplingParams(temperature=0.7, max_tokens=8, logprobs=0, ignore_eos=True, seed=4)
            params.skip_special_tokens = False
            first = await rollouts.generate(params)
            await rollouts.llm.pause_generation(mode="keep")
            await rollouts.llm.resume_generation()
            await rollouts.llm.sleep(level=1)
            for tag in ("weights", "kv_cache"):
                await rollouts.llm.wake_up(tags=[tag])
            await rollouts.llm.reset_prefix_cache()
            second = await rollouts.generate(params)
            assert second.outputs[0].token_ids == first.outputs[0].token_ids
            assert all(entry[token].logprob <= 0 for token, entry in zip(
                first.outputs[0].token_ids, first.outputs[0].logprobs, strict=True))
            print(rollouts.llm.output_processor.get_num_unfinished_requests(), len(first.outputs[0].token_ids))
            rollouts.llm.shutdown()

        asyncio.run(main())
    """)
    assert out.split() == ["0", "8"]
