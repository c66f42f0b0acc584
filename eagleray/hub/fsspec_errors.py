"""Errors of fsspec's file systems in the user's terms. Each file system raises errors of its own."""

from __future__ import annotations

from eagleray.hub.hub_errors import error_detail


def fsspec_problem(error: Exception, url: str) -> str:
    """Return what is wrong with a URL that fsspec could not read or write."""
    # The file system of HTTP reports every failure as a missing file, with its cause.
    cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ is not None else error
    detail = error_detail(cause)
    if isinstance(cause, ImportError) or (isinstance(cause, ValueError) and "protocol" in str(cause).lower()):
        return (
            f"{url.partition('://')[0]}:// is read by fsspec, and {str(cause) or detail}: install it with "
            "`pip install fsspec s3fs gcsfs`, which read s3:// and gs://, or with the package of your file system"
        )
    if isinstance(status := getattr(cause, "status", None), int):
        return f"its server answered with status {status}: check the URL and the rights that it gives"
    if isinstance(cause, FileNotFoundError):
        return "there is no such file or directory: check the URL"
    if isinstance(cause, PermissionError):
        return f"access is denied ({detail}): check the credentials and their rights"
    if isinstance(cause, TimeoutError) or any("Connect" in kind.__name__ for kind in type(cause).__mro__):
        return f"its server cannot be reached ({detail}): check the URL and the connection"
    return f"its file system failed: {detail}"
