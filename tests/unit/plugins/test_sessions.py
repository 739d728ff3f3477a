"""A session stays with its pod."""

from base64 import b64encode
from typing import Any

import pytest

from proxy.core.attempt import Attempt, Stage
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint, EndpointState, update
from proxy.core.ports import ManualClock
from proxy.core.request import InferenceRequest
from proxy.fleet.bindings import BindingTable
from proxy.latency.forecast import LATENCY
from proxy.plugins.producers.agent_identity import AGENT_IDENTITY
from proxy.plugins.producers.session_id import SESSION_ID
from tests.helpers.plugins.situations import RUN, Foretold, attempt, fault, make, pod, request

BY_ID: dict[str, Any] = {"strategy": "session_id"}


def token(name: str) -> str:
    return b64encode(name.encode()).decode()


def kept(plugin: Any, incoming: InferenceRequest, *pods: Endpoint) -> list[str]:
    return [one.name for one in plugin.filter(RUN, incoming, pods)]


def scores(plugin: Any, incoming: InferenceRequest, *pods: Endpoint) -> list[float]:
    return plugin.score(RUN, incoming, pods)  # type: ignore[no-any-return]


class TestToken:
    def test_only_the_pod_of_the_token_is_kept_and_scores_1(self) -> None:
        incoming, a, b = request(x_session_token=token("default/b")), pod("a"), pod("b")
        assert kept(make("session-affinity-filter"), incoming, a, b) == ["b"]
        assert scores(make("session-affinity-scorer"), incoming, a, b) == [0.0, 1.0]

    @pytest.mark.parametrize(
        "header", [None, "", "%%%", token("default/gone"), token("b"), b64encode(b"\xff").decode()]
    )
    def test_an_invalid_token_or_unknown_pod_binds_nothing(self, header: str | None) -> None:
        incoming = request() if header is None else request(x_session_token=header)
        assert kept(make("session-affinity-filter"), incoming, pod("a"), pod("b")) == ["a", "b"]
        assert scores(make("session-affinity-scorer"), incoming, pod("a"), pod("b")) == [0.0, 0.0]

    def test_every_response_has_the_token_of_its_pod(self) -> None:
        dispatched = attempt(request(), pod("a"))
        make("session-affinity-scorer").pre_request(dispatched, dispatched.endpoint)
        assert dispatched.response_headers == [("x-session-token", token("default/a"))]

    def test_filter_and_scorer_together_send_one_token(self) -> None:
        dispatched = attempt(request(), pod("a"))
        for kind in ("session-affinity-scorer", "session-affinity-filter"):
            make(kind).pre_request(dispatched, dispatched.endpoint)
        assert len(dispatched.response_headers) == 1

    def test_a_pod_with_a_namespace_keeps_it(self) -> None:
        dispatched, incoming = attempt(request(), pod("prod/a")), request(x_session_token=token("prod/a"))
        scorer = make("session-affinity-scorer")
        scorer.pre_request(dispatched, dispatched.endpoint)
        assert dispatched.response_headers == [("x-session-token", token("prod/a"))]
        assert scores(scorer, incoming, pod("prod/a")) == [1.0]

    @pytest.mark.parametrize("given", [{"encodedEndpointHeaderConfig": {"header": "X-Mine"}}, {"headerName": "X-Mine"}])
    def test_the_header_has_a_name_in_either_spelling(self, given: dict[str, Any]) -> None:
        scorer = make("session-affinity-scorer", **given)
        assert scores(scorer, request(x_mine=token("default/a")), pod("a")) == [1.0]

    def test_only_the_configured_profile_gives_tokens(self) -> None:
        scorer = make("session-affinity-scorer", profileName="decode")
        other, decode = attempt(request(), pod("a"), profile="x"), attempt(request(), pod("a"), profile="decode")
        for dispatched in (other, decode):
            scorer.pre_request(dispatched, dispatched.endpoint)
        assert (len(other.response_headers), len(decode.response_headers)) == (0, 1)


