"""What several tests of this room need from the machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Of 127.0.0.1, key and all, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    path = tmp_path / "pod.pem"
    name = ("-subj", "/CN=pod", "-addext", "subjectAltName=IP:127.0.0.1")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    subprocess.run(
        ["openssl", "req", "-x509", *key, *name, "-days", "2", "-keyout", str(path), "-out", str(tmp_path / "cert")],
        check=True,
        capture_output=True,
    )
    path.write_text(path.read_text() + (tmp_path / "cert").read_text())
    return path
