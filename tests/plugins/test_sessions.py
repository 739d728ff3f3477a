"""A session stays with its pod."""

from base64 import b64encode
from typing import Any

import pytest

from proxy.core.clock import ManualClock
from proxy.core.endpoint import Endpoint
from proxy.core.request import InferenceRequest
from proxy.plugins.producers.session_id import SESSION_ID
from proxy.plugins.session_table import SessionTable
from tests.plugins.situations import RUN, exchange, fault, make, pod, request

BY_ID: dict[str, Any] = {"strategy": "session_id"}


def token(name: str) -> str:
    return b64encode(name.encode()).decode()


def kept(plugin: Any, asked: InferenceRequest, *pods: Endpoint) -> list[str]:
    return [one.name for one in plugin.filter(RUN, asked, pods)]


def scores(plugin: Any, asked: InferenceRequest, *pods: Endpoint) -> list[float]:
    return plugin.score(RUN, asked, pods)  # type: ignore[no-any-return]


class TestToken:
    def test_the_pod_of_the_token_is_kept_alone_and_scores_1(self) -> None:
        asked, a, b = request(x_session_token=token("default/b")), pod("a"), pod("b")
        assert kept(make("session-affinity-filter"), asked, a, b) == ["b"]
        assert scores(make("session-affinity-scorer"), asked, a, b) == [0.0, 1.0]

    @pytest.mark.parametrize(
        "header", [None, "", "%%%", token("default/gone"), token("b"), b64encode(b"\xff").decode()]
    )
    def test_a_token_that_is_none_or_of_a_pod_that_is_none_binds_nobody(self, header: str | None) -> None:
        asked = request() if header is None else request(x_session_token=header)
        assert kept(make("session-affinity-filter"), asked, pod("a"), pod("b")) == ["a", "b"]
        assert scores(make("session-affinity-scorer"), asked, pod("a"), pod("b")) == [0.0, 0.0]

    def test_every_answer_carries_the_token_of_the_pod_that_gave_it(self) -> None:
        leg = exchange(request(), pod("a"))
        make("session-affinity-scorer").pre_request(leg, leg.endpoint)
        assert leg.response_headers == [("x-session-token", token("default/a"))]

    def test_filter_and_scorer_together_send_it_once(self) -> None:
        leg = exchange(request(), pod("a"))
        for kind in ("session-affinity-scorer", "session-affinity-filter"):
            make(kind).pre_request(leg, leg.endpoint)
        assert len(leg.response_headers) == 1

    def test_a_pod_with_a_namespace_keeps_it(self) -> None:
        leg, asked = exchange(request(), pod("prod/a")), request(x_session_token=token("prod/a"))
        scorer = make("session-affinity-scorer")
        scorer.pre_request(leg, leg.endpoint)
        assert leg.response_headers == [("x-session-token", token("prod/a"))]
        assert scores(scorer, asked, pod("prod/a")) == [1.0]

    @pytest.mark.parametrize("given", [{"encodedEndpointHeaderConfig": {"header": "X-Mine"}}, {"headerName": "X-Mine"}])
    def test_the_header_has_a_name_in_either_spelling(self, given: dict[str, Any]) -> None:
        scorer = make("session-affinity-scorer", **given)
        assert scores(scorer, request(x_mine=token("default/a")), pod("a")) == [1.0]

    def test_only_the_named_profile_gives_tokens(self) -> None:
        scorer = make("session-affinity-scorer", profileName="decode")
        other, decode = exchange(request(), pod("a"), profile="x"), exchange(request(), pod("a"), profile="decode")
        for leg in (other, decode):
            scorer.pre_request(leg, leg.endpoint)
        assert (len(other.response_headers), len(decode.response_headers)) == (0, 1)


