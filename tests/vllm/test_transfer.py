"""Two engines respond as one: the first computes the prompt, and the second decodes with the first one's KV cache.

With vLLM's NixlConnector the second engine pulls the blocks from the first, with its ExampleConnector it finds them in
a common directory. `transferred` are the prompt tokens that the second engine reports as got from elsewhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.helpers.ports import free_port
from tests.vllm.client import EngineResponse
from tests.vllm.fleet import BLOCK, MODEL, Engine, Proxy, Start, Vllm, proxy, started, wait_until
from tests.vllm.test_prefix import text

pytestmark = pytest.mark.vllm

NIXL = "KVLANE_NIXL"
"""Names the folder that NIXL is installed in, as `pip install --target` does it. `make test-vllm` sets it."""

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
TOKENS = 20
ROUNDS = 7
NIXL_ENVIRON = {
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "NIXL_PTHR_DELAY_US": "1000",
    "UCX_TLS": "tcp,self,sm",
    "UCX_NET_DEVICES": "lo",
}
CONFIG = """
pods:
  static:
    - {{url: "{prefill}", role: prefill}}
    - {{url: "{decode}", role: decode}}
disaggregation: {{connector: {connector}}}
scheduling:
  plugins:
    - {{type: decode-filter}}
    - {{type: prefill-filter}}
    - {{type: active-request-scorer}}
    - {{type: always-disagg-pd-decider}}
    - {{type: disagg-profile-handler, parameters: {{deciders: {{prefill: always-disagg-pd-decider}}}}}}
  schedulingProfiles:
    - {{name: decode, plugins: [{{pluginRef: decode-filter}}, {{pluginRef: active-request-scorer}}]}}
    - {{name: prefill, plugins: [{{pluginRef: prefill-filter}}, {{pluginRef: active-request-scorer}}]}}
