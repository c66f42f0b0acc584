"""Downloads of repositories from a hub into the cache, by huggingface_hub, which is imported when it is needed."""

from __future__ import annotations

import importlib.metadata
import os
import re
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

from eagleray.errors import CheckpointError, EagleRayError
from eagleray.hub.cache import COMMIT, CachedRepo
from eagleray.hub.disk_space import check_space, format_size
from eagleray.hub.file_lock import file_lock, free_lock
from eagleray.hub.hub_errors import explain
from eagleray.hub.needs import NeededFiles
from eagleray.hub.options import HubOptions
from eagleray.hub.progress_bar import LOG_INTERVAL_SECONDS, DownloadProgress
from eagleray.hub.repo_files import choose_files
from eagleray.log import get_logger

T = TypeVar("T")

logger = get_logger(__name__)

DEFAULT_ENDPOINT = "https://huggingface.co"

INFO_TIMEOUT_SECONDS = 10.0
"""Time for which a hub's answer about a repository is awaited, in each of the attempts."""

ATTEMPTS = 3
RETRY_SECONDS = 1.0
RETRIED_STATUSES = (429, 500, 502, 503, 504)

MAX_THREADS = 8
"""Files that are downloaded at the same time."""

LEFTOVER = re.compile(r"([0-9A-Za-z]+)\.[0-9a-f]{8}\.incomplete")
"""Name of the unfinished file of one download, after the name of its blob."""

CANCEL_SECONDS = 2.0
"""Time for which threads may end, so that they remove the files that they have begun."""


@dataclass(frozen=True)
class RepoListing:
    """A commit, and the files to download of it."""

    commit: str
    sizes: dict[str, int | None]
    """Sizes of the chosen files in bytes, by name; None where the hub does not tell."""


def endpoint_url() -> str:
    """Return the address of the hub."""
    return (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")


def download(repo: CachedRepo, revision: str, needs: NeededFiles, options: HubOptions) -> str:
    """Download the files that are needed and not in the cache, and return the commit of `revision`.

    Files that are complete in the cache are not fetched again. Raises `CheckpointError`, and `DeadlineExceeded` if
    nothing arrives for `options.lock_timeout` seconds because another process downloads the same.
    """
    endpoint = endpoint_url()
    with _explaining(repo, revision, endpoint, options):
        listing = _list_files(repo, revision, needs, options, endpoint)
        purpose = f"model {repo.repo_id!r}"
        with file_lock(repo.lock_file, timeout=options.lock_timeout, purpose=purpose):
            _remove_leftovers(repo)
            snapshot = repo.snapshot(listing.commit)
            absent = {name: size for name, size in listing.sizes.items() if not (snapshot / name).is_file()}
            check_space(repo.path, sum(size or 0 for size in absent.values()), name=repo.repo_id)
            # before the files, so that a download that breaks off is found again without the hub
            _write_ref(repo, revision, listing.commit)
            if absent:
                _fetch_files(repo, listing.commit, absent, options, endpoint)
    return listing.commit


def _list_files(repo: CachedRepo, revision: str, needs: NeededFiles, options: HubOptions, endpoint: str) -> RepoListing:
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint, token=options.token, library_name="eagleray", library_version=_version())
    info = _retrying(
        lambda: api.model_info(repo.repo_id, revision=revision, files_metadata=True, timeout=INFO_TIMEOUT_SECONDS)
    )
    if not isinstance(info.sha, str) or COMMIT.fullmatch(info.sha) is None:
        raise CheckpointError(f"model {repo.repo_id!r}: {endpoint} named no commit of revision {revision!r}")
    sizes = {file.rfilename: file.size for file in info.siblings or []}
    chosen = choose_files(repo.repo_id, list(sizes), needs, options.ignore_patterns)
    return RepoListing(info.sha, {name: sizes[name] for name in chosen})


def _fetch_files(
    repo: CachedRepo, commit: str, sizes: dict[str, int | None], options: HubOptions, endpoint: str
) -> None:
    known = [size for size in sizes.values() if size is not None]
    total = sum(known) if len(known) == len(sizes) else None
    size = "unknown size" if total is None else format_size(total)
    logger.info("downloading %s (files: %d, %s) to %s", repo.repo_id, len(sizes), size, repo.cache)
    weights = [name for name in sizes if name.endswith(".safetensors")]
    with DownloadProgress(repo.repo_id, total) as progress:
        fetch = _file_fetcher(repo, commit, options, endpoint, progress)
        # weights last: a snapshot that has them all has all other files
        for names in (sorted(sizes.keys() - weights), sorted(weights)):
            _fetch_in_threads(fetch, names, progress, options.lock_timeout)


