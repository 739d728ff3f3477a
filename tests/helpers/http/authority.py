"""Certificates that are made in the test process."""

from __future__ import annotations

import ipaddress
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_LIFE = timedelta(days=2)


class Authority:
    """A certificate authority that signs certificates. `file` is its own certificate, which clients can trust."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self._name = _subject(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        own = _unsigned(self._name, self._name, self._key)
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        own = own.add_extension(usage, critical=True)  # Python 3.13 and later trust no authority without it
        self.file = directory / f"{name}.pem"
        self.file.write_bytes(_pem(own.sign(self._key, hashes.SHA256())))

    def issue(self, name: str, subject: str = "IP:127.0.0.1") -> Path:
        """Write a file with a certificate and its key, in place of an earlier file of the same name."""
        key = ec.generate_private_key(ec.SECP256R1())
        request = _unsigned(_subject(name), self._name, key, subject)
        signed = request.add_extension(_signed_by(self._key), critical=False).sign(self._key, hashes.SHA256())
        path = self._directory / f"{name}.pem"
        fresh = path.with_suffix(".new")
        fresh.write_bytes(_key_pem(key) + _pem(signed))
        fresh.rename(path)
        return path


def self_signed(path: Path, name: str = "pod", subject: str = "IP:127.0.0.1") -> Path:
    """Write a certificate that is signed with its own key, and that key, to `path`."""
    key = ec.generate_private_key(ec.SECP256R1())
    own = _unsigned(_subject(name), _subject(name), key, subject)
    own = own.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    path.write_bytes(_key_pem(key) + _pem(own.sign(key, hashes.SHA256())))
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


def _unsigned(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, alternative: str | None = None
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + _LIFE)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    if alternative is None:
        return builder
    return builder.add_extension(x509.SubjectAlternativeName([_general_name(alternative)]), critical=False)


def _signed_by(key: ec.EllipticCurvePrivateKey) -> x509.AuthorityKeyIdentifier:
    """Which key signed a certificate; Python 3.13 and later trust no certificate without it."""
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def _general_name(text: str) -> x509.GeneralName:
    """`IP:127.0.0.1` or `DNS:example.test`, as openssl writes them."""
    kind, _, value = text.partition(":")
    return x509.IPAddress(ipaddress.ip_address(value)) if kind == "IP" else x509.DNSName(value)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
