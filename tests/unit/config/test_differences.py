"""What tells two configurations apart, and what a process can change."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.config.reload import FIXED, OF_THE_HOST, changed, servable
from proxy.settings import Settings, from_mapping

POD = {"url": "http://a:1", "name": "a"}


def of(**sections: Any) -> Settings:
    return from_mapping(sections)


@pytest.mark.parametrize(
    ("paths", "before", "after"),
    [
        ([], {}, {}),
        ([], {}, {"reliability": {"retries": {"attempts": 3}}}),
        (["reliability.retries.attempts"], {}, {"reliability": {"retries": {"attempts": 4}}}),
        (["listen.port", "flowControl.maxQueued"], {}, {"flowControl": {"maxQueued": 1}, "listen": {"port": 1}}),
        (["pods.static"], {}, {"pods": {"static": [POD]}}),
        (["scheduling.plugins"], {}, {"scheduling": {"plugins": [{"type": "queue-scorer"}]}}),
        (["models.aliases.best"], {}, {"models": {"aliases": {"best": "sim"}}}),
        (["models.aliases.best"], {"models": {"aliases": {"best": "sim"}}}, {}),
        (["pools.large"], {}, {"pools": {"large": {}}}),
        (["pools.large"], {"pools": {"large": {}}}, {}),
        (["pools.large.pods.static"], {"pools": {"large": {}}}, {"pools": {"large": {"pods": {"static": [POD]}}}}),
        (
            ["pools.large.flowControl.maxQueued", "pools.large.scheduling.plugins"],
            {"pools": {"large": {}}},
            {
                "pools": {
                    "large": {"flowControl": {"maxQueued": 1}, "scheduling": {"plugins": [{"type": "queue-scorer"}]}}
                }
            },
        ),
        (
            ["pools.large.disaggregation.connector"],
            {"pools": {"large": {}}},
            {"pools": {"large": {"disaggregation": {"connector": "mooncake"}}}},
        ),
        (["pools"], {"pools": {"a": {}, "b": {}}}, {"pools": {"b": {}, "a": {}}}),
    ],
)
def test_every_changed_value_is_listed_with_its_path(paths: list[str], before: Any, after: Any) -> None:
    assert changed(of(**before), of(**after)) == paths


def test_fixed_values_stay_and_are_listed_and_the_others_change() -> None:
    before = of(listen={"port": 1}, pods={"static": [POD]})
    wanted = of(listen={"port": 2, "maxBody": "1MiB"}, pods={"static": [POD], "warmup": {"prompts": 3}})
    found, left = servable(before, wanted)
    assert sorted(left) == ["listen.maxBody", "listen.port"]
    assert found.listen == before.listen
    assert found.pods == wanted.pods
    assert servable(before, found) == (found, [])

    found, left = servable(before, wanted, OF_THE_HOST)
    assert left == ["listen.port"]
    assert (found.listen.port, found.listen.max_body) == (1, 1 << 20)


def test_a_worker_that_starts_later_reads_the_fixed_values_in_effect() -> None:
    """From the source, which leaves out what was not configured before and keeps what no longer is."""
    before = of(admin={"port": 7}, extproc={"port": 9001}, listen={"port": 1})
    wanted = of(replicas={"lease": "7s"}, listen={"port": 2, "maxBody": "1MiB"})
    found, left = servable(before, wanted, OF_THE_HOST)
    assert left
    started = from_mapping(found.source)
    assert changed(found, started) == []
    assert "replicas" not in found.source
    assert (started.extproc.port, started.admin.port, started.listen.port) == (9001, 7, 1)
    assert started.listen.max_body == 1 << 20


@pytest.mark.parametrize("path", sorted({*FIXED, *OF_THE_HOST}))
def test_fixed_paths_exist(path: str) -> None:
    value: Any = from_mapping({})
    for key in path.split("."):
        name = "".join("_" + sign.lower() if sign.isupper() else sign for sign in key)
        value = getattr(value, name)
