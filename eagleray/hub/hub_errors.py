"""Errors of a hub in the user's terms: what was asked for, where, and what would help."""

from __future__ import annotations

import errno

from eagleray.errors import CheckpointError
from eagleray.hub.cache import CachedRepo, nearest_ids
from eagleray.hub.disk_space import no_room, unwritable

MAX_DETAIL_CHARS = 300


class HubUnreachable(CheckpointError):
    """The hub did not answer, or answered that it has a problem, so that another attempt may succeed."""


def download_command(repo: CachedRepo, revision: str) -> str:
    """Return a command that downloads a model to this cache."""
    option = "" if revision == "main" else f" --revision {revision}"
    return f"`hf download {repo.repo_id}{option} --cache-dir {repo.cache}`"


def not_cached_offline(repo: CachedRepo, revision: str) -> CheckpointError:
    """Return the error for a model that is not in the cache while HF_HUB_OFFLINE forbids to download it."""
    return CheckpointError(
        f"model {repo.repo_id!r}: there is no such directory, and the cache {str(repo.cache)!r} has no revision "
        f"{revision!r} of it{_nearest(repo)}; HF_HUB_OFFLINE forbids to download it: unset that, or on a host with a "
        f"connection run {download_command(repo, revision)}"
    )


def incomplete_offline(repo: CachedRepo, revision: str, path: str) -> CheckpointError:
    """Return the error for a snapshot that lacks a file while HF_HUB_OFFLINE forbids to download it."""
    return CheckpointError(
        f"model {repo.repo_id!r}: {path}: not found; its download is incomplete, and HF_HUB_OFFLINE forbids to go on "
        f"with it: unset that, or on a host with a connection run {download_command(repo, revision)}"
    )


def explain(error: Exception, repo: CachedRepo, revision: str, *, endpoint: str, has_token: bool) -> CheckpointError:
    """Return the error for an exception of huggingface_hub, or of the disk."""
    from huggingface_hub import errors as hub  # here, because most starts need no hub

    repo_id, page = repo.repo_id, f"{endpoint}/{repo.repo_id}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if (full := no_room(error, repo.cache, name=repo_id)) is not None:
        return full
    if isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO):
        return unwritable(f"model {repo_id!r}", repo.cache, str(error.strerror))
    if isinstance(error, hub.GatedRepoError):
        return CheckpointError(
            f"model {repo_id!r} is gated, and {_token(has_token)}: ask for access at {page}, then give a token of "
            "that account in the environment variable HF_TOKEN, or as `--hf-token`"
        )
    if isinstance(error, hub.RevisionNotFoundError):
        return CheckpointError(
            f"model {repo_id!r}: {endpoint} has no revision {revision!r} of it: `--revision` takes a branch, a tag or "
            "a commit"
        )
    if isinstance(error, hub.EntryNotFoundError):
        return CheckpointError(
            f"model {repo_id!r}: {endpoint} lists a file that it does not have: {error_detail(error)}"
        )
    if status == 401 and not isinstance(error, hub.RepositoryNotFoundError):
        return CheckpointError(
            f"model {repo_id!r}: {endpoint} refused the token: give a valid one in HF_TOKEN or as "
            "`--hf-token`, or none for a public model"
        )
    if isinstance(error, hub.RepositoryNotFoundError) or status == 404:
        return CheckpointError(
            f"model {repo_id!r} was not found: there is no such directory, it is not in the cache "
            f"{str(repo.cache)!r}, and {endpoint} does not have it or does not show it ({_token(has_token)})"
            f"{_nearest(repo)}; check the spelling, or for a private model give a token in HF_TOKEN or as `--hf-token`"
        )
    if isinstance(error, UnicodeEncodeError):
        return CheckpointError(
            f"model {repo_id!r}: the token has characters that are not allowed in a token: give a valid one in "
            "HF_TOKEN or as `--hf-token`"
        )
    if status is not None:
        kind = HubUnreachable if status == 429 or status >= 500 else CheckpointError
        return kind(f"model {repo_id!r}: {endpoint} answered with status {status}: {error_detail(error)}")
    state = "complete in" if repo.path.is_dir() else "in"
    return HubUnreachable(
        f"model {repo_id!r}: there is no such directory, it is not {state} the cache {str(repo.cache)!r}, and "
        f"{endpoint} cannot be reached ({error_detail(error)}){_nearest(repo)}; check the connection or HF_ENDPOINT, "
        f"or elsewhere run {download_command(repo, revision)} and copy the cache"
    )


def error_detail(error: BaseException) -> str:
    """Return the class and the beginning of the message of an error, on one line."""
    text = " ".join(str(error).split()) or "no details"
    return f"{type(error).__name__}: {text[:MAX_DETAIL_CHARS]}"


def _nearest(repo: CachedRepo) -> str:
    nearest = [one for one in nearest_ids(repo.cache, repo.repo_id) if one != repo.repo_id]
    return f" (it has {', '.join(nearest)})" if nearest else ""


def _token(has_token: bool) -> str:
    return "the token that was sent has no access" if has_token else "no token was sent"