"""


@dataclass(frozen=True, slots=True)
class Split:
    """A proxy before a prefill engine and a decode engine."""

    connector: str
    prefill: Engine
    decode: Engine
    proxy: Proxy

    def ask(self, path: str, body: Any) -> tuple[EngineResponse, int]:
        """The response, and the number of its transferred tokens."""
        before = self.decode.sum("vllm:external_prefix_cache_hits_total")
        response = self.proxy.http.post(path, body)
        return response, int(self.decode.sum("vllm:external_prefix_cache_hits_total") - before)


@pytest.fixture(scope="module", params=["nixl", "shared-storage"])
def split(request: pytest.FixtureRequest, vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    folder = tmp_path_factory.mktemp("split")
    starts = with_nixl() if request.param == "nixl" else with_files(folder / "blocks")
    with ExitStack() as stack:
        prefill, decode = started(stack, vllm, folder, starts)
        config = CONFIG.format(prefill=prefill.url, decode=decode.url, connector=request.param)
        serving = stack.enter_context(proxy([], folder / "proxy.log", config))
        pair = Split(request.param, prefill, decode, serving)
        # They shake hands at the first transfer, which takes seconds; until both are known to be there, none is made.
        wait_until(lambda: pair.ask(COMPLETIONS, body_of(COMPLETIONS))[1] > 0, 60.0)
        yield pair
        assert "Traceback" not in serving.program.log


def with_nixl() -> Sequence[Start]:
    folder = os.environ.get(NIXL)
    if folder is None:
        pytest.skip("needs NIXL: make test-vllm")
    starts = []
    for number, role in enumerate(("kv_producer", "kv_consumer")):
        transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
        channel = {"PYTHONPATH": str(Path(folder).absolute()), "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        starts.append(Start(number, ("--kv-transfer-config", json.dumps(transfer)), {**NIXL_ENVIRON, **channel}))
    return starts


def with_files(folder: Path) -> Sequence[Start]:
    """A prompt that is not computed in one step is stored in part, which the other engine does not survive."""
    transfer = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    transfer |= {"kv_connector_extra_config": {"shared_storage_path": str(folder)}}  # type: ignore[dict-item]
    flags = ("--kv-transfer-config", json.dumps(transfer), "--max-num-batched-tokens", "8192")
    return [Start(number, flags) for number in range(2)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES])
def test_a_response_equals_that_of_one_engine(split: Split, path: str, stream: bool, record_property: Any) -> None:
    """At temperature 0: what the first engine says if it is asked for all of it."""
    body = findable(split.prefill, path, stream)
    response, transferred = split.ask(path, body)
    alone = split.prefill.http.post(path, body)
    assert (response.status, alone.status) == (200, 200), response.body
    assert response.pod == split.decode.name
    assert text_of(response) == text_of(alone)
    assert text_of(response)
    assert transferred > 0
    record_property("transferred", transferred)


def test_a_prompt_is_computed_on_one_engine_and_decoded_on_the_other(split: Split, record_property: Any) -> None:
    """Of its 4,000 tokens the second engine computes the ones after the last whole block, if any."""
    local = "vllm:prompt_tokens_by_source_total"
    ids = [300 + number % 3_700 for number in range(4_000)]
    before = by_source(split.decode)
    response, transferred = split.ask(COMPLETIONS, body_of(COMPLETIONS, prompt=ids))
    after = by_source(split.decode)
    assert response.status == 200, response.body
    assert response.json["usage"]["prompt_tokens"] == len(ids)
    assert transferred >= len(ids) - BLOCK
    record_property("transferred", f"{transferred} of {len(ids)} tokens")
    record_property(f"by {local.removeprefix('vllm:')}", difference(before, after))


def test_the_time_to_the_first_token_is_the_sum_of_its_parts(split: Split, record_property: Any) -> None:
    """Beside what the first engine takes alone. What neither engine counts is left: the proxy, and HTTP on the way."""
    alone, rounds = [], []
    for number in range(ROUNDS):
        ids = [[300 + (part + number * 17 + unit * 7) % 3_700 for unit in range(1_000)] for part in (0, 1_900)]
        alone.append(split.prefill.http.post(COMPLETIONS, body_of(COMPLETIONS, stream=True, prompt=ids[0])).first_byte)
        rounds.append(parts_of(split, body_of(COMPLETIONS, stream=True, prompt=ids[1])))
    for one in rounds:
        assert one["prefill leg"] >= one["its engine"] > 0
        assert one["prefill leg"] + one["decode engine"] <= one["split"] + 0.01
    record_property("one engine", f"{1000 * median(alone):.0f} ms")
    for part in rounds[0]:
        record_property(part, f"{1000 * median(one[part] for one in rounds):.0f} ms")


def test_usage_reports_cached_and_not_transferred_tokens(split: Split, record_property: Any) -> None:
    """A new prompt was not cached, wherever it was computed; the same once more was."""
    body = body_of(CHAT)
    cached = [split.ask(CHAT, body)[0].json["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
    assert cached[0] == 0
    assert cached[1] > 0
    record_property("cached tokens", f"{cached[0]}, then {cached[1]}")


def test_the_request_id_of_the_client_is_in_the_response(split: Split) -> None:
    response = split.proxy.http.post(CHAT, body_of(CHAT), {"X-Request-Id": "from-the-client"})
    assert response.json["id"] == "chatcmpl-from-the-client"
    assert response.headers["x-request-id"] == "from-the-client"


def test_requests_that_cannot_be_split_are_served_by_one_pod(split: Split) -> None:
    response, transferred = split.ask(CHAT, {**body_of(CHAT), "n": 2, "temperature": 1})
    assert (response.status, len(response.json["choices"]), transferred) == (200, 2, 0)


def test_a_prompt_is_computed_by_the_other_engine_when_the_first_is_gone(split: Split, record_property: Any) -> None:
    body = body_of(COMPLETIONS)
    alone = split.prefill.http.post(COMPLETIONS, body)
    split.prefill.program.kill()
    response = split.proxy.http.post(COMPLETIONS, body)
    assert response.status == 200, response.body
    assert text_of(response) == text_of(alone)
    record_property("answered after", f"{response.first_byte:.2f} s")


def parts_of(split: Split, body: Any) -> dict[str, float]:
    """Seconds to the first token of one response, and their parts, the waiting for blocks within the decode
    engine's."""
    counted: dict[str, tuple[Engine | Proxy, str]] = {
        "prefill leg": (split.proxy, "kvlane_disagg_stage_duration_seconds_sum"),
        "its engine": (split.prefill, "vllm:time_to_first_token_seconds_sum"),
        "decode engine": (split.decode, "vllm:time_to_first_token_seconds_sum"),
        "waiting for blocks": (split.decode, "vllm:request_queue_time_seconds_sum"),
    }
    before = {part: where.sum(series) for part, (where, series) in counted.items()}
    response, transferred = split.ask(COMPLETIONS, body)
    assert (response.status, transferred > 0) == (200, True)
    seconds = {part: where.sum(series) - before[part] for part, (where, series) in counted.items()}
    left = response.first_byte - seconds["prefill leg"] - seconds["decode engine"]
    return {"split": response.first_byte, **seconds, "what is left": left}


