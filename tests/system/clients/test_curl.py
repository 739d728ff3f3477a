"""`curl` before simulated pods behind kvlane, with the options that people give it."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from proxy.lab.sim import SimConfig, StepTiming
from tests.clients.running import output_of
from tests.helpers.scenarios.stack import CHAT, Stack, stack
from tests.helpers.waiting import until

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl: apt-get install curl")

SLOW = SimConfig(timing=StepTiming(base=0.02, per_prefill_token=0.0))
QUESTION = json.dumps({"model": "sim", "max_tokens": 5, "messages": [{"role": "user", "content": "Hello!"}]})
JSON = ["-H", "content-type: application/json"]


@pytest.fixture
async def s() -> AsyncIterator[Stack]:
    async with stack(2, SLOW) as s:
        yield s


async def curl(s: Stack, *arguments: str | Path, path: str = CHAT) -> str:
    return await output_of(["curl", "-sS", "--max-time", "30", s.url + path, *arguments])


def text(response: str) -> str:
    content: str = json.loads(response)["choices"][0]["message"]["content"]
    return content


async def test_a_chat(s: Stack) -> None:
    assert len(text(await curl(s, *JSON, "-d", QUESTION)).split()) == 5


async def test_json_sent_as_a_form_is_refused_by_the_pod(s: Stack) -> None:
    """As vLLM does: `-d` needs the header."""
    assert "Unsupported Media Type" in json.loads(await curl(s, "-d", QUESTION))["error"]["message"]


@pytest.mark.smoke
async def test_a_stream(s: Stack) -> None:
    events = await curl(s, "-N", *JSON, "-d", QUESTION.replace("{", '{"stream": true, ', 1))
    assert events.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("version", ["--http1.0", "--http1.1", "--http2"])
async def test_every_http_version_of_curl(s: Stack, version: str) -> None:
    assert text(await curl(s, version, *JSON, "-d", QUESTION))


async def test_a_large_body_after_100_continue(s: Stack, tmp_path: Path) -> None:
    question = json.loads(QUESTION)
    question["messages"][0]["content"] = "the sea " * 2_000
    body = tmp_path / "question.json"
    body.write_text(json.dumps(question))
    assert text(await curl(s, *JSON, "-H", "Expect: 100-continue", "--data-binary", f"@{body}"))


async def test_a_body_of_unknown_length(s: Stack, tmp_path: Path) -> None:
    body = tmp_path / "question.json"
    body.write_text(QUESTION)
    assert text(await curl(s, *JSON, "-H", "Transfer-Encoding: chunked", "--data-binary", f"@{body}"))


async def test_a_compressed_response(s: Stack) -> None:
    assert text(await curl(s, "--compressed", *JSON, "-d", QUESTION))


async def test_a_file_upload(s: Stack, tmp_path: Path) -> None:
    sound = tmp_path / "a.wav"
    sound.write_bytes(b"\r\n--\0" * 1000)
    received = await curl(s, "-F", "model=sim", "-F", f"file=@{sound}", path="/v1/audio/transcriptions")
    assert json.loads(received)["text"] == "5000 bytes of audio"


async def test_a_refusal_is_json_with_its_status(s: Stack) -> None:
    response = await curl(s, "-w", "%{http_code}", *JSON, "-d", QUESTION.replace("sim", "nope"))
    assert response.endswith("404")
    assert json.loads(response.removesuffix("404"))["error"]["code"] == "model_not_found"


async def test_leaving_a_stream_ends_it_on_the_pod(s: Stack) -> None:
    long = QUESTION.replace("{", '{"stream": true, ', 1).replace('"max_tokens": 5', '"max_tokens": 2000')
    await output_of(["sh", "-c", 'curl -sSN "$@" | head -c 20 >&2', "sh", s.url + CHAT, *JSON, "-d", long])
    await until(lambda: any(record.aborted for pod in s.pods for record in pod.requests), seconds=10.0)
    await s.idle()


async def test_the_models_and_the_health(s: Stack) -> None:
    models = json.loads(await curl(s, path="/v1/models"))
    assert [model["id"] for model in models["data"]] == ["sim"]
    assert (await curl(s, "-o", "/dev/null", "-w", "%{http_code}", path="/health")) == "200"
