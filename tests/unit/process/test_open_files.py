"""Limit of open files, raised by a program that serves."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from eagleray.process.open_files import raise_open_files_limit
soft, hard, needed = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(raise_open_files_limit(needed))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "needed", "raised"), [(256, 900, 0, 900), (800, 900, 5000, 900), (900, 900, 10, 900)]
)
def test_raise_open_files_limit_reaches_the_hard_limit(soft, hard, needed, raised):
    arguments = [str(number) for number in (soft, hard, needed)]
    run = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True)
    assert int(run.stdout) == raised


@pytest.mark.parametrize(
    ("limits", "needed", "raised"),
    [
        ((1024, 2**20), 0, 2**16),
        ((1024, 2**20), 100_000, 100_000),
        ((1024, resource.RLIM_INFINITY), 0, 2**16),
        ((2**17, 2**20), 0, 2**17),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 0, 2**30),
    ],
)
def test_raise_open_files_limit_unbounded_hard_limit_is_capped(monkeypatch, limits, needed, raised):
    from eagleray.process.open_files import raise_open_files_limit

    present = [limits]
    monkeypatch.setattr("resource.getrlimit", lambda which: present[0])
    monkeypatch.setattr("resource.setrlimit", lambda which, new: present.__setitem__(0, new))
    assert raise_open_files_limit(needed) == raised
