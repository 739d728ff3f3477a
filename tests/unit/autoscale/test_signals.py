"""What the autoscaler learns of the process that serves."""

from __future__ import annotations

from array import array

from proxy.autoscale.signals import OwnSignals
from proxy.core.ports import BlocksStored, ManualClock
from proxy.fleet.settings import PodSettings
from proxy.fleet.store import Fleet
from proxy.plugins.producers.approx_prefix_cache import ApproxPrefixCacheProducer
from proxy.plugins.producers.precise_prefix_cache import PrecisePrefixCacheProducer
from proxy.telemetry.metrics import Catalogue
from tests.helpers.autoscale.scaled import policies
from tests.helpers.scheduling.situations import scheduling


def test_the_cached_blocks_of_a_pod_are_those_of_both_kinds_of_index() -> None:
    built = scheduling(
        {
            "plugins": [{"type": "approx-prefix-cache-producer"}, {"type": "precise-prefix-cache-producer"}],
            "schedulingProfiles": [{"name": "default", "plugins": []}],
        }
    )
    clock = ManualClock()
    fleet = Fleet(clock)
    one, _ = fleet.add(PodSettings("http://one")), fleet.add(PodSettings("http://other"))
    (approx,) = built.plugins(ApproxPrefixCacheProducer)
    (precise,) = built.plugins(PrecisePrefixCacheProducer)
    approx.index.reserve(([1, 2, 3],), one, 100)
    precise.index.published(one, 0, [BlocksStored([7, 8], None, array("I", range(32)).tobytes(), 16)])
    signals = OwnSignals(Catalogue("test"), fleet, clock, dict, lambda: {"default": built})
    signals.pools = policies().pools
    assert signals.current().cached_blocks == {one.name: 5}
