"""Certificates made on the fly, by openssl."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

_MAY_SIGN = "keyUsage=critical,keyCertSign,cRLSign"
"""From Python 3.13 on, an authority is not trusted that does not say so, nor what does not say which key signed it."""

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Authority:
    """Signs certificates. `file` is its own; it can be trusted."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        if shutil.which("openssl") is None:
            pytest.skip("no openssl to make a certificate with")
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self.file, self._key = directory / f"{name}.pem", directory / f"{name}.key"
        own = ("-subj", f"/CN={name}", "-days", "2", "-addext", _MAY_SIGN, "-keyout", self._key, "-out", self.file)
        _openssl("req", "-x509", *_KEY, *own)

    def issue(self, name: str, subject: str = "IP:127.0.0.1") -> Path:
        """A file with a certificate and its key; one of the same name is replaced."""
        path, request, signed = (self._directory / f"{name}.{kind}" for kind in ("pem", "csr", "crt"))
        key, extensions = self._directory / f"{name}.key", self._directory / f"{name}.ext"
        extensions.write_text(f"subjectAltName={subject}\nauthorityKeyIdentifier=keyid\n")
        _openssl("req", *_KEY, "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        by = ("-CA", self.file, "-CAkey", self._key, "-CAcreateserial", "-days", "2", "-extfile", extensions)
        _openssl("x509", "-req", "-in", request, *by, "-out", signed)
        fresh = path.with_suffix(".new")
        fresh.write_text(key.read_text() + signed.read_text())
        fresh.rename(path)
        return path


def client_context(trusted: Path, own: Path | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=trusted)
    if own is not None:
        context.load_cert_chain(own)
    return context


def server_context(own: Path, trusted: Path | None = None) -> ssl.SSLContext:
    """With `trusted`, clients have to show a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own)
    if trusted is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(trusted)
    return context


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
