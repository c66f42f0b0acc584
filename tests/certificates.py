"""Certificates for tests, made by the openssl program, because no library of Python for that is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)


def make_pairs(directory: Path, names: str) -> None:
    """Make a certificate for localhost, signed by itself, and its key for each name."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    for name in names:
        openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"),
            *("-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-keyout", str(directory / f"{name}.key"), "-out", str(directory / f"{name}.pem")),
        )


def make_expired_pair(directory: Path) -> None:
    """Make the certificate expired.pem, signed by itself, and its key."""
    request, key = str(directory / "expired.csr"), str(directory / "expired.key")
    curve = ("ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    openssl("req", "-new", "-newkey", *curve, "-nodes", "-subj", "/CN=a", "-keyout", key, "-out", request)
    sign = ("x509", "-req", "-in", request, "-signkey", key, "-out", str(directory / "expired.pem"))
    try:
        openssl(*sign, "-not_before", "20200101000000Z", "-not_after", "20210101000000Z")
    except subprocess.CalledProcessError:  # OpenSSL before 3.4
        openssl(*sign, "-days", "-1")


def install(pairs: Path, name: str, directory: Path) -> None:
    """Copy a pair to used.pem and used.key in the directory, each file by one renaming."""
    for suffix in ("pem", "key"):
        shutil.copy(pairs / f"{name}.{suffix}", directory / "new")
        os.rename(directory / "new", directory / f"used.{suffix}")
