"""A configuration for the pods that were seen. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.disagg.connectors import CONNECTORS
from proxy.doctor.seen import Seen
from proxy.fleet.dialects import DEFAULT_ENGINE
from proxy.kvevents.sources import EVENTS_PORT
from proxy.scheduling import presets


def recommended(pods: Sequence[Seen]) -> dict[str, Any]:
    """Of those that answered, as YAML has it: defaults are left out."""
    pods = [pod for pod in pods if not pod.unreachable]
    exact = _can_be_exact(pods)
    found: dict[str, Any] = {"pods": {"static": [_pod(pod, exact) for pod in pods]}}
    connectors = {pod.transfer.connector for pod in pods}
    if {"prefill", "decode"} <= {pod.transfer.role for pod in pods} and len(connectors) == 1 and "" not in connectors:
        connector = connectors.pop()
        found["disaggregation"] = {"connector": connector}
        found["scheduling"] = presets.disaggregated(presets.decider(CONNECTORS[connector].needs_pair))
    elif exact:
        found["scheduling"] = presets.exact()
    if pods and any(pod.health != 200 for pod in pods):
        found["reliability"] = {"health": {"path": None}}
    return found


def _pod(seen: Seen, exact: bool) -> dict[str, Any]:
    pod: dict[str, Any] = {"url": seen.url}
    if seen.engine not in ("", DEFAULT_ENGINE):
        pod["engine"] = seen.engine
    if seen.transfer.role:
        pod["role"] = seen.transfer.role
    if exact and seen.events and seen.events.port != presets.LISTENS:
        pod["labels"] = {EVENTS_PORT: str(seen.events.port)}
    return pod


def _can_be_exact(pods: Sequence[Seen]) -> bool:
    return bool(pods) and all(
        pod.engine == DEFAULT_ENGINE and pod.events and pod.events.speaks and pod.tokenize is not None for pod in pods
    )
