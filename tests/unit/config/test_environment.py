"""Changes of this process's environment."""

from __future__ import annotations

import os

import pytest

from eagleray.config.environment import see_devices


def test_see_devices_names_restrict_none_leaves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    see_devices([])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    see_devices(["2", "3"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