def body_of(path: str, stream: bool = False, **fields: Any) -> dict[str, Any]:
    """A prompt that no engine has seen, of a thousand tokens."""
    body: dict[str, Any] = {"model": MODEL, "temperature": 0, "stream": stream}
    if path == RESPONSES:
        return {**body, "input": text(250), "max_output_tokens": TOKENS, **fields}
    body["max_tokens"] = TOKENS
    if path == COMPLETIONS:
        return {**body, "prompt": text(250), "ignore_eos": True, **fields}
    return {**body, "messages": [{"role": "user", "content": text(250)}], **fields}


def findable(engine: Engine, path: str, stream: bool) -> dict[str, Any]:
    """ExampleConnector stores a prompt of whole blocks and one token under another name than it looks for."""
    while True:
        body = body_of(path, stream=stream)
        content = body.get("input") or body.get("messages", [{}])[0].get("content")
        prompt = {"messages": [{"role": "user", "content": content}]} if content else {"prompt": body["prompt"]}
        if engine.http.post("/tokenize", prompt).json["count"] % BLOCK != 1:
            return body


def text_of(response: EngineResponse) -> str:
    """The text, whichever API it is of."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return whole_text(response.json)
    lines = response.body.decode().splitlines()
    return "".join(delta(json.loads(line[6:])) for line in lines if line.startswith("data: {"))


def whole_text(body: Any) -> str:
    if "choices" in body:
        (choice,) = body["choices"]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])
    parts = body["content"] if "content" in body else [part for item in body["output"] for part in item["content"]]
    return "".join(part.get("text", "") for part in parts)


def delta(event: Any) -> str:
    if "choices" in event:
        pieces = [choice.get("delta", {}).get("content") or choice.get("text") or "" for choice in event["choices"]]
        return "".join(pieces)
    found = event.get("delta", "") if event.get("type", "").endswith("delta") else ""
    return str(found.get("text") or "") if isinstance(found, dict) else str(found)


def by_source(engine: Engine) -> dict[str, float]:
    """Prompt tokens."""
    names = ("local_compute", "local_cache_hit", "external_kv_transfer")
    lines = engine.http.get("/metrics").body.decode().splitlines()
    series = [line for line in lines if line.startswith("vllm:prompt_tokens_by_source_total")]
    return {name: sum(float(line.split()[-1]) for line in series if f'source="{name}"' in line) for name in names}


def difference(before: dict[str, float], after: dict[str, float]) -> str:
    return ", ".join(f"{name} {after[name] - before[name]:.0f}" for name in after)
