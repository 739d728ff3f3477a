"""Warnings of `kvlane check` about prefill and decode."""

from __future__ import annotations

import pytest

from proxy.disagg.settings import warnings

SPLIT = ("disagg-profile-handler", "decode-filter", "prefill-filter", "predicted-latency-pd-decider")
BOTH = ("prefill", "decode")


@pytest.mark.parametrize(
    ("connector", "types", "roles"),
    [
        ("nixl", SPLIT, BOTH),
        ("nixl", SPLIT, None),
        ("nixl", SPLIT, ("both",)),
        ("nixl", SPLIT, ("prefill-decode",)),
        ("sglang", ("disagg-profile-handler", "always-disagg-pd-decider"), BOTH),
        ("sglang", ("queue-scorer",), ("", "")),
    ],
)
def test_valid_combinations_are_not_warned_of(connector: str, types: tuple[str, ...], roles: tuple[str, ...]) -> None:
    assert list(warnings(connector, "default", types, roles)) == []


@pytest.mark.parametrize(
    ("connector", "types", "roles", "path"),
    [
        ("nixl", ("queue-scorer",), BOTH, "pools.p.pods: some have the role prefill"),
        ("nixl", SPLIT, ("decode", ""), "pools.p.pods: no pod has the role prefill"),
        ("nixl", (*SPLIT, "encode-filter"), BOTH, "pools.p.pods: no pod has the role encode"),
        ("p2p-nccl", SPLIT, BOTH, "pools.p.scheduling: with the connector p2p-nccl"),
    ],
)
def test_invalid_combinations_are_warned_of(
    connector: str, types: tuple[str, ...], roles: tuple[str, ...], path: str
) -> None:
    (warning,) = warnings(connector, "p", types, roles)
    assert warning.startswith(path)
