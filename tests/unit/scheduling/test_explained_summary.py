"""The line of a response header."""

from __future__ import annotations

import re
from typing import Any

import pytest

from proxy.scheduling.explained_decision import HEADER, summary
from tests.helpers.scheduling.deciding import World, fleet
from tests.helpers.scheduling.situations import pod

MEMBER = re.compile(r'([a-z-]+)=("(?:[ !#-\[\]-~]|\\["\\])*"|-?\d+(?:\.\d{1,3})?|\([^()]*\))(?:, |$)')


def members(line: str) -> dict[str, str]:
    """Of a dictionary of structured fields; all of the line is one."""
    found = list(MEMBER.finditer(line))
    assert "".join(one[0] for one in found) == line
    return {one[1]: one[2] for one in found}


def line(world: World) -> str:
    request = world.request(x_kvlane_explain="1")
    attempt = world.respond(request, world.decide(request))
    ((name, value),) = attempt.response_headers
    assert name == HEADER
    return value


def test_it_names_the_chosen_pod_and_the_reasons() -> None:
    parts = members(line(World(fleet())))
    assert parts["pod"] == '"pod-0"'
    assert parts["runner-up"] == '"pod-1"'
    assert parts["margin"] == "0.400"
    assert parts["candidates"] == "3"
    assert parts["scores"] == (
        '("queue-scorer";raw=1.000;part=0.750 "kv-cache-utilization-scorer";raw=1.000;part=0.250)'
    )


def test_any_names_fit_into_a_header_of_a_kilobyte() -> None:
    names = [f'queue scorer "{number}" of the königlich-bayerische fleet' for number in range(50)]
    document: dict[str, Any] = {"plugins": [{"type": "queue-scorer", "name": name} for name in names]}
    pods = [pod("pod\r\nx-injected: 1\\" + "é" * 500), pod("b", waiting=1)]
    header = line(World(pods, document=document))
    assert len(header) < 1024
    assert header.isascii()
    assert header.isprintable()
    found = members(header)
    assert found["pod"].startswith('"pod??x-injected: 1\\\\???')
    assert 1 <= found["scores"].count(";raw=") < 50


def test_another_pod_after_a_failure_is_named() -> None:
    world = World(fleet())
    request = world.request(x_kvlane_explain="true")
    attempt = world.respond(request, world.decide(request), number=1)
    assert members(attempt.response_headers[0][1])["sent-to"] == '"pod-1"'


@pytest.mark.parametrize("value", ["0", "", "no"])
def test_only_the_exact_header_value_requests_it(value: str) -> None:
    world = World(fleet())
    request = world.request(x_kvlane_explain=value)
    assert world.respond(request, world.decide(request)).response_headers == []


def test_without_a_chosen_pod_there_is_no_header() -> None:
    world = World(fleet())
    entry = world.served("r")
    assert entry is not None
    entry.decision = None
    assert summary(entry, world.pods[0]) == ""
