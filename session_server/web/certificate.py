"""Hold the server's certificate, and take over one that replaces it on disk."""

from __future__ import annotations

import logging
import ssl
import stat
from pathlib import Path
from typing import Final

_logger: Final = logging.getLogger("session_server.web")

_Stamp = tuple[tuple[int, int, int], ...]


class UnusableCertificate(ValueError):
    """Report a certificate or key that cannot be served; the message says why."""


class Certificate:
    """Serve a chain of certificates and its private key, each a PEM file, or both in one.

    Raises:
        UnusableCertificate: a file cannot be read, is no PEM, or the key is another one's.
    """

    def __init__(self, certfile: Path, keyfile: Path | None = None) -> None:
        self._files = (certfile,) if keyfile is None else (certfile, keyfile)
        self._stamp = self._look()
        self.context = self._load()
        self._complaint = ""

    def refresh(self) -> None:
        """Take over files that have changed, for connections from now on. Call it once a second, on
        any thread: it reads the disk.

        What cannot be used is logged once, and the old certificate is kept. It is tried again each
        time: whoever mends a permission changes no file.
        """
        try:
            stamp = self._look()
            context = self.context if stamp == self._stamp else self._load()
        except UnusableCertificate as error:
            if str(error) != self._complaint:
                _logger.warning("keeping the old certificate: %s", error)
            self._complaint = str(error)
            return
        if context is not self.context:
            _logger.info("certificate replaced file=%s", self._files[0])
        self._stamp, self.context, self._complaint = stamp, context, ""

    def _look(self) -> _Stamp:
        try:
            found = [path.stat() for path in self._files]
        except OSError as error:
            raise UnusableCertificate(f"cannot read {error.filename}: {error.strerror}") from None
        for path, at in zip(self._files, found, strict=True):
            # A pipe would block whoever reads it, and a device may have no end.
            if not stat.S_ISREG(at.st_mode):
                raise UnusableCertificate(f"cannot read {path}: not a regular file")
        return tuple((at.st_mtime_ns, at.st_ino, at.st_size) for at in found)

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        *_, keyfile = self._files
        try:
            # A password would be asked for on the terminal.
            context.load_cert_chain(self._files[0], keyfile, password=_no_password)
        except ssl.SSLError as error:
            raise UnusableCertificate(self._explain(error)) from None
        except OSError as error:
            names = " or ".join(map(str, self._files))
            raise UnusableCertificate(f"cannot read {names}: {error.strerror}") from None
        return context

    def _explain(self, error: ssl.SSLError) -> str:
        certfile, keyfile = self._files[0], self._files[-1]
        match error.reason:
            case "KEY_VALUES_MISMATCH":
                return f"the key in {keyfile} is not that of the certificate in {certfile}"
            case "BAD_PASSWORD_READ" | "BAD_DECRYPT":
                return f"the key in {keyfile} has a password; write it without one"
            case reason:
                names = f"{certfile} and {keyfile}" if len(self._files) > 1 else f"{certfile}"
                what = f" ({reason.lower().replace('_', ' ')})" if reason else ""
                hint = "" if len(self._files) > 1 else "; a key of its own is --ssl-keyfile"
                return f"no certificate with its private key, as PEM, in {names}{what}{hint}"


def _no_password() -> str:
    return ""
