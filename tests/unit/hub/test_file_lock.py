"""Locks of files that processes of one host share."""

from __future__ import annotations

import fcntl

import pytest

from eagleray.hub.file_lock import file_lock, free_lock


@pytest.mark.parametrize("is_temporary", [True, False])
def test_free_lock_file_stays_unless_temporary(tmp_path, is_temporary):
    path = tmp_path / "lock"
    with free_lock(path, is_temporary=is_temporary) as is_free, free_lock(path, is_temporary=True) as is_also_free:
        assert (is_free, is_also_free) == (True, False)
        assert path.exists()
    assert path.exists() is not is_temporary


def test_free_lock_file_that_cannot_be_opened_raises(tmp_path):
    with pytest.raises(IsADirectoryError), free_lock(tmp_path):
        pass


def test_free_lock_file_that_its_holder_removed_is_not_held(tmp_path, monkeypatch):
    path, lock = tmp_path / "lock", fcntl.flock

    def remove_and_lock(descriptor: int, operation: int) -> None:
        path.unlink()
        lock(descriptor, operation)

    monkeypatch.setattr("eagleray.hub.file_lock.fcntl.flock", remove_and_lock)
    with free_lock(path, is_temporary=True) as is_free:
        assert not is_free


def test_free_lock_of_a_held_file_lock_is_not_held(tmp_path):
    with file_lock(tmp_path / "lock", timeout=0, purpose="first"), free_lock(tmp_path / "lock") as is_free:
        assert not is_free
