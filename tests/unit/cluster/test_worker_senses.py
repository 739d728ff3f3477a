"""What the supervisor reads off its workers."""

from __future__ import annotations

from collections.abc import Iterable

from proxy.cluster.queries import Shown, WorkersSenses
from proxy.settings import from_mapping
from proxy.telemetry.metrics import Catalogue

BUCKET = "kvlane_autoscale_time_to_first_token_seconds_bucket"


def exposition(slow: int, fast: int) -> bytes:
    lines = [
        '# TYPE kvlane_queue_requests gauge\nkvlane_queue_requests{band="a",pool="default"} 2.0',
        'kvlane_queue_requests{band="b",pool="default"} 1.0',
        'kvlane_queue_bytes{band="b",pool="default"} 1.0',
        'kvlane_autoscale_prefill_backlog_seconds{pool="default",role="prefill"} 0.5',
        f'{BUCKET}{{le="0.1",pool="default",role="prefill"}} {fast}.0',
        f'{BUCKET}{{le="+Inf",pool="default",role="prefill"}} {fast + slow}.0',
    ]
    return "\n".join(lines).encode()


def test_workers_are_added_up() -> None:
    found = Shown([exposition(1, 2), exposition(0, 4), b""])
    assert found.queued == {"default": 6}
    assert found.backlogs == {("default", "prefill"): 1.0}
    assert found.ttfts(("default", "prefill")) == [(0.1, 6.0), (float("inf"), 7.0)]


async def test_a_percentile_is_of_what_came_since_the_last_looks() -> None:
    settings = from_mapping({"autoscale": {"pools": {"default": {"roles": [{"name": "prefill", "min": 1, "max": 1}]}}}})
    said = [exposition(100, 0)]

    async def ask() -> Iterable[bytes]:
        return said

    senses = WorkersSenses(Catalogue("test"), ask)
    senses.pools = settings.autoscale.pools
    await senses.look()
    assert senses.known("default", "prefill", 0.0).ttft is None
    said[0] = exposition(100, 10)
    await senses.look()
    assert senses.known("default", "prefill", 15.0).ttft == 0.1 * 0.9
    said[0] = exposition(0, 1)
    await senses.look()
    known = senses.known("default", "prefill", 30.0)
    assert (known.ttft, known.queued, known.backlog) == (None, 3, 0.5)
