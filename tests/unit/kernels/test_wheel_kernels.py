"""The build of a wheel compiles the kernels of every variant of the compiler's architecture."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagleray.kernels.cpu.build.cache import is_whole
from eagleray.kernels.cpu.build.variants import VARIANTS

ROOT = Path(__file__).parents[3]
PREBUILT = Path("eagleray", "kernels", "cpu", "prebuilt")

COMPILER = """#!/bin/sh
# Answers the question for macros, and writes its flags where a library would be.
case "$*" in *" -dM "*) echo "#define __{architecture}__ 1"; exit;; esac
flags="$*"
while [ "$1" != -o ]; do shift; done
case "$2" in *.cpp.o) echo "$flags" > flags;; esac
cp flags "$2"
"""


def build_kernels(tmp_path: Path, compiler: str, **variables: str) -> str:
    """Run the step of the build that compiles, and return its messages."""
    command = [sys.executable, "setup.py", "build_kernels"]
    environment = {**os.environ, "CXX": compiler, "PYTHONDONTWRITEBYTECODE": "1", **variables}
    config = tmp_path / "setup.cfg"
    config.write_text(f"[build]\nbuild_base = {tmp_path / 'base'}\nbuild_lib = {tmp_path / 'lib'}\n")
    environment["DIST_EXTRA_CONFIG"] = str(config)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
def test_build_kernels_compiles_every_variant_with_its_flags(tmp_path, architecture):
    compiler = tmp_path / "cross-c++"
    compiler.write_text(COMPILER.replace("{architecture}", architecture))
    compiler.chmod(0o755)
    build_kernels(tmp_path, str(compiler))
    variants = [variant for variant in VARIANTS if variant.architecture == architecture]
    libraries = {path.name: path for path in (tmp_path / "lib" / PREBUILT).iterdir()}
    assert libraries.keys() == {variant.prebuilt.name for variant in variants}
    assert all(map(is_whole, libraries.values()))
    for variant in variants:
        assert f" {' '.join(variant.flags)} ".encode() in libraries[variant.prebuilt.name].read_bytes()


@pytest.mark.parametrize("chosen", ["no-such-compiler", " "])
def test_build_kernels_without_a_compiler_warns(tmp_path, chosen):
    messages = build_kernels(tmp_path, chosen, PATH=str(tmp_path))
    assert "this wheel gets no prebuilt kernels: there is no C++ compiler on PATH" in messages
    assert not (tmp_path / "lib").exists()


def test_setup_needs_no_package_but_setuptools():
    """Installers build a wheel in an environment of its own, without torch."""
    imports = [line for line in (ROOT / "setup.py").read_text().splitlines() if line.startswith("from eagleray")]
    assert imports
    program = "\n".join(["import sys", f"sys.path.insert(0, {str(ROOT)!r})", *imports])
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True, timeout=60)
