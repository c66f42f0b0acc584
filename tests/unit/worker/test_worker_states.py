"""A worker handles each call in the state that it fits, and fails with one error in any other."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
from checkpoints import make_checkpoint
from ranks import together, topology

from eagleray.config.build import build_config
from eagleray.identity import EngineId, WorkerId
from eagleray.kernels.cpu.backend import CpuBackend
from eagleray.kernels.cuda.backend import CudaBackend
from eagleray.kernels.cuda.program import CudaProgram
from eagleray.kernels.torch.backend import TorchBackend
from eagleray.messages.failure import Ended
from eagleray.messages.grammars import Grammar
from eagleray.messages.plain import pack_arguments, unpack
from eagleray.messages.steps import (
    AllocateCache,
    Call,
    CallDone,
    CallExtension,
    GrammarPrepared,
    JoinGroup,
    LoadModel,
    LoadNullModel,
    MeasureMemory,
    MemoryMeasured,
    ModelLoaded,
    OpenGroup,
    PrepareGrammar,
    ReadExpertLoad,
    StepPlan,
)
from eagleray.messages.workers import EngineOpened, GroupOpened
from eagleray.models import registry
from eagleray.models.base import Model
from eagleray.parallel.groups import Groups
from eagleray.worker import startup
from eagleray.worker.worker import Worker

ID = WorkerId(EngineId("test", 0))
ONE_RANK = topology()
IDLE_STEP = StepPlan(step=0, freed_rows=[], new_rows=[], new_blocks=[], rows=[], num_tokens=[], is_idle=True)
JOIN = JoinGroup("engine", 0, [EngineOpened(rank=0, topology=ONE_RANK, opened=[GroupOpened()])])
START = {
    "WorkerSetup": OpenGroup("engine"),
    "OpenedWorker": JOIN,
    "JoinedWorker": LoadModel(),
    "LoadedWorker": AllocateCache(8, 64),
}
"""The call that leads from each state to the next one."""
MODULE = """
class Probe:
    def __init__(self, worker):
        self.worker = worker

    def describe(self):
        worker = self.worker
        return [worker.rank, worker.mesh.world_size, str(worker.device), worker.model.spec.num_layers]