class TestSessionId:
    def test_a_session_is_bound_when_its_request_is_sent_and_not_before(self) -> None:
        plugin, asked, a, b = make("session-affinity-filter", **BY_ID), request(x_session_id="s"), pod("a"), pod("b")
        assert kept(plugin, asked, a, b) == ["a", "b"]
        assert kept(plugin, asked, a, b) == ["a", "b"]
        plugin.pre_request(exchange(asked, b, a), b)
        assert kept(plugin, asked, a, b) == ["b"]
        assert kept(plugin, request(x_session_id="t"), a, b) == ["a", "b"]
        assert kept(plugin, request(), a, b) == ["a", "b"]

    def test_no_header_is_sent_back(self) -> None:
        leg = exchange(request(x_session_id="s"), pod("a"))
        make("session-affinity-filter", **BY_ID).pre_request(leg, leg.endpoint)
        assert leg.response_headers == []

    def test_a_session_moves_only_when_its_pod_is_no_candidate(self) -> None:
        plugin, asked, a, b = make("session-affinity-scorer", **BY_ID), request(x_session_id="s"), pod("a"), pod("b")
        plugin.pre_request(exchange(asked, a, b), a)
        plugin.pre_request(exchange(asked, b, a), b)
        assert scores(plugin, asked, a, b) == [1.0, 0.0]
        plugin.pre_request(exchange(asked, b), b)
        assert scores(plugin, asked, a, b) == [0.0, 1.0]

    def test_an_unused_session_is_forgotten_after_its_time(self) -> None:
        clock, a = ManualClock(), pod("a")
        plugin = make("session-affinity-scorer", clock=clock, **BY_ID, sessionIdConfig={"evictionTtlSeconds": 60})
        asked = request(x_session_id="s")
        plugin.pre_request(exchange(asked, a), a)
        clock.advance(59)
        plugin.pre_request(exchange(asked, a), a)
        clock.advance(59)
        assert scores(plugin, asked, a) == [1.0]
        clock.advance(1)
        assert scores(plugin, asked, a) == [0.0]

    def test_a_removed_pod_is_forgotten(self) -> None:
        plugin, asked, a = make("session-affinity-scorer", **BY_ID), request(x_session_id="s"), pod("a")
        plugin.pre_request(exchange(asked, a), a)
        plugin.endpoint_removed(a)
        assert scores(plugin, asked, a) == [0.0]

    def test_the_first_source_with_an_id_counts(self) -> None:
        sources = [{"attribute": "SessionID/mine"}, {"header": "X-Chat"}]
        plugin = make("session-affinity-scorer", **BY_ID, sessionIdConfig={"sources": sources})
        assert plugin.requires == (SESSION_ID.of("mine"),)
        a, by_header, by_datum = pod("a"), request(x_chat="s"), request(x_chat="other")
        by_datum.state.write(SESSION_ID.of("mine"), "s")
        plugin.pre_request(exchange(by_header, a), a)
        assert scores(plugin, by_datum, a) == [1.0]

    @pytest.mark.parametrize(
        "config",
        [
            {"evictionTtlSeconds": -1},
            {"evictionSweepSeconds": -1},
            {"sources": [{"header": "a", "attribute": "b"}]},
            {"sources": [{}]},
        ],
    )
    def test_configurations_that_make_no_sense(self, config: dict[str, Any]) -> None:
        assert "sessionIdConfig" in fault("session-affinity-filter", **BY_ID, sessionIdConfig=config)


class TestTable:
    def test_it_never_holds_more_than_its_most_and_drops_the_longest_unused(self) -> None:
        table, a = SessionTable(ttl=100, sweep_every=100, most=2), pod("a")
        for session in ("x", "y", "x", "z"):
            table.bind(session, a, now=1.0)
        assert [table.get(session, now=1.0) for session in "xyz"] == [a, None, a]

    def test_expired_sessions_are_swept_out_of_memory(self) -> None:
        table, a = SessionTable(ttl=10, sweep_every=5), pod("a")
        for second in range(100):
            table.bind(str(second), a, now=float(second))
        assert len(table) <= 15


def test_what_a_client_calls_its_session_takes_no_memory() -> None:
    table, a = SessionTable(300.0, 10.0), pod("a")
    long = "x" * 60_000 + "\udcff"
    table.bind(long, a, now=0.0)
    assert table.get(long, now=1.0) is a
    assert table.get(long + "y", now=1.0) is None
    assert all(len(key) == 16 for key in table._bound)
