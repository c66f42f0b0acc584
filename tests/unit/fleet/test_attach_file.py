from __future__ import annotations

import asyncio
import json
import stat

import pytest

import eagleray
from eagleray.config.build import build_config
from eagleray.errors import ConfigError
from eagleray.fleet.attach_file import attach_file
from eagleray.fleet.supervisor import Supervisor

CONTENT = {"instance": "i", "supervisor": "ipc:///s", "model": "m"}


def test_attach_file_within_block_exists_with_mode_0600(tmp_path):
    path = tmp_path / "attach.json"
    with attach_file(path, **CONTENT):
        assert json.loads(path.read_text()) == CONTENT | {"version": eagleray.__version__}
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert list(tmp_path.iterdir()) == [path]
    assert list(tmp_path.iterdir()) == []


def test_attach_file_replaced_by_another_instance_is_kept(tmp_path):
    path = tmp_path / "attach.json"
    with attach_file(path, **CONTENT), attach_file(path, **CONTENT | {"instance": "other"}):
        assert json.loads(path.read_text())["instance"] == "other"
    assert list(tmp_path.iterdir()) == []
    with attach_file(path, **CONTENT):
        path.write_text("other")
    assert path.read_text() == "other"


def test_attach_file_missing_directory_raises_config_error(tmp_path):
    path = tmp_path / "missing" / "attach.json"
    with pytest.raises(ConfigError, match=f"cannot write {path}: No such file"), attach_file(path, **CONTENT):
        pass


def test_supervisor_open_writes_attach_file(tmp_path):
    path = tmp_path / "attach.json"

    async def scenario():
        supervisor = await Supervisor.open(build_config(attach_file=str(path), served_model_name=["mine"]))
        content = json.loads(path.read_text())
        assert (content["instance"], content["model"]) == (supervisor.instance, "mine")
        assert content["supervisor"] == f"ipc://{supervisor.runtime_dir}/supervisor"
        await supervisor.stop(0.0)
        assert not path.exists()
        assert not supervisor.runtime_dir.exists()

    asyncio.run(scenario())
