"""What `kvlane check` warns of in `flowControl`."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core import params
from proxy.flowcontrol.settings import FlowControlSettings, warnings


def warned(**section: Any) -> list[str]:
    return list(warnings(params.load(FlowControlSettings, section), "flowControl", 1800.0))


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"maxConcurrent": 8, "bands": [{"priority": 1, "maxQueued": 9}], "queueTimeout": "20m"},
        {"shedding": {"byLoad": {}}},
        {"saturation": {"detector": "utilization"}, "fairness": "strict"},
        {"saturation": {"detector": "concurrency", "requests": 32}, "maxConcurrentPerPod": 32},
        {
            "saturation": {"detector": "concurrency", "requests": 40},
            "maxConcurrentPerPod": 32,
            "bands": [{"priority": -1, "ceiling": 0.5}],
        },
        {
            "saturation": {"detector": "concurrency", "requests": 40},
            "maxConcurrentPerPod": 32,
            "holdback": {"minCeiling": 0.5},
        },
        {"noEndpointTimeout": "5m", "fairness": "strict"},
    ],
)
def test_plausible_settings_are_not_warned_of(section: dict[str, Any]) -> None:
    assert warned(**section) == []


@pytest.mark.parametrize(
    ("section", "warning"),
    [
        ({"fairness": "strict"}, "flowControl: requests never wait"),
        ({"saturation": {"queueDepth": 9}}, "flowControl: requests never wait"),
        ({"maxConcurrent": 8, "queueTimeout": "30m"}, "flowControl.queueTimeout: no request waits 1800 s"),
        ({"noEndpointTimeout": "1h"}, "flowControl.noEndpointTimeout: no request waits 3600 s"),
        (
            {"maxConcurrent": 8, "bands": [{"priority": 0}, {"priority": 1, "queueTimeout": "1h"}]},
            "flowControl.bands[1].queueTimeout: no request waits 3600 s",
        ),
        (
            {"maxConcurrent": 8, "maxQueued": 5, "bands": [{"priority": 0, "maxQueued": 6}]},
            "flowControl.bands[0].maxQueued: never 6 requests wait",
        ),
        (
            {"saturation": {"detector": "concurrency"}, "maxConcurrentPerPod": 32},
            "flowControl.saturation.requests: a pod never has 100 requests in flight",
        ),
    ],
)
def test_settings_without_effect_are_warned_of(section: dict[str, Any], warning: str) -> None:
    assert [each for each in warned(**section) if each.startswith(warning)]