class TestStages:
    """One pod computes the prompt, another decodes."""

    def split(
        self, plugin: Any, incoming: InferenceRequest, decode: Endpoint, *prefill: Endpoint
    ) -> list[tuple[str, str]]:
        """Headers for the client."""
        answering = Attempt(incoming, Decision(decode, (), "decode", prefill), decode, 0, 0.0)
        answering.stage = Stage.DECODE
        plugin.pre_request(answering, decode)
        computing = Attempt(incoming, Decision(prefill[0], prefill[1:]), prefill[0], 0, 0.0)
        computing.stage, computing.for_client = Stage.PREFILL, False
        plugin.pre_request(computing, prefill[0])
        assert computing.response_headers == []
        return answering.response_headers

    def test_the_token_is_of_the_decode_pod(self) -> None:
        headers = self.split(make("session-affinity-scorer"), request(), pod("d"), pod("p"))
        assert headers == [("x-session-token", token("default/d"))]
        headers = self.split(make("session-affinity-scorer", profileName="decode"), request(), pod("d"), pod("p"))
        assert headers == [("x-session-token", token("default/d"))]

    def test_the_token_is_of_the_prefill_pod_if_configured(self) -> None:
        headers = self.split(make("session-affinity-scorer", profileName="prefill"), request(), pod("d"), pod("p"))
        assert headers == [("x-session-token", token("default/p"))]

    def test_a_session_is_bound_to_the_decode_pod(self) -> None:
        plugin, incoming, d, p = make("session-affinity-filter", **BY_ID), request(x_session_id="s"), pod("d"), pod("p")
        self.split(plugin, incoming, d, p)
        assert kept(plugin, incoming, p, d, pod("e")) == ["d"]

    def test_a_session_is_bound_to_the_prefill_pod_if_configured(self) -> None:
        plugin = make("session-affinity-filter", **BY_ID, profileName="prefill")
        incoming, d, p, q = request(x_session_id="s"), pod("d"), pod("p"), pod("q")
        self.split(plugin, incoming, d, p, q)
        self.split(plugin, incoming, d, q, p)
        assert kept(plugin, incoming, q, p) == ["p"]
        plugin.pre_request(attempt(incoming, d, profile="decode"), d)  # it did all of one itself
        assert kept(plugin, incoming, q, p) == ["p"]
        self.split(plugin, incoming, d, q)
        assert kept(plugin, incoming, q, p) == ["q"]


class TestSessionId:
    def test_a_session_is_bound_when_its_request_is_sent(self) -> None:
        plugin, incoming, a, b = make("session-affinity-filter", **BY_ID), request(x_session_id="s"), pod("a"), pod("b")
        assert kept(plugin, incoming, a, b) == ["a", "b"]
        assert kept(plugin, incoming, a, b) == ["a", "b"]
        plugin.pre_request(attempt(incoming, b, a), b)
        assert kept(plugin, incoming, a, b) == ["b"]
        assert kept(plugin, request(x_session_id="t"), a, b) == ["a", "b"]
        assert kept(plugin, request(), a, b) == ["a", "b"]

    def test_no_header_is_sent_back(self) -> None:
        dispatched = attempt(request(x_session_id="s"), pod("a"))
        make("session-affinity-filter", **BY_ID).pre_request(dispatched, dispatched.endpoint)
        assert dispatched.response_headers == []

    def test_a_session_moves_only_if_its_pod_is_no_candidate(self) -> None:
        plugin, incoming, a, b = make("session-affinity-scorer", **BY_ID), request(x_session_id="s"), pod("a"), pod("b")
        plugin.pre_request(attempt(incoming, a, b), a)
        plugin.pre_request(attempt(incoming, b, a), b)
        assert scores(plugin, incoming, a, b) == [1.0, 0.0]
        plugin.pre_request(attempt(incoming, b), b)
        assert scores(plugin, incoming, a, b) == [0.0, 1.0]

    def test_an_unused_session_expires(self) -> None:
        clock, a = ManualClock(), pod("a")
        plugin = make("session-affinity-scorer", clock=clock, **BY_ID, sessionIdConfig={"evictionTtlSeconds": 60})
        incoming = request(x_session_id="s")
        plugin.pre_request(attempt(incoming, a), a)
        clock.advance(59)
        plugin.pre_request(attempt(incoming, a), a)
        clock.advance(59)
        assert scores(plugin, incoming, a) == [1.0]
        clock.advance(1)
        assert scores(plugin, incoming, a) == [0.0]

    def test_a_time_of_0_is_the_default(self) -> None:
        clock, a, incoming = ManualClock(), pod("a"), request(x_session_id="s")
        config = {"evictionTtlSeconds": 0, "evictionSweepSeconds": 0}
        plugin = make("session-affinity-scorer", clock=clock, **BY_ID, sessionIdConfig=config)
        plugin.pre_request(attempt(incoming, a), a)
        clock.advance(299)
        assert scores(plugin, incoming, a) == [1.0]
        clock.advance(1)
        assert scores(plugin, incoming, a) == [0.0]

    def test_a_removed_pod_is_dropped(self) -> None:
        plugin, incoming, a = make("session-affinity-scorer", **BY_ID), request(x_session_id="s"), pod("a")
        plugin.pre_request(attempt(incoming, a), a)
        plugin.endpoint_removed(a)
        assert scores(plugin, incoming, a) == [0.0]

    def test_the_first_source_with_an_id_counts(self) -> None:
        sources = [{"attribute": "SessionID/mine"}, {"header": "X-Chat"}]
        plugin = make("session-affinity-scorer", **BY_ID, sessionIdConfig={"sources": sources})
        assert plugin.requires == (SESSION_ID.of("mine"),)
        a, by_header, by_datum = pod("a"), request(x_chat="s"), request(x_chat="other")
        by_datum.state.write(SESSION_ID.of("mine"), "s")
        plugin.pre_request(attempt(by_header, a), a)
        assert scores(plugin, by_datum, a) == [1.0]

    def test_a_source_may_name_the_producer_apart_from_the_datum(self) -> None:
        sources = [{"attribute": "SessionID", "producer": "mine"}, {"attribute": "agent-identity"}]
        plugin = make("session-affinity-scorer", **BY_ID, sessionIdConfig={"sources": sources})
        assert plugin.requires == (SESSION_ID.of("mine"), AGENT_IDENTITY)

    @pytest.mark.parametrize(
        "config",
        [
            {"sources": [{"header": "a", "producer": "b"}]},
            {"evictionTtlSeconds": -1},
            {"evictionSweepSeconds": -1},
            {"sources": [{"header": "a", "attribute": "b"}]},
            {"sources": [{}]},
        ],
    )
    def test_invalid_parameters_are_refused(self, config: dict[str, Any]) -> None:
        assert "sessionIdConfig" in fault("session-affinity-filter", **BY_ID, sessionIdConfig=config)


