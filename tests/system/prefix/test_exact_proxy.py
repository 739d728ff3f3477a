"""The whole proxy, between simulated pods and engines that publish: requests go where the pods say the prompt is."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.app import App
from proxy.core.errors import ConfigError
from proxy.lab.sim import SimConfig, SimFleet
from proxy.plugins.producers.precise_prefix_cache import PrecisePrefixCacheProducer
from proxy.settings import from_mapping
from tests.helpers.prefix import model as small
from tests.helpers.prefix.engine import Engine, engine, removed, stored
from tests.helpers.prefix.model import trained
from tests.helpers.waiting import until

CHAT = "/v1/chat/completions"
BLOCK = 16


def configured(model: Path | str, pods: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    plugins = [
        {"type": "token-producer", "parameters": {"local": {"model": str(model)}}},
        {"type": "precise-prefix-cache-producer", "parameters": more},
        {"type": "approx-prefix-cache-producer"},
        {"type": "exact-or-approx-prefix-cache-producer"},
        {"type": "prefix-cache-scorer"},
    ]
    here = {"host": "127.0.0.1", "port": 0}
    return {
        "listen": here,
        "admin": here,
        "telemetry": {"accessLog": False},
        "pods": {"static": pods},
        "scheduling": {"plugins": plugins},
    }


@asynccontextmanager
async def proxy(folder: Path) -> AsyncIterator[tuple[App, list[Engine], aiohttp.ClientSession]]:
    """Before three pods, which publish but never hold what they were sent: the simulated ones know nothing of it."""
    async with AsyncExitStack() as stack:
        sim = await stack.enter_async_context(SimFleet(3, SimConfig(time_scale=50)))
        engines, pods = [], []
        for url in sim.urls:
            it, (events, replay) = await stack.enter_async_context(engine())
            engines.append(it)
            labels = {"kvlane/kv-events-port": str(events), "kvlane/kv-replay-port": str(replay)}
            pods.append({"url": url, "labels": labels})
        app = await stack.enter_async_context(App(from_mapping(configured(small.write(folder), pods))))
        (index,) = (one.index for one in app.schedulings["default"].plugins(PrecisePrefixCacheProducer))
        await until(lambda: all(map(index.is_sure, app.fleet.endpoints)))
        yield app, engines, await stack.enter_async_context(aiohttp.ClientSession())


def tokens(text: str) -> list[int]:
    ids: list[int] = (
        trained().encode(f"<|start|>user\n{text}<|end|>\n<|start|>assistant\n", add_special_tokens=False).ids
    )
    return ids


def blocks(text: str, first: int) -> tuple[list[int], list[int]]:
    """The full blocks of a chat's prompt: what the engine calls them, and their tokens."""
    ids = tokens(text)
    count = len(ids) // BLOCK
    return list(range(first, first + count)), ids[: count * BLOCK]


