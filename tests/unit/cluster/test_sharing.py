"""What a process shares stays shared over a reload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.cluster.prefixes import SharedIndex
from proxy.cluster.shared import Shared, SharedLimits, SharedQueue, SharedSessions
from proxy.cluster.sharing import Replicated
from proxy.settings import Settings, from_mapping

KEYS = {"apiKeys": [{"name": "team", "key": "secret", "limits": {"requestsPerMinute": 10}}]}
PLUGINS = [
    {"type": "approx-prefix-cache-producer"},
    {"type": "session-affinity-scorer"},
    {"type": "prefix-cache-scorer"},
]
EVERYTHING = {
    "security": KEYS,
    "flowControl": {"maxConcurrent": 4},
    "scheduling": {"plugins": PLUGINS},
}


NOTHING = {"scheduling": {"plugins": [{"type": "queue-scorer"}]}}


class Process:
    def __init__(self, **sections: Any) -> None:
        self.app = Replicated(settings(**sections))

    def reload(self, **sections: Any) -> None:
        self.app._use(*self.app._build(settings(**sections)))

    @property
    def values(self) -> Sequence[Shared]:
        return self.app._replica.state.values

    def all(self, *kinds: type[Shared]) -> list[Shared]:
        return [value for value in self.values if isinstance(value, kinds)]


def settings(**sections: Any) -> Settings:
    return from_mapping({"replicas": {"store": "redis://nowhere"}, **sections})


OF_A_CONFIGURATION = SharedIndex, SharedLimits, SharedQueue


def test_values_of_a_configuration_are_shared_while_it_has_them() -> None:
    process = Process(**NOTHING)
    assert process.all(*OF_A_CONFIGURATION) == []
    process.reload(**EVERYTHING)
    assert {type(value) for value in process.all(*OF_A_CONFIGURATION)} == set(OF_A_CONFIGURATION)
    assert len(process.all(SharedSessions)) == 2  # of the plugin, and stored responses
    process.reload(**NOTHING)
    assert process.all(*OF_A_CONFIGURATION) == []
    assert len(process.all(SharedSessions)) == 1


def test_a_value_that_stays_over_a_reload_keeps_what_shares_it() -> None:
    process = Process(**EVERYTHING)
    before = process.values
    larger = {"type": "approx-prefix-cache-producer", "parameters": {"maxBytes": "64MiB"}}
    process.reload(
        **{**EVERYTHING, "flowControl": {"maxConcurrent": 8}, "scheduling": {"plugins": [larger, *PLUGINS[1:]]}}
    )
    assert process.values == before
    (index,) = process.app._replica.state.of(SharedIndex)
    assert index.max_bytes == 64 << 20
    assert process.app._indexes() == [index]


def test_an_index_of_other_blocks_is_another_value() -> None:
    process = Process(**EVERYTHING)
    (index,) = process.app._replica.state.of(SharedIndex)
    larger = {"type": "approx-prefix-cache-producer", "parameters": {"blockSizeTokens": 128}}
    process.reload(**{**EVERYTHING, "scheduling": {"plugins": [larger, *PLUGINS[1:]]}})
    (other,) = process.app._replica.state.of(SharedIndex)
    assert (other is index, other._tag == index._tag) == (False, False)


def test_a_check_of_a_configuration_shares_nothing_of_it() -> None:
    process = Process(**NOTHING)
    before = process.values
    process.app.check(settings(**EVERYTHING))
    assert process.values == before