class TestRebalance:
    YIELDS: dict[str, Any] = {**BY_ID, "rebalance": {"requests": 4, "seconds": 0.5}}

    def test_without_rebalance_a_session_stays_on_a_busy_pod(self) -> None:
        plugin, incoming, a, b = make("session-affinity-filter", **BY_ID), request(x_session_id="s"), pod("a"), pod("b")
        plugin.pre_request(attempt(incoming, a, b), a)
        a.charge(1000, 1000)
        assert kept(plugin, incoming, a, b) == ["a"]

    def test_a_session_leaves_an_overloaded_pod_and_is_bound_to_the_new_one(self) -> None:
        plugin, incoming, a, b = (
            make("session-affinity-filter", **self.YIELDS),
            request(x_session_id="s"),
            pod("a"),
            pod("b"),
        )
        plugin.pre_request(attempt(incoming, a, b), a)
        a.charge(4, 0)
        assert kept(plugin, incoming, a, b) == ["a"]
        a.charge(1, 0)
        assert kept(plugin, incoming, a, b) == ["a", "b"]
        plugin.pre_request(attempt(incoming, b, a), b)
        a.charge(-5, 0)
        assert kept(plugin, incoming, a, b) == ["b"]

    def test_the_scorer_prefers_no_pod_while_its_pod_is_overloaded(self) -> None:
        plugin, incoming, a, b = (
            make("session-affinity-scorer", **self.YIELDS),
            request(x_session_id="s"),
            pod("a"),
            pod("b"),
        )
        plugin.pre_request(attempt(incoming, a, b), a)
        assert scores(plugin, incoming, a, b) == [1.0, 0.0]
        a.charge(5, 0)
        assert scores(plugin, incoming, a, b) == [0.0, 0.0]

    def test_a_token_is_dropped_in_the_same_way(self) -> None:
        plugin = make("session-affinity-filter", rebalance={"requests": 4})
        incoming, a, b = request(x_session_token=token("default/a")), pod("a", running=5), pod("b")
        assert kept(plugin, incoming, a, b) == ["a", "b"]
        assert kept(plugin, incoming, a) == ["a"]

    @pytest.mark.parametrize(
        ("behind", "is_predicted", "names"), [(0.5, True, ["a"]), (0.6, True, ["a", "b"]), (9.0, False, ["a"])]
    )
    def test_with_predictions_seconds_are_compared(self, behind: float, is_predicted: bool, names: list[str]) -> None:
        plugin, incoming, a, b = (
            make("session-affinity-filter", **self.YIELDS),
            request(x_session_id="s"),
            pod("a"),
            pod("b"),
        )
        plugin.pre_request(attempt(incoming, a, b), a)
        if is_predicted:
            incoming.state.write(LATENCY, Foretold({"a": behind, "b": 0.0}))
            a.charge(1000, 1000)
        assert kept(plugin, incoming, a, b) == names

    def test_sessions_of_a_draining_pod_go_to_the_pod_of_the_first_one(self) -> None:
        plugin, old, a, b = make("session-affinity-filter", **self.YIELDS), pod("old"), pod("a"), pod("b")
        first, second = request(x_session_id="1"), request(x_session_id="2")
        for incoming in (first, second):
            plugin.pre_request(attempt(incoming, old, a, b), old)
        update(old, state=EndpointState.DRAINING)
        assert kept(plugin, first, a, b) == ["a", "b"]
        plugin.pre_request(attempt(first, b, a), b)
        assert kept(plugin, second, a, b) == ["b"]
        b.charge(5, 0)
        assert kept(plugin, second, a, b) == ["a", "b"]

    def test_idle_sessions_move_after_the_pod_is_removed(self) -> None:
        plugin, old, a, b = make("session-affinity-filter", **self.YIELDS), pod("old"), pod("a"), pod("b")
        first, second = request(x_session_id="1"), request(x_session_id="2")
        for incoming in (first, second):
            plugin.pre_request(attempt(incoming, old, a, b), old)
        update(old, state=EndpointState.DRAINING)
        plugin.pre_request(attempt(first, b, a), b)
        plugin.endpoint_removed(old)
        assert kept(plugin, second, a, b) == ["b"]
        plugin.endpoint_removed(b)
        assert kept(plugin, second, a, b) == ["a", "b"]

    def test_sessions_of_a_pod_that_lost_its_cache_do_not_move(self) -> None:
        plugin, old, a = make("session-affinity-filter", **self.YIELDS), pod("old"), pod("a")
        incoming = request(x_session_id="1")
        plugin.pre_request(attempt(incoming, old, a), old)
        plugin.endpoint_removed(old)
        assert kept(plugin, incoming, old, a) == ["old", "a"]

    def test_a_removed_successor_gets_no_sessions(self) -> None:
        plugin, old, a, b = make("session-affinity-filter", **self.YIELDS), pod("old"), pod("a"), pod("b")
        first, second = request(x_session_id="1"), request(x_session_id="2")
        for incoming in (first, second):
            plugin.pre_request(attempt(incoming, old, a, b), old)
        update(old, state=EndpointState.DRAINING)
        plugin.pre_request(attempt(first, b, a), b)
        plugin.endpoint_removed(b)
        plugin.endpoint_removed(old)
        assert kept(plugin, second, a) == ["a"]
        assert plugin.table.get("2", 0.0) is None


