"""What the demo measures of a response."""

from __future__ import annotations

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from proxy.cli.demo import DemoOutcome, _send_question

TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'
USAGE = b'data: {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}\n\n'
ERROR = b'data: {"error": {"message": "the pod is gone"}}\n\n'
DONE = b"data: [DONE]\n\n"


async def measured(body: bytes) -> DemoOutcome:
    async def respond(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type="text/event-stream", headers={"x-kvlane-endpoint": "pod-0"})

    application, outcome = web.Application(), DemoOutcome()
    application.router.add_post("/v1/chat/completions", respond)
    async with TestServer(application) as server, aiohttp.ClientSession() as session:
        await _send_question(session, str(server.make_url("")).rstrip("/"), b"{}", outcome)
    return outcome


async def test_a_response_that_arrives_with_its_first_byte_is_counted_with_its_usage() -> None:
    outcome = await measured(TOKEN + USAGE + DONE)
    assert (outcome.failed, len(outcome.ttft), outcome.pods) == (0, 1, {"pod-0": 1})
    assert (outcome.prompt_tokens, outcome.cached_tokens) == (9, 4)


@pytest.mark.parametrize("body", [b"", DONE, TOKEN, TOKEN + ERROR + DONE])
async def test_a_stream_without_usage_is_a_failure(body: bytes) -> None:
    outcome = await measured(body)
    assert (outcome.failed, outcome.ttft, outcome.pods) == (1, [], {})
