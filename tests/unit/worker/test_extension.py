"""The worker extension: it is found and made, and calls do not harm the worker. Built-in methods need none."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import topology
from safetensors.torch import save_file

from eagleray.config.build import build_config
from eagleray.errors import ConfigError, InvalidRequest
from eagleray.identity import EngineId, WorkerId
from eagleray.messages.plain import pack_arguments, unpack
from eagleray.worker.extension import Extension
from eagleray.worker.worker_view import WorkerView, view_arguments

MODULE = """
import numpy as np
import torch
from eagleray.errors import InvalidRequest

class Base:
    def rank(self):
        return self.worker.rank

class Mine(Base):
    number = 5

    def __init__(self, worker):
        self.worker = worker
        self.helper = print

    def show(self, *args, **kwargs):
        return {"args": args, "kwargs": kwargs}

    def double(self, array):
        array *= 2
        return [array, array.sum()]

    def fail(self):
        raise KeyError("no weights")

    def refuse(self):
        raise InvalidRequest("mine")

    def strange(self):
        return [{1, 2}]

    def _private(self):
        pass

    @staticmethod
    def still():
        return "still"

class Demanding:
    def __init__(self, worker, more):
        pass

class Verbose(Mine):
    def __init__(self, worker, verbose=False):
        super().__init__(worker)

class Bare:
    def describe(self):
        return [self.rank, self.local_rank, str(self.device), self.vllm_config.parallel_config.data_parallel_rank]

    def load(self, name, dtype, shape):
        assert dtype == self.model_config.dtype
        self.model_runner.model.load_weights(weights=[(name, torch.ones(shape, dtype=dtype))])

    def liveness_probe(self):
        return "mine"

class Prepared:
    # before the worker's attributes exist, it has the keywords alone
    def __new__(cls, **kwargs):
        made = super().__new__(cls)
        made.seen = [kwargs["vllm_config"].model_config.max_model_len, kwargs["rank"], kwargs["local_rank"]]
        return made

    def show(self):
        return [self.seen, self.rank]

class Passing:
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.twice = 2 * self.rank

    def show(self):
        return self.twice

class Keeping:
    def __init__(self, **kwargs):
        pass

class Closed:
    def __init__(self):
        self.state = {}

