"""Where pods publish their KV events."""

from __future__ import annotations

from proxy.core.endpoint import RANK_LABEL, SIZE_LABEL, Endpoint
from proxy.core.ports import KvSources
from proxy.prefix.kv_subscriptions import is_named, sources_of


def test_each_rank_publishes_on_its_own_port() -> None:
    rank = Endpoint("a/3", url="http://a:8000", rank=3)
    (source,) = sources_of(rank, KvSources(replay_port=6000))
    assert (source.rank, source.events, source.replay) == (0, "tcp://a:5560", "tcp://a:6003")


def test_a_pod_that_is_one_rank_publishes_on_the_port_of_its_rank() -> None:
    (source,) = sources_of(Endpoint("a-rank-2", url="http://a:8002", labels={RANK_LABEL: "2"}), KvSources())
    assert source.events == "tcp://a:5559"


def test_a_pod_that_is_one_endpoint_has_all_of_its_ranks() -> None:
    sources = sources_of(Endpoint("a", url="http://a:8000", labels={SIZE_LABEL: "2"}), KvSources())
    assert [(source.rank, source.events) for source in sources] == [(0, "tcp://a:5557"), (1, "tcp://a:5558")]


def test_a_topic_covers_all_ranks_of_a_pod() -> None:
    assert is_named("kv@a@m", Endpoint("a/1", url="http://10.0.0.1:8000", rank=1))
    assert not is_named("kv@b@m", Endpoint("a/1", url="http://10.0.0.1:8000", rank=1))
