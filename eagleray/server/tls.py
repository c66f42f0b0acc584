"""The certificate of an HTTPS server, read from its files, and again when they change.

Owned by the event loop of an API server. Connections keep the certificate with which they were opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import time
from pathlib import Path

from eagleray.config.serving import ServingConfig
from eagleray.errors import ConfigError
from eagleray.log import get_logger
from eagleray.server.timeouts import CERTIFICATE_POLL_SECONDS, CERTIFICATE_SECONDS

logger = get_logger(__name__)

CERTIFICATE = "-----BEGIN CERTIFICATE-----"
PRIVATE_KEY = "PRIVATE KEY-----"
DAMAGED = "it is damaged"

DATE_ERRORS = (9, 10)
"""OpenSSL's codes X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""

FileStates = tuple[tuple[int, int, int] | None, ...]
"""Modification time in ns, inode and size of each file; None for one that is missing."""


class _EncryptedKey(Exception):
    """OpenSSL has asked for the password of a private key."""


def load_tls(options: ServingConfig, *, warns: bool = False) -> ssl.SSLContext | None:
    """Return the context for new connections, or None without HTTPS. Raises `ConfigError` for files that do not fit.
    `warns`: whether a certificate that is refused for its dates is logged."""
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
    if warns:
        _check_dates(context, options.ssl_certfile)
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
            self.context = load_tls(self._options, warns=True)
        except ConfigError as error:
            logger.warning("the changed files of the certificate are not used, new connections get the old: %s", error)
        else:
            logger.info("new connections get the changed certificate of %s", self._options.ssl_certfile)

    def _states(self) -> FileStates:
        return tuple(_state(path) for path in self._paths)


async def open_certificates(options: ServingConfig) -> Certificates:
    """Load the files of an API server that starts. They fitted when the instance started, so files that do not fit may
    be about to change, and are read again for a while. Raises `ConfigError` as `load_tls` does."""
    deadline, is_logged = time.monotonic() + CERTIFICATE_SECONDS, False
    while True:
        try:
            return Certificates(options)
        except ConfigError as error:
            if time.monotonic() >= deadline:
                raise
            if not is_logged:
                logger.warning("%s; waiting up to %.0f s for files that fit", error, CERTIFICATE_SECONDS)
                is_logged = True
        await asyncio.sleep(CERTIFICATE_POLL_SECONDS)


def _check_dates(context: ssl.SSLContext, certfile: str) -> None:
    """Warn if clients refuse the certificate of a context because of its dates. Its file is `certfile`."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trusts the certificate itself
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        trusting.load_verify_locations(Path(certfile).expanduser())
        client = trusting.wrap_bio(to_client, to_server)
        server = context.wrap_bio(to_server, to_client, server_side=True)
        for end in (client, server, client):  # as far as the client's check
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in DATE_ERRORS:
            logger.warning("option `ssl_certfile`: clients refuse %r: %s", certfile, error.verify_message)
    except OSError as error:  # such as SSLError, for a file that has changed since
        logger.debug("the dates of %r were not checked: %s", certfile, error)


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
            f"{error.reason or DAMAGED}"
        ) from None


def _load_authorities(context: ssl.SSLContext, path: str) -> None:
    if CERTIFICATE not in _read("ssl_ca_certs", path):
        raise ConfigError(f"option `ssl_ca_certs`: {path!r} holds no certificate in PEM format")
    try:
        context.load_verify_locations(Path(path).expanduser())
    except ssl.SSLError as error:
        raise ConfigError(f"option `ssl_ca_certs`: OpenSSL cannot read {path!r}: {error.reason or DAMAGED}") from None


def _read(option: str, path: str) -> str:
    try:
        return Path(path).expanduser().read_text("latin-1")
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise ConfigError(
            f"option `{option}`: cannot read {path!r}: {getattr(error, 'strerror', None) or error}"
        ) from None


def _refuse_password() -> str:
    raise _EncryptedKey
