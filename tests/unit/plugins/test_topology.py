"""Pods near the one that was chosen before."""

from typing import Any

import pytest

from proxy.core.endpoint import Endpoint
from proxy.core.request import InferenceRequest
from proxy.plugins.endpoint_data import LABELS, PEER
from tests.helpers.plugins.situations import fault, kept, make, request, score


def at(name: str, host: str = "", rack: str = "", zone: str = "", region: str = "", url: str = "") -> Endpoint:
    return Endpoint(name, url, labels=dict(zip(LABELS, (host, rack, zone, region), strict=True)))


PODS = [
    at("same-host", "h", "r", "z", "eu"),
    at("same-rack", "i", "r", "z", "eu"),
    at("same-zone", "i", "s", "z", "eu"),
    at("same-region", "i", "s", "y", "eu"),
    at("elsewhere", "i", "s", "y", "us"),
    at("nowhere"),
]
NEAR = at("peer", "h", "r", "z", "eu")


def near(peer: Endpoint) -> InferenceRequest:
    incoming = request()
    incoming.state.write(PEER.of("disagg-profile-handler"), peer)
    return incoming


def test_the_nearest_shared_level_scores() -> None:
    assert score("topology-affinity-scorer", PODS, near(NEAR)) == [1.0, 0.2, 0.05, 0.02, 0.0, 0.0]


def test_without_a_peer_all_score_0_and_all_are_kept() -> None:
    assert score("topology-affinity-scorer", PODS) == [0.0] * 6
    assert kept("topology-affinity-filter", PODS) == [one.name for one in PODS]


def test_missing_labels_are_not_shared() -> None:
    assert score("topology-affinity-scorer", PODS, near(at("peer"))) == [0.0] * 6
    assert score("topology-affinity-scorer", PODS[1:4], near(at("peer", zone="z"))) == [0.05, 0.05, 0.0]


def test_without_a_label_the_host_is_read_from_the_url() -> None:
    peer, one, other = (at(name, url=f"http://{host}:1") for name, host in [("p", "a"), ("x", "a"), ("y", "b")])
    assert score("topology-affinity-scorer", [one, other], near(peer)) == [1.0, 0.0]
    assert score("topology-affinity-scorer", [at("z", host="a")], near(peer)) == [1.0]


@pytest.mark.parametrize(
    ("parameters", "count"),
    [
        ({}, 1),
        ({"minAffinity": "host"}, 1),
        ({"minAffinity": "rack"}, 2),
        ({"minAffinity": "zone"}, 3),
        ({"minAffinity": "Region"}, 4),
    ],
)
def test_pods_that_are_near_enough_are_kept(parameters: dict[str, Any], count: int) -> None:
    assert kept("topology-affinity-filter", PODS, near(NEAR), **parameters) == [one.name for one in PODS[:count]]


def test_all_are_kept_if_none_is_near_enough() -> None:
    far = PODS[3:]
    assert kept("topology-affinity-filter", far, near(NEAR)) == [one.name for one in far]
    assert kept("topology-affinity-filter", [NEAR, *far], near(NEAR)) == ["peer", *(one.name for one in far)]
    assert kept("topology-affinity-filter", [NEAR, *PODS], near(NEAR)) == ["same-host"]


def test_both_need_a_handler_that_chooses_the_peer() -> None:
    assert make("topology-affinity-filter").requires == make("topology-affinity-scorer").requires == (PEER,)


def test_other_levels_are_refused() -> None:
    complaint = fault("topology-affinity-filter", minAffinity="moon")
    assert "must be one of host, rack, zone, region, not 'moon'" in complaint


def test_encode_pods_have_the_role() -> None:
    roles = ["encode", "encode-prefill", "encode-prefill-decode", "both", "prefill", "decode", ""]
    assert kept("encode-filter", [Endpoint(role or "none", role=role) for role in roles]) == roles[:3]
