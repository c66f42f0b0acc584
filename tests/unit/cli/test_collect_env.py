"""`eagleray collect-env`: facts from files of the system, secrets, and a process that cannot import torch."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from eagleray.cli import collect_env
from eagleray.cli.collect_env import DEVELOPMENT_EXTRAS, format_facts, processor_facts, shown_variables
from eagleray.cli.main import main
from eagleray.kernels.cpu.build.library import native_library
from eagleray.kernels.cpu.build.openmp import NativeUnavailable
from eagleray.worker.device_report import describe_devices

X86 = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 sse avx512_bf16\n\nprocessor\t: 1\nflags: sve\n"
ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd bf16\n"


def test_processor_facts_are_those_of_the_first_processor():
    assert processor_facts(X86) == {"name": "Some CPU", "features": "avx2 avx512_bf16"}
    assert processor_facts(ARM) == {"name": "unknown", "features": "asimd bf16"}
    assert processor_facts("") == {"name": "unknown", "features": "none that kernels use"}


def test_shown_variables_hide_secrets_by_name_and_by_value():
    variables = {"HF_TOKEN": "abc", "RAY_ADDRESS": "10.0.0.1:6379", "HF_ENDPOINT": "https://me:word@hub"}
    shown = shown_variables(variables)
    assert shown["RAY_ADDRESS"] == "10.0.0.1:6379"
    assert "abc" not in shown["HF_TOKEN"] and "word" not in shown["HF_ENDPOINT"]


def test_development_extras_exist():
    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(DEVELOPMENT_EXTRAS) < extras.keys()


def test_format_facts_leaves_out_empty_sections():
    text = format_facts({"torch": {"version": "2", "CUDA": "no"}, "GPUs": {}, "memory": {"total": "1 GiB"}})
    assert text == "torch\n  version  2\n  CUDA     no\n\nmemory\n  total  1 GiB"


def test_collect_env_torch_that_crashes_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    main(["collect-env"])
    assert "torch\n  error  it ended with exit code 1" in capsys.readouterr().out


def test_device_facts_are_the_last_line_that_the_process_prints(monkeypatch, tmp_path):
    (program := tmp_path / "python").write_text(
        """#!/bin/sh\necho onednn_verbose\necho '{"torch": {"version": "9"}}'\n"""
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert collect_env._device_facts() == {"torch": {"version": "9"}}


def test_describe_devices_names_the_kernels_and_the_memory():
    facts = describe_devices()
    assert facts["kernels"]["CPU"].startswith(("in use: /", "not in use, plain torch computes: "))
    assert facts["memory"]["total"].endswith("GiB")


def test_describe_devices_says_why_kernels_are_not_in_use(monkeypatch):
    def fail():
        raise NativeUnavailable("there is no C++ compiler")

    monkeypatch.setattr("eagleray.worker.device_report.native_library", fail)
    assert describe_devices()["kernels"]["CPU"] == "not in use, plain torch computes: there is no C++ compiler"


def test_describe_devices_wrong_name_of_kernels_is_reported(monkeypatch):
    monkeypatch.setenv("EAGLERAY_CPU_KERNELS", "no-such-kernels")
    native_library.cache_clear()
    found = describe_devices()["kernels"]["CPU"]
    assert found.startswith("not in use, engines do not start: variable EAGLERAY_CPU_KERNELS: `no-such-kernels`")
