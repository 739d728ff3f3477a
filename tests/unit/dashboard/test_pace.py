from __future__ import annotations

from tests.unit.plugins.test_latency import Fleet


async def test_a_pod_that_is_three_times_slower_has_three_times_the_pace() -> None:
    fleet = Fleet("slow", "usual", slow=3.0)
    await fleet.learn()
    (slow, _), (usual, _) = (fleet.producer.pace(pod) for pod in fleet.pods)
    assert 2.5 < slow / usual < 3.5


async def test_a_pod_with_few_responses_has_no_pace() -> None:
    fleet = Fleet("new", "other")
    assert fleet.producer.pace(fleet.pods[0]) is None
    await fleet.learn(times=2)
    assert fleet.producer.pace(fleet.pods[0]) is None