"""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("made"), "qwen3", tokenizer=False)


@pytest.fixture
def worker(checkpoint):
    worker = Worker(ID, 0, build_config(model=str(checkpoint), num_threads=1), ONE_RANK)
    yield worker
    worker.close()


def call(worker, body):
    [reply] = worker.handle(Call(1, body))
    return reply.body


def bring_to(worker, state):
    for name, body in START.items():
        if name == state:
            return
        assert not isinstance(call(worker, body), Ended)


def test_worker_start_replies_in_each_state(worker):
    assert isinstance(call(worker, OpenGroup("engine")), GroupOpened)
    assert isinstance(call(worker, JOIN), CallDone)
    assert isinstance(call(worker, LoadModel()), ModelLoaded)
    assert isinstance(call(worker, MeasureMemory(64)), MemoryMeasured)
    assert isinstance(call(worker, AllocateCache(8, 64)), CallDone)
    assert call(worker, ReadExpertLoad()).counts.shape == (0, 0)


def test_worker_compiles_grammars_only_if_its_rank_samples(checkpoint):
    """The model has no tokenizer, so a rank that compiles refuses every grammar."""
    where = topology(pp=2)
    config = build_config(model=str(checkpoint), num_threads=1, pipeline_parallel_size=2)
    workers = [Worker(WorkerId(EngineId("test", 0), 0, rank), rank, config, where) for rank in range(2)]

    def call_all(body):
        return together([partial(call, worker, body) for worker in workers])

    opened = call_all(OpenGroup("engine"))
    for body in (JoinGroup("engine", 0, [EngineOpened(rank=0, topology=where, opened=opened)]), LoadModel()):
        assert not any(isinstance(reply, Ended) for reply in call_all(body))
    call_all(AllocateCache(8, 64))
    first, last = call_all(PrepareGrammar(Grammar(kind="regex", source="a+")))
    assert first == GrammarPrepared(is_done=True)
    while not last.is_done:
        last = call(workers[1], PrepareGrammar(Grammar(kind="regex", source="a+")))
    assert "tokenizer" in last.failure.message
    for worker in workers:
        worker.close()


@pytest.mark.parametrize("state", [*START, "ServingWorker"])
def test_worker_call_of_another_state_fails(worker, state):
    bring_to(worker, state)
    body = LoadModel() if state == "ServingWorker" else IDLE_STEP
    ended = call(worker, body)
    assert isinstance(ended, Ended) and ended.member == ID
    assert ended.cause.message == f"{type(body).__name__} is not a call for the state {state}"
    assert worker.handle(Call(2, START["WorkerSetup"])) == [], "a worker that has failed handles no calls"


@pytest.mark.parametrize("state", ["LoadedWorker", "ServingWorker"])
def test_worker_close_frees_graphs_before_it_leaves_the_groups(worker, state, monkeypatch):
    """NCCL waits until captured graphs with its operations are freed, even if the group is aborted."""
    programs, lower = [], CpuBackend.lower

    def watched(*arguments, **options):
        program = lower(*arguments, **options)
        programs.append(weakref.ref(program))
        return program

    monkeypatch.setattr(CpuBackend, "lower", watched)
    bring_to(worker, state)
    if state == "LoadedWorker":
        assert isinstance(call(worker, MeasureMemory(64)), MemoryMeasured)
    assert any(program() is not None for program in programs)
    left, leave = [], Groups.close

    def close(groups):
        left.extend(program() for program in programs)
        leave(groups)

    monkeypatch.setattr(Groups, "close", close)
    worker.close()
    assert left == [None] * len(programs)


def test_null_worker_step_needs_no_start(worker):
    assert isinstance(call(worker, LoadNullModel()), CallDone)
    assert call(worker, IDLE_STEP).rows == []
    assert isinstance(call(worker, LoadNullModel()), CallDone)


def test_worker_extension_sees_loaded_worker(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "users_view.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    config = build_config(model=str(checkpoint), num_threads=1, worker_extension_cls="users_view:Probe")
    worker = Worker(ID, 0, config, ONE_RANK)
    bring_to(worker, "ServingWorker")
    returned = call(worker, CallExtension("describe", pack_arguments((), {})))
    assert returned.failure is None
    assert unpack(returned.value) == [0, 1, "cpu", 3]
    worker.close()


def test_worker_extension_that_is_a_mixin_has_the_default_group(checkpoint, tmp_path, monkeypatch):
    code = "import torch.distributed as dist\n\nclass Mixin:\n    def ranks(self):\n"
    (tmp_path / "users_mixin.py").write_text(
        code + "        return [self.rank, dist.get_rank(), dist.get_world_size()]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = build_config(model=str(checkpoint), num_threads=1, worker_extension_cls="users_mixin.Mixin")
    worker = Worker(ID, 0, config, ONE_RANK)
    bring_to(worker, "ServingWorker")
    returned = call(worker, CallExtension("ranks", pack_arguments((), {})))
    assert unpack(returned.value) == [0, 0, 1]
    worker.close()
    assert not torch.distributed.is_initialized()


def fail_to_compile(program, limits, last_tokens):
    raise RuntimeError("Failed to find C compiler")


@pytest.fixture
def gpu_kernels(monkeypatch):
    """Give the worker the backend of GPUs, whose kernels cannot be compiled, unless plain torch is asked for."""

    def choose(device, model, attention_backend):
        return TorchBackend() if attention_backend == "torch" else CudaBackend(model.dtype)

    monkeypatch.setattr(registry, "choose_backend", choose)
    monkeypatch.setattr(CudaProgram, "warm_up", fail_to_compile)


def test_worker_kernel_that_does_not_compile_falls_back_to_plain_torch(worker, gpu_kernels, caplog, monkeypatch):
    made: list[weakref.ref[Model]] = []
    load = startup.load_model

    def load_model(*arguments, **options):
        assert all(model() is None for model in made), "the weights of the first model are still there"
        model = load(*arguments, **options)
        made.append(weakref.ref(model))
        return model

    monkeypatch.setattr(startup, "load_model", load_model)
    bring_to(worker, "JoinedWorker")
    loaded = call(worker, LoadModel())
    assert len(made) == 2
    assert isinstance(loaded, ModelLoaded) and loaded.kernels == "TorchBackend"
    assert any("Failed to find C compiler" in record.getMessage() for record in caplog.records)


def test_worker_kernel_that_was_asked_for_and_does_not_compile_is_refused(checkpoint, gpu_kernels):
    worker = Worker(ID, 0, build_config(model=str(checkpoint), num_threads=1, attention_backend="triton"), ONE_RANK)
    bring_to(worker, "JoinedWorker")
    ended = call(worker, LoadModel())
    assert isinstance(ended, Ended) and ended.cause.is_user_error
    assert "`attention_backend`: triton cannot be used here" in ended.cause.message
    worker.close()


def test_worker_fp8_cache_takes_a_quarter_of_float32(checkpoint, monkeypatch):
    monkeypatch.setattr(registry, "choose_backend", lambda *_: TorchBackend())
    monkeypatch.setattr(TorchBackend, "serves_cache", lambda *_, of_latents: True)
    sizes = []
    for cache_dtype in ("auto", "fp8"):
        worker = Worker(ID, 0, build_config(model=str(checkpoint), num_threads=1, kv_cache_dtype=cache_dtype), ONE_RANK)
        bring_to(worker, "JoinedWorker")
        sizes.append(call(worker, LoadModel()).bytes_per_block)
        worker.close()
    assert sizes[0] == 4 * sizes[1]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"quantization": "fp8"}, "option `quantization`"),
        ({"kv_cache_dtype": "fp8", "attention_backend": "torch"}, "option `kv_cache_dtype`"),
    ],
)
def test_worker_fp8_on_a_cpu_is_refused(checkpoint, options, problem):
    worker = Worker(ID, 0, build_config(model=str(checkpoint), num_threads=1, **options), ONE_RANK)
    bring_to(worker, "JoinedWorker")
    ended = call(worker, LoadModel())
    assert isinstance(ended, Ended) and ended.cause.is_user_error and problem in ended.cause.message
    worker.close()
