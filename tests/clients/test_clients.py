"""Clients that people use, before simulated pods behind kvlane: `make test-clients` installs and runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from proxy.lab.sim import SimConfig, StepTiming
from tests.clients.running import NODE, PROGRAMS, PYTHON, authenticator, needs, output_of
from tests.helpers.scenarios.stack import stack
from tests.helpers.waiting import until

SLOW = SimConfig(timing=StepTiming(base=0.02, per_prefill_token=0.0))
"""A stream of 2,000 tokens takes 40 s, so that a disconnection after the first token is observed."""

CLIENTS: dict[str, list[str | Path]] = {
    "openai-python": [PYTHON, PROGRAMS / "openai_python.py"],
    "openai-node": ["node", PROGRAMS / "openai_node.mjs"],
    "langchain": [PYTHON, PROGRAMS / "langchain_client.py"],
    "llama-index": [PYTHON, PROGRAMS / "llama_index_client.py"],
}


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_client_can_chat_stream_call_tools_embed_get_errors_and_cancel(client: str) -> None:
    of_node = client == "openai-node"
    needs(NODE / "node_modules" if of_node else PYTHON, client)
    async with stack(2, SLOW) as s:
        async with authenticator(s, client) as url:
            received = json.loads(await output_of([*CLIENTS[client], url, *([NODE] if of_node else [])]))
        assert len(received["chat"].split()) == 5
        assert received["stream"] == received["chat"]
        assert received["tool"] == {"name": "weather", "arguments": {"city": "sim"}}
        assert received["embeddings"] == 2
        assert received["error"] == {"status": 404, "code": "model_not_found"}
        assert received["left"]
        await until(lambda: sum(record.aborted for pod in s.pods for record in pod.requests) == 1, seconds=10.0)
        await s.idle()
