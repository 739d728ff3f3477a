"""What a pod does is seen by having it done: a few requests, of which most are for one token."""

from __future__ import annotations

import asyncio
import math
import re
from dataclasses import replace
from statistics import median
from typing import Any

from proxy.core.ports import Random
from proxy.doctor import exposition
from proxy.doctor.asking import Asking
from proxy.doctor.seen import Caching, Seen, Transfer

COMPLETIONS = "/v1/completions"
LONG = 4096
"""Tokens of an answer that nobody waits for."""
CONNECTORS = {
    "NixlConnector": "nixl",
    "NixlPullConnector": "nixl",
    "ExampleConnector": "shared-storage",
    "SharedStorageConnector": "shared-storage",
    "MooncakeConnector": "mooncake",
    "P2pNcclConnector": "p2p-nccl",
}
ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}

_CONNECTOR = re.compile(rb"kv_connector\W{1,6}(\w+)")
_ROLE = re.compile(rb"kv_role\W{1,6}(kv_\w+)")


async def caching(pod: Asking, seen: Seen, settle: float, random: Random) -> Caching:
    """Whether the second of two equal prompts is cheaper."""
    block = seen.exposition.metrics.block_size if seen.exposition else 0
    nonce = f"{random.random():.15f}"
    body = _body(seen, f"{nonce} " + "the sea " * 2 * max(block, 16), max_tokens=1)
    for times in (1, 2):
        answer = await pod.post(COMPLETIONS, body)
        if not answer.ok:
            return Caching(refused=f"{COMPLETIONS} answers {answer.status}")
        if times == 1:
            before = await _hits(pod)
    usage = answer.json.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    found = Caching(told=details.get("cached_tokens"), prompt_tokens=int(usage.get("prompt_tokens") or 0))
    if found.told is not None:
        return found
    if seen.exposition is None:
        return Caching(refused="neither answers nor metrics say what was cached")
    begun, counted = pod.clock.now(), 0.0
    while not counted and pod.clock.now() < begun + settle:
        counted = await _hits(pod) - before
        await asyncio.sleep(0.1)
    return replace(found, counted=counted)


async def tokenize(pod: Asking, seen: Seen) -> float | None:
    """Seconds that /tokenize takes for about a thousand tokens; None if there is none."""
    body = {"prompt": "the sea " * 500} | ({"model": seen.models[0]} if seen.models else {})
    answers = [await pod.post("/tokenize", body) for _ in range(5)]
    return median(answer.seconds for answer in answers) if all(answer.ok for answer in answers) else None


async def transfer(pod: Asking, seen: Seen) -> Transfer:
    """What the engine says of its configuration, where it says so, or its series; of NIXL also what a prompt leaves for
    another pod. Others are not sent one: some connectors end the engine over a field that they miss."""
    if seen.engine == "sglang":
        told = (await pod.get("/get_server_info")).json
        mode = str(told.get("disaggregation_mode") or "")
        return Transfer("sglang", mode) if mode in ("prefill", "decode") else Transfer()
    told_body = (await pod.get("/server_info")).body
    name, role = _CONNECTOR.search(told_body), _ROLE.search(told_body)
    found = Transfer(seen.exposition.connector if seen.exposition else "")
    if name and name[1] != b"None":
        engines = name[1].decode()
        known = CONNECTORS.get(engines, "")
        found = Transfer(known, ROLES.get(role[1].decode() if role else "", ""), "" if known else engines)
    if found.connector != "nixl":
        return found
    left = await pod.post(
        COMPLETIONS,
        _body(seen, "the sea", max_tokens=1, kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False}),
    )
    params = left.json.get("kv_transfer_params") if left.ok else None
    if not isinstance(params, dict) or "remote_engine_id" not in params:
        return found
    return replace(found, host=str(params.get("remote_host") or ""))


async def abort(pod: Asking, seen: Seen, settle: float) -> float | None:
    """Seconds from leaving a stream to its end on the pod; None if that cannot be seen, as where others run."""
    length = min(LONG, (seen.max_model_len or LONG) - 64)
    response = await pod.begin(
        COMPLETIONS, _body(seen, "the sea", max_tokens=max(length, 1), stream=True, ignore_eos=True)
    )
    try:
        if response.status != 200:
            return None
        await response.content.readany()
        running = await _running(pod)
    finally:
        response.close()
    begun = pod.clock.now()
    while running == 1 and pod.clock.now() < begun + settle:
        if not await _running(pod):
            return pod.clock.now() - begun
        await asyncio.sleep(0.05)
    return math.inf if running == 1 else None


def _body(seen: Seen, prompt: str, **more: Any) -> dict[str, Any]:
    model = {"model": seen.models[0]} if seen.models else {}
    return {**model, "prompt": prompt, "temperature": 0, **more}


async def _hits(pod: Asking) -> float:
    found = exposition.read((await pod.get("/metrics")).body)
    return found.metrics.prefix_hits if found else 0.0


async def _running(pod: Asking) -> int:
    found = exposition.read((await pod.get("/metrics")).body)
    return int(found.metrics.running + found.metrics.waiting) if found else 0
