"""The certificate of an HTTPS server, read from its files, and again when they change.

Owned by the event loop of an API server. Connections keep the certificate with which they were opened.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from eagleray.config.serving import ServingConfig
from eagleray.errors import ConfigError
from eagleray.log import get_logger

logger = get_logger(__name__)

CERTIFICATE = "-----BEGIN CERTIFICATE-----"
PRIVATE_KEY = "PRIVATE KEY-----"

FileStates = tuple[tuple[int, int, int] | None, ...]
"""Modification time in ns, inode and size of each file; None for one that is missing."""


class _EncryptedKey(Exception):
    """OpenSSL has asked for the password of a private key."""


def load_tls(options: ServingConfig) -> ssl.SSLContext | None:
    """Return the context for new connections, or None without HTTPS. Raises `ConfigError` for files that do not fit."""
    if options.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    _load_pair(context, options.ssl_certfile, options.ssl_keyfile)
    if options.ssl_ca_certs is not None:
        _load_authorities(context, options.ssl_ca_certs)
    context.verify_mode = ssl.VerifyMode(options.ssl_cert_reqs)
    if options.ssl_ciphers is not None:
        try:
            context.set_ciphers(options.ssl_ciphers)
        except ssl.SSLError:
            raise ConfigError(
                f"option `ssl_ciphers`: OpenSSL knows no cipher suite of TLS 1.2 in {options.ssl_ciphers!r}; "
                "`openssl ciphers` lists them"
            ) from None
    return context


class Certificates:
    """The present context of an HTTPS server. Raises `ConfigError` as `load_tls` does."""

    def __init__(self, options: ServingConfig) -> None:
        self._options = options
        paths = (options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs)
        self._paths = [Path(path).expanduser() for path in paths if path is not None]
        self._loaded = self._seen = self._states()
        self.context = load_tls(options)
        """Context for new connections, or None without HTTPS."""

    def refresh(self) -> None:
        """Load the files again if they have changed. Files that do not fit leave the context as it is.

        To be called about once a second: files that changed since the last call may still be written.
        """
        if not self._options.enable_ssl_refresh:
            return
        states = self._states()
        if states != self._seen or states == self._loaded:
            self._seen = states
            return
        self._loaded = states
        try:
            self.context = load_tls(self._options)
        except ConfigError as error:
            logger.warning("the changed files of the certificate are not used, new connections get the old: %s", error)
        else:
            logger.info("new connections get the changed certificate of %s", self._options.ssl_certfile)

    def _states(self) -> FileStates:
        return tuple(_state(path) for path in self._paths)


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        state = os.stat(path)  # of the file behind links, which Kubernetes exchanges
    except OSError:
        return None
    return state.st_mtime_ns, state.st_ino, state.st_size


def _load_pair(context: ssl.SSLContext, certfile: str, keyfile: str | None) -> None:
    """Load the certificate with its private key. Raises `ConfigError` that names the file to blame."""
    if CERTIFICATE not in _read("ssl_certfile", certfile):
        raise ConfigError(f"option `ssl_certfile`: {certfile!r} holds no certificate in PEM format")
    key_option, key_path = ("ssl_certfile", certfile) if keyfile is None else ("ssl_keyfile", keyfile)
    if PRIVATE_KEY not in _read(key_option, key_path):
        hint = "; name the file with the key as `ssl_keyfile`" if keyfile is None else ""
        raise ConfigError(f"option `{key_option}`: {key_path!r} holds no private key in PEM format{hint}")
    try:
        context.load_cert_chain(Path(certfile).expanduser(), Path(key_path).expanduser(), _refuse_password)
    except _EncryptedKey:
        raise ConfigError(
            f"option `{key_option}`: the private key in {key_path!r} is encrypted; decrypt it, for instance with "
            "`openssl pkey`, and protect the file by its permissions"
        ) from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"option `{key_option}`: the private key in {key_path!r} does not belong to the certificate in "
                f"{certfile!r}"
            ) from None
        raise ConfigError(
            f"option `ssl_certfile`: OpenSSL cannot use {certfile!r} with the private key in {key_path!r}: "
            f"{error.reason or error}"
        ) from None


def _load_authorities(context: ssl.SSLContext, path: str) -> None:
    if CERTIFICATE not in _read("ssl_ca_certs", path):
        raise ConfigError(f"option `ssl_ca_certs`: {path!r} holds no certificate in PEM format")
    try:
        context.load_verify_locations(Path(path).expanduser())
    except ssl.SSLError as error:
        raise ConfigError(f"option `ssl_ca_certs`: OpenSSL cannot read {path!r}: {error.reason or error}") from None


def _read(option: str, path: str) -> str:
    try:
        return Path(path).expanduser().read_text("latin-1")
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise ConfigError(
            f"option `{option}`: cannot read {path!r}: {getattr(error, 'strerror', None) or error}"
        ) from None


def _refuse_password() -> str:
    raise _EncryptedKey
