"""A pod lists which of its models are adapters of another."""

from __future__ import annotations

from proxy.core.ports import ManualClock
from proxy.fleet.settings import PodSettings
from proxy.fleet.store import Fleet


def test_models_with_a_parent_are_adapters_until_the_pod_reports_otherwise() -> None:
    fleet = Fleet(ManualClock())
    pod = fleet.add(PodSettings("http://pod:8000"))
    assert pod.adapters == frozenset()
    fleet.listed(pod, [{"id": "base"}, {"id": "poems", "parent": "base"}])
    assert pod.models == frozenset({"base", "poems"})
    assert pod.adapters == frozenset({"poems"})
    fleet.listed(pod, [{"id": "base"}])
    assert pod.adapters == frozenset()