class TestTable:
    def test_bindings_of_other_processes_count_unless_older(self) -> None:
        mine, its, a, b = BindingTable(100, 100), BindingTable(100, 100), pod("a"), pod("b")
        mine.on_bind = lambda key, endpoint: its.receive(key, endpoint, 5.0)
        its.bind("s", b, now=1.0)
        mine.bind("s", a, now=5.0)
        assert its.get("s", now=5.0) is a
        its.bind("s", b, now=6.0)
        mine.bind("s", a, now=6.0)
        assert its.get("s", now=6.0) is b

    def test_recent_sessions_are_listed_oldest_first(self) -> None:
        table, a = BindingTable(ttl=100, sweep_every=100), pod("a")
        for at, session in enumerate("xyzx"):
            table.bind(session, a, now=float(at))
        assert [used_at for _, _, used_at in table.recent(2)] == [2.0, 3.0]

    def test_the_table_is_bounded_and_drops_the_longest_unused(self) -> None:
        table, a = BindingTable(ttl=100, sweep_every=100, most=2), pod("a")
        for session in ("x", "y", "x", "z"):
            table.bind(session, a, now=1.0)
        assert [table.get(session, now=1.0) for session in "xyz"] == [a, None, a]

    def test_expired_sessions_are_removed_from_memory(self) -> None:
        table, a = BindingTable(ttl=10, sweep_every=5), pod("a")
        for second in range(100):
            table.bind(str(second), a, now=float(second))
        assert len(table) <= 15


def test_invented_session_names_use_no_memory() -> None:
    table, a = BindingTable(300.0, 10.0), pod("a")
    long = "x" * 60_000 + "\udcff"
    table.bind(long, a, now=0.0)
    assert table.get(long, now=1.0) is a
    assert table.get(long + "y", now=1.0) is None
    assert all(len(key) == 16 for key in table._bound)
