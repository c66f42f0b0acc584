"""The runtime_env of a program reaches the workers, and the module of their extension with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray_cluster
from checkpoints import make_checkpoint
from ray._private.runtime_env.packaging import get_uri_for_directory, upload_package_if_needed
from runtime_env_program import EXTENSION

PROGRAM = Path(__file__).with_name("runtime_env_program.py")
TESTS = PROGRAM.parents[1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("runtime-env"), "qwen3"))


@pytest.fixture
def directory(tmp_path: Path) -> str:
    """Create a directory of the user's modules that is on the path of no process."""
    path = tmp_path / "users"
    path.mkdir()
    (path / "job_extension.py").write_text(EXTENSION)
    return str(path)


def seen_by_workers(*arguments: str, **variables: str) -> list[dict[str, Any]]:
    environ = {**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}", **variables}
    command = [sys.executable, str(PROGRAM), *arguments]
    done = subprocess.run(command, env=environ, cwd="/", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seen: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return seen


def test_llm_in_a_driver_with_working_dir_hands_it_to_workers(cluster: str, checkpoint: str, directory: str) -> None:
    seen = seen_by_workers("driver", cluster, checkpoint, directory)
    assert len(seen) == 2
    for one in seen:
        assert one["JOBVAR"] == "1"
        assert one["OPTION"] == "from the option", "merged variable by variable"
        assert one["module"] == f"{one['cwd']}/job_extension.py"
        assert "_ray_pkg_" in one["cwd"], "the package, not the directory that it was made of"


@pytest.mark.slow  # a driver hands its own on above
def test_llm_in_an_actor_hands_its_runtime_env_through_engine_actors(
    cluster: str, checkpoint: str, directory: str
) -> None:
    """The engine is an actor too. The devices of the program's own process are not handed on."""
    seen = seen_by_workers("actor", cluster, checkpoint, directory)
    assert len(seen) == 2
    for one in seen:
        assert (one["JOBVAR"], one["ACTORVAR"], one["OPTION"]) == ("1", "2", "from the option")
        assert "/py_modules_files/_ray_pkg_" in one["module"]
        assert one["DEVICES"] != ""


@pytest.mark.slow  # a driver hands its own on above
def test_llm_in_a_submitted_job_hands_the_jobs_runtime_env_to_workers(
    cluster: str, checkpoint: str, directory: str, tmp_path: Path
) -> None:
    uri = get_uri_for_directory(directory, include_gitignore=True)
    upload_package_if_needed(uri, str(tmp_path), directory, include_gitignore=True)
    submitted = {
        "runtime_env": {"working_dir": uri, "env_vars": {"JOBVAR": "1"}},
        "metadata": {"job_submission_id": "raysubmit_1"},
    }
    seen = seen_by_workers(
        "submitted", cluster, checkpoint, directory, RAY_JOB_CONFIG_JSON_ENV_VAR=json.dumps(submitted)
    )
    assert len(seen) == 2
    for one in seen:
        assert one["JOBVAR"] == "1"
        assert one["module"] == f"{one['cwd']}/job_extension.py"
    assert ray_cluster.wait_until(lambda: not ray_cluster.living_actors(), 5)
