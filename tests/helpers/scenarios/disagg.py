"""The whole proxy with simulated pods: pod-0 and pod-1 prefill, pod-2 and pod-3 decode."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import aiohttp

from proxy.lab.sim import Fault, SimConfig, SimPod, TransferTiming
from proxy.lab.sim.config import ConnectorName, Role
from tests.helpers.scenarios.stack import CHAT, Stack, stack
from tests.helpers.waiting import until

ROLES: tuple[Role, ...] = ("prefill", "prefill", "decode", "decode")
CONNECTORS: tuple[ConnectorName, ...] = ("nixl", "shared-storage", "mooncake", "sglang", "p2p-nccl")

SCHEDULING: Mapping[str, Any] = {
    "plugins": [
        {"type": "disagg-profile-handler", "parameters": {"deciders": {"prefill": "always-disagg-pd-decider"}}},
        {"type": "always-disagg-pd-decider"},
        {"type": "prefill-filter"},
        {"type": "decode-filter"},
        {"type": "queue-scorer"},
    ],
    "schedulingProfiles": [
        {"name": "prefill", "plugins": [{"pluginRef": "prefill-filter"}, {"pluginRef": "queue-scorer"}]},
        {"name": "decode", "plugins": [{"pluginRef": "decode-filter"}, {"pluginRef": "queue-scorer"}]},
    ],
}
SIM = SimConfig(time_scale=20, transfer=TransferTiming(failure=1.0, expiry=30.0))
"""A failing pull takes 50 ms, unpulled blocks are kept for 1.5 s."""

TOKENS = 12
PROMPT = "What is the sea? " * 40


@asynccontextmanager
async def disaggregated(
    connector: ConnectorName = "nixl",
    roles: Sequence[Role] = ROLES,
    sim: SimConfig = SIM,
    patience: str = "10s",
    each: Sequence[Mapping[str, Any]] = (),
    scheduling: Mapping[str, Any] = SCHEDULING,
    continued: Sequence[str] = (),
    pods: Mapping[str, Any] | None = None,
) -> AsyncIterator[Stack]:
    """Run a proxy before pods of these roles.

    `patience` limits the wait for the first and each next byte of a response. `each` has further keys for each pod.
    `continued` lists models whose streams other pods continue. `pods` is the section of that name."""
    given = {**sections(connector, patience, scheduling, continued), "pods": pods or {}}
    configs = [replace(sim, role=role, connector=connector) for role in roles]
    more = [{"role": role, **dict(extra or {})} for role, extra in zip_longest(roles, each)]
    async with stack(len(roles), configs, given, more) as running:
        yield running


def sections(
    connector: str, patience: str, scheduling: Mapping[str, Any] = SCHEDULING, continued: Sequence[str] = ()
) -> dict[str, Any]:
    """Of the configuration; see `disaggregated`."""
    return {
        "scheduling": scheduling,
        "disaggregation": {"connector": connector, "prefillTimeout": patience},
        "reliability": {
            "timeouts": {"firstByte": patience, "idle": patience},
            "breaker": {"failures": 1000},
            "continuation": {"models": list(continued)},
        },
    }


@dataclass(frozen=True, slots=True)
class Received:
    """What a client got. `error` is of a refusal or an error event; `is_whole`: it ended as it should."""

    status: int
    text: str
    is_whole: bool
    error: str
    usage: Mapping[str, Any]
    headers: Mapping[str, str]


async def ask(proxy: Stack, *, stream: bool, request_id: str = "asked", **fields: Any) -> Received:
    body = {"model": "sim", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS, **fields}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with proxy.http.post(proxy.url + CHAT, json=body, headers={"x-request-id": request_id}) as response:
        try:
            raw = await response.text()
        except aiohttp.ClientPayloadError as error:
            return Received(response.status, "", False, str(error), {}, response.headers)
        read = _stream if stream and response.status == 200 else _whole
        return read(response, raw)


def _stream(response: aiohttp.ClientResponse, raw: str) -> Received:
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    errors = [event["error"]["message"] for event in events if "error" in event]
    texts = [choice["delta"].get("content") or "" for event in events for choice in event.get("choices", ())]
    usage: dict[str, Any] = next((event["usage"] for event in reversed(events) if event.get("usage")), {})
    whole = raw.rstrip().endswith("data: [DONE]") and not errors
    return Received(response.status, "".join(texts), whole, "".join(errors), usage, response.headers)


def _whole(response: aiohttp.ClientResponse, raw: str) -> Received:
    body = json.loads(raw)
    if "error" in body:
        return Received(response.status, "", False, body["error"]["message"], {}, response.headers)
    text = body["choices"][0]["message"]["content"]
    return Received(response.status, text, True, "", body["usage"], response.headers)


async def whole_text(**fields: Any) -> str:
    """The response of one pod that does all by itself."""
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS, **fields}
    async with SimPod(SIM) as pod, aiohttp.ClientSession() as http, http.post(pod.url + CHAT, json=body) as response:
        payload = await response.json()
        text: str = payload["choices"][0]["message"]["content"]
        return text


def prefills(proxy: Stack) -> list[SimPod]:
    return [pod for pod in proxy.pods if pod.config.role == "prefill"]


def decodes(proxy: Stack) -> list[SimPod]:
    return [pod for pod in proxy.pods if pod.config.role == "decode"]


def meet(pods: Sequence[SimPod], fault: Fault) -> None:
    """The first request to each of the pods meets it."""
    for pod in pods:
        pod.faults.set([replace(fault, count=1)])


def transfers(proxy: Stack) -> int:
    return sum(pod.engine.stats.transfers for pod in proxy.pods)


async def settled(proxy: Stack, *, may_expire: bool = False) -> None:
    """Until nothing is in flight anywhere, and no pod keeps anything for another."""
    await until(lambda: not proxy.app.ledger.in_flight)
    await until(lambda: not any(pod.requests.open for pod in proxy.pods if pod.serving))
    await until(lambda: not any(pod.engine.kept_blocks or pod.engine.busy for pod in proxy.pods if pod.serving))
    assert may_expire or not any(pod.engine.stats.expired_transfers for pod in proxy.pods)
    for endpoint in proxy.app.fleet.endpoints:
        assert (endpoint.load.requests, endpoint.load.tokens) == (0, 0)
