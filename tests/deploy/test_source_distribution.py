"""The source distribution has every file of the tree."""

from __future__ import annotations

import subprocess
import sys
import tarfile

import pytest
from deploy_files import ROOT

pytestmark = pytest.mark.deploy

LEFT_OUT = {".ci/run", ".dockerignore", ".gitignore"}


def test_source_distribution_has_every_tracked_file(tmp_path):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    build = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert set(listed) - names == LEFT_OUT
    assert {"Makefile", "tests/conftest.py", "docs/architecture.md"} <= names