async def pod_of(app: App, http: aiohttp.ClientSession, text: str) -> str:
    """The pod that responded."""
    body = {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    async with http.post(f"http://127.0.0.1:{app.port}{CHAT}", json=body) as response:
        assert response.status == 200, await response.text()
        return response.headers["x-kvlane-endpoint"]


async def test_requests_go_to_the_pod_that_published_their_prompt(tmp_path: Path) -> None:
    async with proxy(tmp_path) as (app, engines, http):
        (index,) = (one.index for one in app.schedulings["default"].plugins(PrecisePrefixCacheProducer))
        names = [endpoint.name for endpoint in app.fleet.endpoints]
        texts = [f"Text number {number}: " + "some words of it, and more. " * 20 for number in range(6)]
        for number, text in enumerate(texts):
            await engines[number % 3].publish(stored(*blocks(text, 1000 * number)))
        await until(lambda: index.pairs == sum(len(blocks(text, 0)[0]) for text in texts))
        assert [await pod_of(app, http, text) for text in texts] == [names[number % 3] for number in range(6)]
        (home,) = [await pod_of(app, http, texts[0])]
        assert home == names[0]
        evicted, _ = blocks(texts[0], 0)
        everything = index.pairs
        await engines[0].publish(removed(*evicted))
        await until(lambda: index.pairs == everything - len(evicted))
        await engines[1].publish(stored(*blocks(texts[0], 9000)))
        await until(lambda: index.pairs == everything)
        assert await pod_of(app, http, texts[0]) == names[1]


async def test_metrics_show_the_index_and_the_predictions(tmp_path: Path) -> None:
    async with proxy(tmp_path) as (app, engines, http):
        text = "A text that a pod holds. " * 30
        await engines[2].publish(stored(*blocks(text, 0)))
        (index,) = (one.index for one in app.schedulings["default"].plugins(PrecisePrefixCacheProducer))
        await until(lambda: index.pairs > 0)
        await pod_of(app, http, text)
        async with http.get(f"http://127.0.0.1:{app.admin_port}/metrics") as response:
            lines = (await response.text()).splitlines()
        values = {line.split()[0]: float(line.split()[1]) for line in lines if line and line[0] != "#"}
        assert values["kvlane_prefix_index_blocks"] >= index.pairs
        assert values["kvlane_prefix_index_bytes"] >= index.bytes > 0
        expected = (len(tokens(text)) - 1) // BLOCK * BLOCK
        assert values["kvlane_prefix_predicted_hit_tokens_total"] == expected


async def test_prompts_that_cannot_be_tokenised_are_matched_approximately(tmp_path: Path) -> None:
    """The Anthropic API is not tokenised: the second request goes after the first by what was sent alone."""
    async with proxy(tmp_path) as (app, _, http):
        body = {"model": "sim", "max_tokens": 1, "messages": [{"role": "user", "content": "some words of it " * 100}]}
        homes = set()
        for _ in range(4):
            async with http.post(f"http://127.0.0.1:{app.port}/v1/messages", json=body) as response:
                assert response.status == 200
                homes.add(response.headers["x-kvlane-endpoint"])
        assert len(homes) == 1


async def test_a_proxy_that_stops_leaves_no_sockets_and_no_process(tmp_path: Path) -> None:
    async with proxy(tmp_path) as (app, _, http):
        await pod_of(app, http, "large " * 20_000)
    await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() if "KV events" in task.get_name()]


WITHOUT = """
import json, sys
from proxy.core.errors import ConfigError
from proxy.settings import from_mapping
configuration, missing = json.load(sys.stdin)
for module in missing:
    for name in [name for name in sys.modules if name.partition(".")[0] in missing]:
        del sys.modules[name]
    for name in ("proxy.prefix.kv_messages", "proxy.prefix.kv_sockets", "proxy.prefix.tokenizer"):
        sys.modules.pop(name, None)
    sys.modules[module] = None
    try:
        from_mapping(configuration)
    except ConfigError as error:
        print(*error.problems, sep="\\n")
"""
"""In a process of its own, since modules that are imported twice are not what they were."""


def test_a_missing_package_is_a_fault_of_the_plugin_that_needs_it(tmp_path: Path) -> None:
    configuration = configured(small.write(tmp_path), [{"url": "http://pod:8000"}])
    body = json.dumps([configuration, ["zmq", "msgpack", "tokenizers", "jinja2"]])
    done = subprocess.run([sys.executable, "-c", WITHOUT], input=body, capture_output=True, text=True, check=True)
    exact, token = "precise-prefix-cache-producer", "token-producer"
    assert done.stdout.splitlines() == [
        f"scheduling.plugins.{plugin}: needs the package {package}: {sys.executable} -m pip install 'kvlane[precise]'"
        for plugin, package in [(exact, "pyzmq"), (exact, "msgpack"), (token, "tokenizers"), (token, "jinja2")]
    ]


def test_an_unreadable_model_is_a_fault_with_its_path() -> None:
    with pytest.raises(ConfigError, match=r"scheduling\.plugins\.token-producer: model: 'nowhere' is no folder"):
        from_mapping(configured("nowhere", [{"url": "http://pod:8000"}]))
