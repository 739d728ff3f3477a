"""Commands that use the admin port say what to do if it does not respond."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from proxy.cli import main
from tests.helpers.cli.kvlane import kvlane
from tests.helpers.http.authority import Authority
from tests.helpers.scenarios.stack import stack


async def run(*words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, main, words)


@pytest.mark.parametrize("words", [("drain", "pod-0"), ("explain",), ("top", "--once")], ids=" ".join)
async def test_the_data_port_is_recognised(words: tuple[str, ...]) -> None:
    async with stack(1) as s:
        result = await run(*words, "--url", s.url)
    assert result.exit_code == 2
    assert result.stderr.rstrip().endswith("Is this the admin port, 9190 unless configured?")


async def test_a_missing_pod_is_not_reported_as_a_wrong_port() -> None:
    async with stack(1, settings={"telemetry": {"decisions": {}}}) as s:
        result = await run("explain", "--id", "nothing", "--url", s.admin)
    assert (result.exit_code, "9190" in result.stderr) == (2, False)


async def test_a_wrong_scheme_is_reported() -> None:
    async with stack(1) as s:
        result = await run("drain", "pod-0", "--url", s.admin.replace("http:", "https:"))
    assert result.exit_code == 2
    assert "if the port speaks no TLS, write http://" in result.stderr


async def test_over_tls_an_authority_is_needed_and_can_be_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    tls = {"cert": str(authority.issue("kvlane"))}
    async with stack(1, settings={"admin": {"port": 0, "tls": tls}}) as s:
        plain, secure = s.admin, s.admin.replace("http:", "https:")
        assert "if the port speaks TLS, write https://" in (await run("drain", "pod-0", "--url", plain)).stderr
        assert "SSL_CERT_FILE=ca.pem" in (await run("drain", "pod-0", "--url", secure)).stderr
        with kvlane("drain", "pod-0", "--url", secure, SSL_CERT_FILE=str(authority.file)) as trusting:
            assert await asyncio.to_thread(trusting.ended) == 0
        assert trusting.output == "pod-0: draining, empty\n"