not_a_class = 5
"""


class FakeModel:
    dtype = torch.bfloat16

    def __init__(self):
        self.loaded = []
        self.num_loads = 0

    def load_weights(self, weights):
        self.num_loads += 1
        weights = list(weights)
        self.loaded += weights
        return {name for name, _ in weights}


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "users_module.py").write_text(MODULE)
    (tmp_path / "users_broken.py").write_text("raise RuntimeError('not today')\n")
    (tmp_path / "users_lacking.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def worker(tmp_path):
    """The parts of a loaded worker that an extension sees: rank 3 of the second engine, on a node with rank 2."""
    fields = {"hidden_size": 8, "rope_scaling": {"factor": 2.0}, "architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = build_config(model=str(tmp_path), tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)
    setup = SimpleNamespace(
        config=config, topology=topology(tp=2, pp=2, nodes="aabb"), worker=WorkerId(EngineId("test", 1))
    )
    return SimpleNamespace(
        rank=3, setup=setup, device=torch.device("cpu"), model=FakeModel(), max_model_len=64, groups_opened=0
    )


def load(path, worker):
    def open_default_group():
        worker.groups_opened += 1

    return Extension.load(path, worker, open_default_group=open_default_group)


@pytest.fixture
def extension(module, worker):
    return load("users_module:Mine", worker)


def call(extension, method, *args, **kwargs):
    returned = extension.call(method, pack_arguments(args, kwargs))
    assert returned.failure is None
    return unpack(returned.value)


def failure_of(extension, method, *args):
    returned = extension.call(method, pack_arguments(args, {}))
    assert returned.value is None
    return returned.failure


def test_extension_call_passes_plain_arguments_and_results(extension):
    assert call(extension, "show", 1, [2.5], x={"y": b"z"}) == {"args": [1, [2.5]], "kwargs": {"x": {"y": b"z"}}}
    assert call(extension, "rank") == 3
    assert call(extension, "still") == "still"
    array, total = call(extension, "double", np.arange(4.0))
    assert (array.tolist(), total) == ([0, 2, 4, 6], 12)


def test_extension_call_method_raises_returns_failure(extension):
    failure = failure_of(extension, "fail")
    assert str(failure) == "KeyError: 'no weights'"
    assert "in fail" in failure.traceback
    assert str(failure_of(extension, "rank", 1)).startswith("TypeError: Base.rank() takes 1 positional argument")
    assert str(failure_of(extension, "refuse")) == "InvalidRequest: mine"  # the method's, not about the call
    assert call(extension, "rank") == 3


def test_extension_call_result_not_plain_returns_failure_with_place(extension):
    failure = failure_of(extension, "strange")
    assert failure.kind == "TypeError"
    assert "the result of `strange`[0]: a value of type builtins.set" in failure.message


@pytest.mark.parametrize("method", ["missing", "_private", "__init__", "__class__", "number", "worker", "helper", ""])
def test_extension_call_not_a_public_method_is_refused(extension, method):
    failure = failure_of(extension, method)
    assert (failure.kind, failure.is_user_error) == (InvalidRequest.__name__, True)
    assert failure.message == (
        f"worker extension `users_module:Mine` has no public method `{method}`: it has `double`, `fail`, `rank`, "
        "`refuse`, `show`, `still`, `strange`; every worker has `check_health`, `liveness_probe`, `load_weights`, "
        "`reload_weights`, `weight_checksums`"
    )


def test_extension_call_finds_built_in_methods_without_extension(worker):
    extension = load(None, worker)
    assert call(extension, "check_health") is None
    assert call(extension, "liveness_probe") is None
    failure = failure_of(extension, "weigh")
    assert (failure.kind, failure.is_user_error) == (InvalidRequest.__name__, True)
    assert failure.message == (
        "the workers have no method `weigh`: every worker has `check_health`, `liveness_probe`, `load_weights`, "
        "`reload_weights`, `weight_checksums`; for methods of your own set the option `worker_extension_cls` to "
        "`package.module.Class`"
    )
    assert worker.groups_opened == 0


@pytest.mark.parametrize("path", ["users_module:Mine", "users_module.Mine", "users_module.Verbose"])
def test_extension_load_with_one_positional_argument_gives_the_worker(module, worker, path):
    extension = load(path, worker)
    assert call(extension, "rank") == 3
    assert call(extension, "check_health") is None  # built in
    assert worker.groups_opened == 0


def test_extension_load_without_constructor_makes_a_mixin(module, worker):
    extension = load("users_module.Bare", worker)
    assert worker.groups_opened == 1
    assert call(extension, "describe") == [3, 1, "cpu", 1]
    assert call(extension, "liveness_probe") == "mine"
    assert call(extension, "check_health") is None
    call(extension, "load", "model.norm.weight", torch.bfloat16, torch.Size([2]))
    ((name, tensor),) = worker.model.loaded
    assert (name, tensor.tolist()) == ("model.norm.weight", [1, 1])
    assert "AssertionError" in str(failure_of(extension, "load", "model.norm.weight", torch.float16, [2]))
    assert failure_of(extension, "weigh").message == (
        "worker extension `users_module:Bare` has no public method `weigh`: it has `describe`, `liveness_probe`, "
        "`load`; every worker has `check_health`, `liveness_probe`, `load_weights`, "
        "`reload_weights`, `weight_checksums`"
    )


def test_extension_call_that_loads_weights_says_so(module, worker):
    weights = [["model.norm.weight", torch.ones(2)], ("lm_head.weight", torch.zeros(3))]
    extension = load(None, worker)
    returned = extension.call("load_weights", pack_arguments([weights], {}))
    assert (unpack(returned.value), returned.has_loaded_weights) == (["lm_head.weight", "model.norm.weight"], True)
    assert [(name, len(tensor)) for name, tensor in worker.model.loaded] == [
        ("model.norm.weight", 2),
        ("lm_head.weight", 3),
    ]
    assert not extension.call("check_health", pack_arguments((), {})).has_loaded_weights


def test_extension_reload_weights_reads_directory_or_pairs(tmp_path, worker):
    extension = load(None, worker)
    (tmp_path / "other").mkdir()
    for directory, value in ((tmp_path, 1.0), (tmp_path / "other", 2.0)):
        save_file({"model.norm.weight": torch.full((2,), value)}, directory / "model.safetensors")
    call(extension, "reload_weights")
    call(extension, "reload_weights", str(tmp_path / "other"))
    call(extension, "reload_weights", weights_iterator=[("model.norm.weight", torch.full((2,), 3.0))])
    assert [(name, tensor.tolist()) for name, tensor in worker.model.loaded] == [
        ("model.norm.weight", [value] * 2) for value in (1.0, 2.0, 3.0)
    ]
    assert "there is no such directory" in str(failure_of(extension, "reload_weights", str(tmp_path / "none")))


def test_extension_load_with_keywords_makes_a_mixin(module, worker):
    assert call(load("users_module:Prepared", worker), "show") == [[64, 3, 1], 3]
    assert call(load("users_module:Passing", worker), "show") == 6


def test_worker_view_describes_model_and_engine(tmp_path, worker):
    view = WorkerView(**view_arguments(worker))
    model, parallel = view.model_config, view.parallel_config
    assert (model.model, model.dtype, model.max_model_len) == (str(tmp_path), torch.bfloat16, 64)
    assert (model.hf_config.hidden_size, model.hf_config.rope_scaling.factor) == (8, 2.0)
    assert model.hf_config.to_dict()["rope_scaling"] == {"factor": 2.0}
    assert not hasattr(model.hf_config, "quantization_config")
    assert (parallel.rank, parallel.world_size, parallel.data_parallel_rank) == (3, 4, 1)
    assert (parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.data_parallel_size) == (2, 2, 2)
    assert view.vllm_config.model_config is view.model_runner.model_config is model
    assert (view.load_config.load_format, view.model_runner.model) == ("auto", worker.model)
    for place, name in ((model, "dtype"), (parallel, "rank"), (view.load_config, "load_format")):
        with pytest.raises(AttributeError):
            setattr(place, name, None)
    with pytest.raises(AttributeError, match="`hidden_size` cannot be changed: the model is loaded"):
        model.hf_config.hidden_size = 16


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("users_module", "it must be of the form `package.module.Class` or `package.module:Class`"),
        (":Mine", "it must be of the form `package.module.Class`"),
        ("users_module.", "it must be of the form `package.module.Class`"),
        ("users_modul.Mine", "no module `users_modul` can be imported"),
        ("users_modul:Mine", "no module `users_modul` can be imported; add its directory to PYTHONPATH"),
        ("users_lacking:Mine", "no module `no_such_dependency` can be imported"),
        ("users_broken:Mine", "importing `users_broken` raised RuntimeError: not today"),
        ("users_module:Yours", "module `users_module` has no `Yours`"),
        ("users_module:not_a_class", "module `users_module` has a int, not a class, of name `not_a_class`"),
        ("users_module:Demanding", r"its constructor needs `worker`, `more`: it must take the worker as its only"),
        ("users_module:Keeping", r"its constructor must pass its keywords on: `super\(\).__init__\(\*\*kwargs\)`"),
        ("users_module:Closed", "making it with the worker raised TypeError: .*'worker'"),
    ],
)
def test_extension_load_invalid_option_raises_config_error(module, worker, path, message):
    with pytest.raises(ConfigError, match=f"option `worker_extension_cls` = '{path}': {message}"):
        load(path, worker)
