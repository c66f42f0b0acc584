"""The cache of Hugging Face, which many programs share: its place, and the snapshots that it holds. Only reads.

A repository has a directory `models--ORG--NAME`. In it `refs/REVISION` is a file that names a commit, and
`snapshots/COMMIT` a directory whose entries link to `blobs`.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from eagleray.config.json_files import read_optional_json_object
from eagleray.errors import CheckpointError

HUB_ID = re.compile(r"(?=.{1,200}\Z)(?:[A-Za-z0-9_][A-Za-z0-9._-]*/)?[A-Za-z0-9_][A-Za-z0-9._-]*")
COMMIT = re.compile(r"[0-9a-f]{40}")
REVISION = re.compile(r"(?=.{1,200}\Z)(?!.*\.\.)[A-Za-z0-9_](?:[A-Za-z0-9_./+@-]*[A-Za-z0-9_+@-])?")
DEFAULT_REVISION = "main"

MAX_COMMIT_BYTES = 256
MAX_LISTED_IDS = 10_000
MAX_NEAREST = 3


def is_hub_id(name: str) -> bool:
    """Whether a text has the form `ORG/NAME` or `NAME`."""
    return HUB_ID.fullmatch(name) is not None and ".." not in name and "--" not in name


def cache_dir(download_dir: str | None) -> Path:
    """Return the directory of the cache: `download_dir`, or the one that the environment names."""
    if download_dir:
        return Path(os.path.expanduser(download_dir))
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if given := os.environ.get(variable):
            return Path(os.path.expanduser(os.path.expandvars(given)))
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expanduser(os.path.expandvars(home))) / "hub"


def is_offline() -> bool:
    """Whether the environment forbids to connect to a hub."""
    variables = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in variables)


@dataclass(frozen=True)
class CachedRepo:
    """The directory of one repository in a cache, which need not exist."""

    cache: Path
    repo_id: str

    @property
    def path(self) -> Path:
        return self.cache / f"models--{self.repo_id.replace('/', '--')}"

    @property
    def lock_file(self) -> Path:
        """File that a process locks while it downloads."""
        return self.cache / ".locks" / self.path.name / "eagleray.lock"

    def snapshot(self, commit: str) -> Path:
        return self.path / "snapshots" / commit

    def ref_file(self, revision: str) -> Path:
        return self.path / "refs" / revision

    def find_commit(self, revision: str) -> str | None:
        """Return the commit of a revision, which may be a commit itself; None if the cache does not know it."""
        if COMMIT.fullmatch(revision):
            return revision if self.snapshot(revision).is_dir() else None
        try:
            with self.ref_file(revision).open("rb") as file:
                commit = file.read(MAX_COMMIT_BYTES).decode().strip()
        except (OSError, ValueError):
            return None
        return commit if COMMIT.fullmatch(commit) else None

    def listed_files(self, commit: str) -> list[str]:
        """Return the names of all files of a commit, if the program that filled the cache has left a listing."""
        try:
            files = read_optional_json_object(self.path / "trees" / f"{commit}.json").get("files")
        except CheckpointError:
            return []
        return list(files) if isinstance(files, dict) else []


def nearest_ids(cache: Path, repo_id: str) -> list[str]:
    """Return the ids in the cache that are spelled most like `repo_id`, or differ in the organization alone."""
    ids = _cached_ids(cache)
    name = repo_id.rpartition("/")[2].lower()
    same = [one for one in ids if one.rpartition("/")[2].lower() == name]
    lower = {one.lower(): one for one in ids}
    close = [lower[one] for one in difflib.get_close_matches(repo_id.lower(), lower, n=MAX_NEAREST)]
    return list(dict.fromkeys([*same, *close]))[:MAX_NEAREST]


def _cached_ids(cache: Path) -> list[str]:
    try:
        with os.scandir(cache) as entries:
            names = [entry.name for entry, _ in zip(entries, range(MAX_LISTED_IDS), strict=False)]
    except OSError:
        return []
    return sorted(name.removeprefix("models--").replace("--", "/") for name in names if name.startswith("models--"))
