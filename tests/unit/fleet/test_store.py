"""The living endpoints."""

from __future__ import annotations

import pytest

from proxy.core.endpoint import Endpoint, EndpointState
from proxy.core.errors import BadRequest
from proxy.core.ports import ManualClock
from proxy.fleet.dialects import ENGINE_LABELS, Dialects
from proxy.fleet.models import MOST_KNOWN
from proxy.fleet.settings import PodSettings
from proxy.fleet.store import Fleet, FleetSettings


def pod(name: str, **keys: object) -> PodSettings:
    return PodSettings(url=f"http://{name}", name=name, **keys)  # type: ignore[arg-type]


def cards(*ids: str, **extra: object) -> list[dict[str, object]]:
    return [{"id": model, **extra} for model in ids]


def state(endpoint: Endpoint) -> EndpointState:
    return endpoint.state


class Calls:
    """A fleet, and its calls to hooks."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.events: list[tuple[str, str]] = []
        self.fleet = Fleet(
            self.clock,
            on_ready=lambda endpoint: self.hear("ready", endpoint),
            on_restarted=lambda endpoint: self.hear("restarted", endpoint),
            on_removed=lambda endpoint: self.hear("removed", endpoint),
            grace=30.0,
        )

    def hear(self, what: str, endpoint: Endpoint) -> None:
        self.events.append((what, endpoint.name))

    def ready(self, name: str, *models: str, **keys: object) -> Endpoint:
        endpoint = self.fleet.add(pod(name, **keys))
        self.fleet.listed(endpoint, cards(*models))
        self.fleet.reached(endpoint)
        return endpoint


def test_a_pod_is_a_candidate_from_its_first_response_on() -> None:
    calls = Calls()
    endpoint = calls.fleet.add(pod("a"))
    assert state(endpoint) is EndpointState.STARTING
    assert calls.fleet.endpoints_for("m") == ()
    calls.fleet.reached(endpoint)
    assert state(endpoint) is EndpointState.READY
    assert list(calls.fleet.endpoints_for("m")) == [endpoint]
    assert calls.events == [("ready", "a")]


def test_a_model_is_served_by_pods_that_list_it_and_pods_without_a_list() -> None:
    calls = Calls()
    a, b, any_model = calls.ready("a", "m", "n"), calls.ready("b", "m"), calls.ready("c")
    assert list(calls.fleet.endpoints_for("m")) == [a, b, any_model]
    assert list(calls.fleet.endpoints_for("n")) == [a, any_model]
    assert list(calls.fleet.endpoints_for("other")) == [any_model]


def test_candidates_are_the_same_object_until_something_changes() -> None:
    calls = Calls()
    a = calls.ready("a", "m")
    first = calls.fleet.endpoints_for("m")
    assert calls.fleet.endpoints_for("m") is first
    calls.ready("b", "m")
    assert calls.fleet.endpoints_for("m") is not first
    calls.fleet.listed(a, cards("other"))
    assert [endpoint.name for endpoint in calls.fleet.endpoints_for("m")] == ["b"]


def test_unknown_models_use_no_memory() -> None:
    calls = Calls()
    calls.ready("a", "m")
    calls.ready("b")
    assert calls.fleet.endpoints_for("x1") is calls.fleet.endpoints_for("x2")


def test_a_configured_model_list_overrides_the_pods_list() -> None:
    calls = Calls()
    endpoint = calls.ready("a", "m", "n", models=("n", "extra"))
    assert endpoint.models == frozenset({"n", "extra"})
    assert calls.fleet.models() == [{"id": "n"}, {"id": "extra", "object": "model"}]


def test_a_model_once_known_stays_known() -> None:
    calls = Calls()
    endpoint = calls.ready("a", "m")
    assert calls.fleet.knows("m")
    assert not calls.fleet.knows("other")
    calls.fleet.refused(endpoint)
    assert calls.fleet.endpoints_for("m") == ()
    assert calls.fleet.knows("m")
    calls.fleet.remove("a")
    assert calls.fleet.knows("m")


def test_the_oldest_unlisted_models_are_dropped() -> None:
    calls = Calls()
    calls.ready("a", "m")
    endpoint = calls.ready("b", "first")
    for number in range(4):
        calls.fleet.listed(endpoint, [{"id": f"{number}-{each}"} for each in range(MOST_KNOWN // 2)])
    assert not calls.fleet.knows("first")
    assert not calls.fleet.knows("0-0")
    assert calls.fleet.knows("2-0")  # and named no more
    assert calls.fleet.knows("3-0")
    assert calls.fleet.knows("m")  # and still named


def test_before_the_first_scrape_every_model_may_exist() -> None:
    calls = Calls()
    assert calls.fleet.knows("m")
    calls.fleet.add(pod("a"))
    assert calls.fleet.knows("m")


def test_a_pod_without_a_list_makes_every_model_known_even_if_unreachable() -> None:
    calls = Calls()
    calls.ready("a", "m")
    calls.fleet.add(pod("silent"))
    assert not calls.fleet.knows("other")
    calls.fleet.refused(calls.ready("b"))
    assert calls.fleet.knows("other")


def test_the_only_model_is_the_single_base_model() -> None:
    calls = Calls()
    assert calls.fleet.only_model() == ""
    endpoint = calls.ready("a", "m")
    calls.fleet.listed(endpoint, [{"id": "m"}, {"id": "adapter", "parent": "m"}])
    calls.ready("b", "m")
    assert calls.fleet.only_model() == "m"
    calls.ready("c", "n")
    with pytest.raises(BadRequest, match="there are several: m, adapter, n"):
        calls.fleet.only_model()


def test_a_model_with_several_names_counts_once_under_its_first() -> None:
    calls = Calls()
    a, b = calls.fleet.add(pod("a")), calls.fleet.add(pod("b"))
    calls.fleet.listed(a, [*cards("m", root="/models/m"), *cards("alias", root="/models/m")])
    calls.fleet.listed(b, cards("m", root="/models/m"))
    assert calls.fleet.only_model() == "m"
    calls.fleet.listed(b, cards("other", root="/models/m"))
    assert calls.fleet.only_model() == "", "no pod is ready, so no model is the only one"


def test_model_cards_are_merged_in_the_order_of_pod_names_with_all_their_fields() -> None:
    calls = Calls()
    second, first, away = calls.ready("b"), calls.ready("a"), calls.ready("c", "gone")
    calls.fleet.listed(second, [{"id": "m", "root": "/b"}, {"id": "n", "parent": "m"}])
    calls.fleet.listed(first, [{"id": "m", "root": "/a", "max_model_len": 8192}])
    calls.fleet.refused(away)
    assert calls.fleet.models() == [{"id": "m", "root": "/a", "max_model_len": 8192}, {"id": "n", "parent": "m"}]


def test_a_refusing_pod_is_no_candidate_until_it_responds_again() -> None:
    calls = Calls()
    endpoint = calls.ready("a")
    calls.fleet.refused(endpoint)
    assert state(endpoint) is EndpointState.EJECTED
    assert calls.fleet.ready == ()
    calls.fleet.reached(endpoint)
    assert state(endpoint) is EndpointState.READY
    assert list(calls.fleet.ready) == [endpoint]


def test_a_drained_pod_gets_no_requests_and_returns_to_its_state() -> None:
    calls = Calls()
    endpoint = calls.ready("a")
    calls.fleet.drain("a")
    assert state(endpoint) is EndpointState.DRAINING
    assert calls.fleet.ready == ()
    calls.fleet.refused(endpoint)
    assert state(endpoint) is EndpointState.DRAINING
    calls.fleet.undrain("a")
    assert state(endpoint) is EndpointState.EJECTED
    with pytest.raises(KeyError):
        calls.fleet.drain("nobody")


def test_an_idle_pod_is_removed_at_once() -> None:
    calls = Calls()
    calls.ready("a")
    calls.fleet.remove("a")
    assert list(calls.fleet.endpoints) == []
    assert calls.fleet.get("a") is None
    assert calls.events[-1] == ("removed", "a")


def test_a_busy_pod_is_removed_when_its_last_request_ends() -> None:
    calls = Calls()
    endpoint = calls.ready("a")
    endpoint.charge(1, 0)
    calls.fleet.remove("a")
    calls.fleet.sweep()
    assert state(endpoint) is EndpointState.DRAINING
    assert list(calls.fleet.endpoints) == [endpoint]
    assert calls.fleet.ready == ()
    endpoint.charge(-1, 0)
    calls.fleet.sweep()
    assert list(calls.fleet.endpoints) == []
    assert [what for what, _ in calls.events] == ["ready", "removed"]


def test_a_pod_with_endless_requests_is_removed_after_the_grace_period() -> None:
    calls = Calls()
    endpoint = calls.ready("a")
    endpoint.charge(1, 0)
    calls.fleet.remove("a")
    calls.clock.advance(29)
    calls.fleet.sweep()
    assert len(calls.fleet.endpoints) == 1
    calls.clock.advance(1)
    calls.fleet.sweep()
    assert len(calls.fleet.endpoints) == 0


def test_a_pod_added_again_before_its_removal_keeps_its_state() -> None:
    calls = Calls()
    endpoint = calls.ready("a")
    endpoint.charge(1, 0)
    calls.fleet.remove("a")
    assert calls.fleet.add(pod("a", weight=2.0)) is endpoint
    assert state(endpoint) is EndpointState.READY
    endpoint.charge(-1, 0)
    calls.fleet.sweep()
    assert calls.fleet.get("a") is endpoint


def test_a_pod_added_after_its_removal_is_new() -> None:
    calls = Calls()
    old = calls.ready("a")
    calls.fleet.remove("a")
    new = calls.fleet.add(pod("a"))
    assert new is not old
    calls.fleet.reached(old)
    calls.fleet.listed(old, cards("m"))
    calls.fleet.restarted(old)
    assert state(new) is EndpointState.STARTING
    assert new.models is None
    assert "restarted" not in [what for what, _ in calls.events]


def test_a_request_without_a_model_is_served_by_any_ready_pod() -> None:
    calls = Calls()
    a, b = calls.ready("a", "m"), calls.ready("b", "n")
    calls.fleet.add(pod("c"))
    assert list(calls.fleet.endpoints_for("")) == [a, b]


def test_reconciling_adds_updates_and_removes_the_pods_of_one_source() -> None:
    calls = Calls()
    fleet = calls.fleet
    fleet.add(pod("mine"))
    fleet.reconcile("file", [pod("a"), pod("b", weight=1.0)])
    b = fleet.get("b")
    fleet.reconcile("file", [pod("b", weight=3.0, role="decode", labels={"x": "y"}, engine="sglang"), pod("c")])
    assert [endpoint.name for endpoint in fleet.endpoints] == ["mine", "b", "c"]
    assert b is not None
    assert fleet.get("b") is b
    assert (b.weight, b.role, b.labels, b.engine) == (
        3.0,
        "decode",
        {"x": "y", "llm-d.ai/role": "decode"},
        "sglang",
    )


def test_the_engine_of_a_pod_follows_its_label_and_a_changed_key_of_the_label() -> None:
    fleet = Calls().fleet
    a = fleet.add(pod("a", labels={"llm-d.ai/engine-type": "sglang", "runs": "llamacpp"}))
    b = fleet.add(pod("b", labels={"llm-d.ai/engine-type": "unheard-of"}, engine="trtllm-serve"))
    assert (a.engine, b.engine) == ("sglang", "trtllm-serve")
    fleet.settings = FleetSettings(dialects={"default": Dialects(labels=("runs", *ENGINE_LABELS))})
    assert (a.engine, b.engine) == ("llamacpp", "trtllm-serve")


def test_a_pod_whose_name_was_added_through_the_admin_port_is_not_added(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Calls().fleet
    fleet.add(pod("a"))
    fleet.reconcile("static", [pod("a")])
    assert (
        "did not add pod a of the source static: another pod of this name was added through the admin port and stays in"
        " use; rename or remove one of them"
    ) in caplog.text


def test_a_pod_that_moved_keeps_its_identity() -> None:
    fleet = Calls().fleet
    fleet.reconcile("file", [PodSettings(url="http://a:1", name="a")])
    endpoint = fleet.get("a")
    fleet.reconcile("file", [PodSettings(url="http://a:2", name="a")])
    assert endpoint is not None
    assert fleet.get("a") is endpoint
    assert endpoint.url == "http://a:2"


def test_the_role_may_come_from_a_label() -> None:
    fleet = Calls().fleet
    endpoint = fleet.add(pod("a", labels={"llm-d.ai/role": "prefill"}))
    assert endpoint.role == "prefill"
    fleet.add(pod("a"))
    assert endpoint.role == ""


def test_a_source_does_not_adopt_the_pod_of_another(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Calls().fleet
    fleet.reconcile("static", [pod("a", weight=2.0)])
    fleet.reconcile("dns", [pod("a"), pod("b")])
    fleet.reconcile("dns", [pod("b")])
    endpoint = fleet.get("a")
    assert endpoint is not None
    assert endpoint.weight == 2.0
    assert "did not add pod a of the source dns: another pod of this name is of the source static" in caplog.text


@pytest.mark.parametrize("removed_by", ["source", "operator"])
def test_a_pod_of_two_sources_joins_when_the_other_source_gives_it_up(removed_by: str) -> None:
    fleet = Calls().fleet
    fleet.add(pod("a", weight=2.0), *(["static"] if removed_by == "source" else []))
    fleet.reconcile("file", [pod("a"), pod("b")])
    if removed_by == "source":
        fleet.reconcile("static", [])
    else:
        fleet.remove("a")
    endpoint = fleet.get("a")
    assert endpoint is not None
    assert (endpoint.weight, fleet.is_leaving(endpoint)) == (1.0, False)
    fleet.reconcile("file", [pod("b")])
    assert fleet.get("a") is None


def test_a_pod_of_a_pool_that_is_gone_does_not_join() -> None:
    fleet = Calls().fleet
    fleet.form(("default", "large"))
    fleet.reconcile("static", [pod("a")])
    fleet.reconcile("file of large", [pod("a")], "large")
    fleet.form(("default",))
    fleet.reconcile("static", [])
    assert fleet.get("a") is None


def test_a_hook_that_fails_is_logged_and_the_change_stands(caplog: pytest.LogCaptureFixture) -> None:
    def fail(endpoint: Endpoint) -> None:
        raise RuntimeError("no")

    fleet = Fleet(ManualClock(), on_removed=fail)
    fleet.add(pod("a"))
    fleet.remove("a")
    assert list(fleet.endpoints) == []
    assert "a hook failed for pod a" in caplog.text


def test_watchers_get_existing_new_and_removed_pods() -> None:
    fleet = Calls().fleet
    events: list[str] = []
    fleet.add(pod("a"))
    fleet.watch(
        lambda endpoint: events.append("+" + endpoint.name), lambda endpoint: events.append("-" + endpoint.name)
    )
    fleet.add(pod("b"))
    fleet.remove("a")
    assert events == ["+a", "+b", "-a"]
