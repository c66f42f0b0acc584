"""Models at URLs (`s3://`, `gs://`, and whatever fsspec reads), which are copied to the cache once.

The directory of a copy is named by a key of the files' names, sizes and versions, so files that were replaced are
copied again.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

from eagleray.errors import CheckpointError, EagleRayError
from eagleray.hub.disk_space import check_space, no_room
from eagleray.hub.download import DEFAULT_ENDPOINT, endpoint_url
from eagleray.hub.file_lock import file_lock
from eagleray.hub.fsspec_errors import fsspec_problem
from eagleray.hub.needs import NeededFiles
from eagleray.hub.options import HubOptions
from eagleray.hub.progress_bar import DownloadProgress
from eagleray.hub.repo_files import choose_files

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.*", re.DOTALL)

VERSION_FIELDS = ("ETag", "etag", "md5Hash", "generation", "LastModified", "mtime", "created")
"""Fields in which file systems tell that a file was replaced; each has some of them."""

KEY_CHARS = 40
"""Length of a key, which is that of a commit."""


def is_url(name: str) -> bool:
    """Whether a model's name is a URL."""
    return URL.fullmatch(name) is not None


def url_directory(cache: Path, url: str, key: str) -> Path:
    """Return the directory of a copy."""
    digest = hashlib.sha256(url.rstrip("/").encode()).hexdigest()
    return cache / f"urls--{digest[:16]}" / "snapshots" / key


def fetch_url(url: str, needs: NeededFiles, options: HubOptions, *, key: str | None = None) -> str:
    """Copy the needed files below `url` unless there is a copy of them, and return the copy's key.

    `key`: that of the copy that another node has made; `CheckpointError` is raised if the files have changed since.
    """
    if key is not None and _is_complete(url_directory(options.cache, url, key), needs):
        return key
    try:
        system, root, files = _list_files(url)
        found = _key_of(files)
        if key is not None and key != found:
            raise CheckpointError(f"model {url!r}: its files were replaced since the deployment started; restart it")
        directory = url_directory(options.cache, url, found)
        with file_lock(directory.parent / "eagleray.lock", timeout=options.lock_timeout, purpose=f"model {url!r}"):
            if not _is_complete(directory, needs):
                names = choose_files(url, list(files), needs, options.ignore_patterns)
                _copy(system, root, {name: int(files[name].get("size") or 0) for name in names}, directory, url)
                (directory / _marker(needs)).touch()
    except (EagleRayError, KeyboardInterrupt):
        raise
    except Exception as error:  # each file system of fsspec has errors of its own
        if (full := no_room(error, options.cache, name=url)) is not None:
            raise full from None
        raise CheckpointError(f"model {url!r}: {fsspec_problem(error, url)}") from error
    return found


def _is_complete(directory: Path, needs: NeededFiles) -> bool:
    return (directory / _marker(needs)).exists() or (directory / _marker(NeededFiles(weights=True))).exists()


def _marker(needs: NeededFiles) -> str:
    """Return the name of the file that says that a copy has been finished."""
    return ".complete" if needs.weights else ".complete-without-weights"


def _list_files(url: str) -> tuple[Any, str, dict[str, dict[str, Any]]]:
    """Return the file system, the path of the model in it, and its files with their details by name."""
    for endpoint in {DEFAULT_ENDPOINT, endpoint_url()}:
        if url.startswith(f"{endpoint}/"):
            hub_id = "/".join(url.removeprefix(f"{endpoint}/").split("/")[:2])
            raise CheckpointError(f"model {url!r}: this is the page of a model; give the id instead: {hub_id}")
    from fsspec.core import url_to_fs

    system, root = url_to_fs(url)
    system.invalidate_cache()  # of listings that this process has read before
    root = root.rstrip("/")
    found = {path[len(root) :].lstrip("/"): details for path, details in system.find(root, detail=True).items()}
    found.pop("", None)
    if not found:
        raise CheckpointError(f"model {url!r}: there is no such directory, or it is empty")
    return system, root, found


def _key_of(files: dict[str, dict[str, Any]]) -> str:
    versions = [
        (name, details.get("size"), *(str(details[field]) for field in VERSION_FIELDS if field in details))
        for name, details in sorted(files.items())
    ]
    return hashlib.sha256(repr(versions).encode()).hexdigest()[:KEY_CHARS]


def _copy(system: Any, root: str, sizes: dict[str, int], directory: Path, url: str) -> None:
    """Copy files, small ones first. A copy that breaks off goes on with its next file."""
    absent = {name: size for name, size in sizes.items() if not (directory / name).is_file()}
    check_space(directory, sum(absent.values()), name=url)
    with DownloadProgress(url, sum(absent.values())) as progress:
        for name, size in sorted(absent.items(), key=lambda entry: entry[1]):
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(path.name + ".incomplete")
            system.get_file(f"{root}/{name}", str(part))
            os.replace(part, path)
            progress.add(size)
