"""Prompts and keys go to pods, and nowhere else: no log line, error or page of the admin port has them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from proxy.core.request import InferenceRequest, Prompt
from tests.helpers.scenarios.stack import BLIND, CHAT, running, stack
from tests.helpers.waiting import until

PROMPT = "the-launch-code-is-0000"
KEY = "sk-of-the-client"
POD_KEY = "sk-of-the-pod"
ADMIN_KEY = "sk-of-the-operator"
HEADERS = {"authorization": f"Bearer {KEY}", "x-api-key": KEY}
SECRETS = (PROMPT, KEY, POD_KEY, ADMIN_KEY)

BODY = {"model": "sim", "messages": [{"role": "user", "content": PROMPT}]}

BODIES: tuple[Any, ...] = (
    BODY,
    {**BODY, "stream": True},
    {**BODY, "model": "unknown"},
    {**BODY, "model": [PROMPT]},
    {**BODY, "stream": PROMPT},
    {**BODY, "messages": PROMPT},
    {**BODY, "max_tokens": PROMPT},
    {"model": "sim", "messages": [{"role": PROMPT}]},
    [PROMPT],
)


def leaked(text: str) -> list[str]:
    return [secret for secret in SECRETS if secret in text]


async def test_the_log_has_nothing_of_any_request(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    settings = {**BLIND, "telemetry": {"accessLog": True}, "admin": {"apiKey": ADMIN_KEY}}
    async with stack(2, settings=settings, each=[{"apiKey": POD_KEY}] * 2) as served:
        for body in BODIES:
            async with served.http.post(served.url + CHAT, json=body, headers=HEADERS) as response:
                text = await response.text()
            if response.status >= 400 and response.headers.get("x-kvlane-reason"):
                assert leaked(text) == []
        async with served.http.post(served.url + f"{CHAT}?api_key={KEY}", data=PROMPT, headers=HEADERS) as response:
            assert leaked(await response.text()) == []
        await served.idle()
    written = capfd.readouterr()
    assert CHAT in written.out
    assert leaked(written.out + written.err + caplog.text) == []


async def test_an_exception_during_a_request_logs_nothing_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with stack(1) as served:

        def broken(request: InferenceRequest, *_: object, **__: object) -> None:
            raise RuntimeError(f"cannot schedule {request!r}")

        served.app.schedulings["default"].scheduler.schedule = broken  # type: ignore[assignment, method-assign]
        response, text = await served.post(CHAT, BODY, HEADERS)
        assert response.status == 500
        assert leaked(str(text)) == []
    assert "cannot schedule" in caplog.text
    assert leaked(caplog.text) == []


async def test_a_pod_that_dies_during_a_request_logs_nothing_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)

    async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.close()

    async with await asyncio.start_server(dies, "127.0.0.1", 0) as pod:
        port = pod.sockets[0].getsockname()[1]
        each = [{"apiKey": POD_KEY, "models": ["sim"]}]
        async with running([f"http://127.0.0.1:{port}"], BLIND, each) as app:
            reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
            body = f'{{"model":"sim","prompt":"{PROMPT}"}}'
            head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
            text = (await reader.read()).decode()
            writer.close()
            await until(lambda: not app.ledger.in_flight)
    assert " 50" in text.partition("\r\n")[0]
    assert leaked(text + caplog.text) == []


async def test_the_admin_port_shows_no_key() -> None:
    each = [{"apiKey": POD_KEY}]
    async with stack(1, settings={"admin": {"apiKey": ADMIN_KEY}}, each=each) as served:
        await served.post(CHAT, BODY, HEADERS)
        operator = {"authorization": f"Bearer {ADMIN_KEY}"}
        for path in ("/admin/config", "/admin/pods", "/admin/pods/pod-0", "/metrics"):
            async with served.http.get(served.admin + path, headers=operator) as response:
                assert response.status == 200
                assert leaked(await response.text()) == []


def test_a_printed_request_has_nothing_of_its_content() -> None:
    prompt = Prompt((PROMPT.encode(),), salt=PROMPT)
    request = InferenceRequest("1", CHAT, "m", prompt, PROMPT.encode(), HEADERS)
    assert leaked(f"{request!r} {prompt!r}") == []