def _fetch_in_threads(
    fetch: Callable[[str], object], names: Sequence[str], progress: DownloadProgress, idle_timeout: float
) -> None:
    """Download files in threads. The first failure, or an interruption, ends the others at their next bytes.

    Raises `DeadlineExceeded` if no byte arrives for `idle_timeout` seconds: huggingface_hub limits each wait for the
    hub, but waits without end for a lock.
    """
    pending, ended = deque(names), SimpleQueue[BaseException | None]()
    # daemons, so that a program that is interrupted does not wait for a slow hub
    threads = [Thread(target=_fetch_each, args=(fetch, pending, ended), daemon=True) for _ in names[:MAX_THREADS]]
    for thread in threads:
        thread.start()
    try:
        for _ in names:
            if (error := _next_end(ended, progress, idle_timeout)) is not None:
                raise error
    except BaseException:
        progress.cancel()
        pending.clear()
        for thread in threads:
            thread.join(CANCEL_SECONDS / MAX_THREADS)
        raise


def _next_end(
    ended: SimpleQueue[BaseException | None], progress: DownloadProgress, idle_timeout: float
) -> BaseException | None:
    """Wait until the download of a file ends, and return its error, or None. Raises as `check_idle`."""
    while True:
        try:
            return ended.get(timeout=min(idle_timeout, LOG_INTERVAL_SECONDS))
        except Empty:
            progress.check_idle(idle_timeout)


def _fetch_each(fetch: Callable[[str], object], pending: deque[str], ended: SimpleQueue[BaseException | None]) -> None:
    """Download files until none is pending, and report the end of each, with its error."""
    while True:
        try:
            name = pending.popleft()
        except IndexError:
            return
        try:
            fetch(name)
        except BaseException as error:
            ended.put(error)
        else:
            ended.put(None)


def _file_fetcher(
    repo: CachedRepo, commit: str, options: HubOptions, endpoint: str, progress: DownloadProgress
) -> Callable[[str], object]:
    from huggingface_hub import hf_hub_download

    def fetch(name: str) -> object:
        return hf_hub_download(
            repo.repo_id,
            name,
            revision=commit,
            cache_dir=repo.cache,
            endpoint=endpoint,
            token=options.token,
            library_name="eagleray",
            library_version=_version(),
            tqdm_class=progress.file_class(),
        )

    return fetch


def _remove_leftovers(repo: CachedRepo) -> None:
    """Remove files of downloads that were killed. Each has a name of its own, so that no later download goes on with
    it; a file that is being downloaded is recognized by its blob's lock."""
    for path in (repo.path / "blobs").glob("*.incomplete"):
        if match := LEFTOVER.fullmatch(path.name):
            lock = repo.lock_file.with_name(f"{match[1]}.lock")
            # of a user whose files this one may not write
            with suppress(OSError), free_lock(lock) as is_free:
                if is_free:
                    path.unlink(missing_ok=True)


def _write_ref(repo: CachedRepo, revision: str, commit: str) -> None:
    """Note the commit of a revision, as a whole: other programs may read the file meanwhile."""
    if revision == commit:
        return
    path = repo.ref_file(revision)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".ref-", delete=False) as file:
        file.write(commit)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def _retrying(ask: Callable[[], T]) -> T:
    """Call `ask`, and again after an answer that says that the hub is busy, or none in time."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return ask()
        except Exception as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            if attempt == ATTEMPTS or not (status in RETRIED_STATUSES or "Timeout" in type(error).__name__):
                raise
            time.sleep(RETRY_SECONDS * attempt)
    raise AssertionError


@contextmanager
def _explaining(repo: CachedRepo, revision: str, endpoint: str, options: HubOptions) -> Iterator[None]:
    """Raise errors of the hub and of the disk as `CheckpointError`."""
    try:
        yield
    except EagleRayError:
        raise
    except Exception as error:  # the HTTP client of huggingface_hub, and so its errors, differ by version
        has_token = options.token is not None or _has_token()
        raise explain(error, repo, revision, endpoint=endpoint, has_token=has_token) from error


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None


def _version() -> str:
    return importlib.metadata.version("eagleray")
