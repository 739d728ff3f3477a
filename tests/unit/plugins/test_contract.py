"""Every plugin that exists keeps its contract; a new one is adopted by existing."""

import copy
import random
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.config.reference import reference
from proxy.core.decision import ProfileResult, ScoredEndpoint
from proxy.core.endpoint import Endpoint
from proxy.core.plugin import (
    DataProducer,
    Decider,
    EndpointRemoved,
    Filter,
    PairDecider,
    Picker,
    Plugin,
    PostResponse,
    PreRequest,
    ProfileHandler,
    Scorer,
    points_of,
)
from proxy.core.registry import is_built_in
from proxy.core.request import InferenceRequest
from proxy.core.state import PluginState, State
from proxy.prefix.match import PREFIX_MATCH
from tests.helpers.plugins.situations import REGISTRY, RUN, Held, attempt, make, pod, request, scored

LABELS = ["", "0-100", "50-5000", "junk"]

ATTRIBUTE = {"type": "linear_lower_is_better"}
THRESHOLD = {"type": "threshold", "threshold": {"operator": "LessThan", "value": 0.5}}
PARAMETERS: dict[str, dict[str, Any]] = {
    "header-label-affinity-scorer": {"headerName": "x-zone", "labelKey": "zone"},
    "endpoint-attribute-scorer": {"attributeKey": "gpu", "algorithm": ATTRIBUTE},
    "endpoint-attribute-filter": {"attribute": "gpu", "algorithm": THRESHOLD},
    "utilization-filter": {"conditions": [{"metric": "waiting-queue", "maxValue": 3}]},
    "label-selector-filter": {"matchLabels": {"zone": "a"}},
    "by-label": {"label": "zone", "validValues": ["a"]},
    "context-length-aware": {"enableFiltering": True},
    "disagg-profile-handler": {"profiles": {"decode": "default"}},
    "pd-profile-handler": {"decodeProfile": "default", "prefillProfile": "default"},
}
"""For types that cannot be created, or have no effect, without parameters."""


def of(point: type) -> list[type[Plugin]]:
    return [cls for cls in REGISTRY if point in points_of(cls)]


def adopt(point: type) -> Any:
    return pytest.mark.parametrize("cls", of(point), ids=lambda cls: cls.plugin_type)


def instance(cls: type[Plugin], state: PluginState | None = None) -> Any:
    return make(cls.plugin_type, state=state, **PARAMETERS.get(cls.plugin_type, {}))


def common_state(first: object, second: object) -> list[str]:
    """The attributes, of the instances and of their classes, that are one object which can change."""
    slots = {name for cls in type(first).__mro__ for name in getattr(cls, "__slots__", ())}
    names = {*getattr(first, "__dict__", ()), *slots, *vars(type(first))} - {"_abc_impl"}
    pairs = {name: (getattr(first, name), getattr(second, name)) for name in names if not name.startswith("__")}
    return sorted(name for name, (mine, its) in pairs.items() if mine is its and can_change(mine))


CONSTANT = int, float, str, tuple, frozenset, type, FunctionType, type(None)


def can_change(value: Any) -> bool:
    is_frozen = getattr(type(value), "__dataclass_params__", None) and type(value).__dataclass_params__.frozen
    return not isinstance(value, CONSTANT) and not is_frozen


def test_state_that_two_instances_have_in_common_is_found() -> None:
    common: dict[str, int] = {}

    class Assigned:
        def __init__(self) -> None:
            self.name = "the same text"
            self._own: dict[str, int] = {}
            self._seen = common

    class OfTheClass:
        seen = common

    assert common_state(Assigned(), Assigned()) == ["_seen"]
    assert common_state(OfTheClass(), OfTheClass()) == ["seen"]


@st.composite
def fleets(draw: st.DrawFn) -> list[Endpoint]:
    def one(index: int) -> Endpoint:
        labels = {"zone": draw(st.sampled_from("ab"))}
        if text := draw(st.sampled_from(LABELS)):
            labels["llm-d.ai/context-length-range"] = text
        if role := draw(st.sampled_from(["", "decode", "prefill", "both"])):
            labels["llm-d.ai/role"] = role
        return pod(
            f"pod-{index}",
            labels=labels,
            weight=draw(st.sampled_from([0.5, 1.0, 3.0])),
            waiting=draw(st.integers(0, 20)),
            running=draw(st.integers(0, 20)),
            kv_usage=draw(st.floats(0, 1)),
            requests=draw(st.integers(0, 20)),
            tokens=draw(st.integers(0, 10**7)),
            active_models=frozenset(draw(st.sets(st.sampled_from(["model", "x"]), max_size=2))),
            max_active_models=draw(st.integers(0, 3)),
            attributes={"gpu": draw(st.floats(0, 1))} if draw(st.booleans()) else {},
        )

    return [one(index) for index in range(draw(st.integers(1, 6)))]


@st.composite
def requests(draw: st.DrawFn) -> InferenceRequest:
    incoming = request(draw(st.integers(0, 10_000)), x_zone=draw(st.sampled_from("ab")), x_session_id="s")
    if draw(st.booleans()):
        blocks = {f"pod-{index}": draw(st.integers(0, 8)) for index in range(6)}
        incoming.state.write(PREFIX_MATCH, Held(8, blocks))
    return incoming


def observable(endpoints: Sequence[Endpoint]) -> list[Any]:
    return [(e.name, dict(e.labels), e.weight, e.state, e.metrics, copy.copy(e.load), e.view) for e in endpoints]


@pytest.mark.parametrize("cls", list(REGISTRY), ids=lambda cls: cls.plugin_type)
class TestEveryPlugin:
    def test_it_has_a_description_and_documents_each_parameter(self, cls: type[Plugin]) -> None:
        described = reference(cls)
        assert described.doc
        assert not described.doc.startswith(f"{cls.__name__}("), "the docstring is the dataclass's own"
        assert all(parameter.doc for parameter in described.parameters)

    def test_it_has_an_extension_point_and_can_be_created(self, cls: type[Plugin]) -> None:
        assert points_of(cls)
        assert instance(cls).plugin_type == cls.plugin_type

    def test_guards_trust_its_results_because_these_tests_check_them(self, cls: type[Plugin]) -> None:
        assert is_built_in(instance(cls))

    def test_two_instances_have_separate_state(self, cls: type[Plugin]) -> None:
        assert common_state(instance(cls), instance(cls)) == []

    def test_it_can_replace_an_instance_in_use(self, cls: type[Plugin]) -> None:
        state = State()
        draft = state.draft()
        first = instance(cls, PluginState(draft))
        draft.commit()
        incoming, target = request(tokens=500), pod("a")
        dispatched = attempt(incoming, target, pod("b"))
        if PreRequest in points_of(cls):
            first.pre_request(dispatched, target)
        draft = state.draft()
        second = instance(cls, PluginState(draft))
        draft.commit()
        for one in (first, second):
            if PostResponse in points_of(cls):
                one.post_response(dispatched, target)
            if EndpointRemoved in points_of(cls):
                one.endpoint_removed(target)

    def test_data_keys_are_stable(self, cls: type[Plugin]) -> None:
        made = instance(cls)
        assert made.provides == made.provides
        assert made.requires == made.requires


@adopt(Scorer)
class TestEveryScorer:
    @given(endpoints=fleets(), incoming=requests())
    @settings(max_examples=15, deadline=None)
    def test_one_score_in_range_per_endpoint_and_nothing_changes(
        self, cls: type[Plugin], endpoints: list[Endpoint], incoming: InferenceRequest
    ) -> None:
        before = observable(endpoints)
        scores = instance(cls).score(RUN, incoming, endpoints)
        assert len(scores) == len(endpoints)
        assert all(0.0 <= score <= 1.0 for score in scores)
        assert observable(endpoints) == before

    @given(endpoints=fleets(), incoming=requests(), seed=st.integers())
    @settings(max_examples=15, deadline=None)
    def test_a_score_belongs_to_its_endpoint_in_any_order(
        self, cls: type[Plugin], endpoints: list[Endpoint], incoming: InferenceRequest, seed: int
    ) -> None:
        if cls.plugin_type in ORDER_IS_ITS_RULE:
            return
        scorer, shuffled = instance(cls), random.Random(seed).sample(endpoints, len(endpoints))
        one = dict(zip(endpoints, scorer.score(RUN, incoming, endpoints), strict=True))
        other = dict(zip(shuffled, scorer.score(RUN, incoming, shuffled), strict=True))
        assert one == other

    @given(endpoints=fleets(), incoming=requests())
    @settings(max_examples=15, deadline=None)
    def test_scoring_twice_gives_the_same(
        self, cls: type[Plugin], endpoints: list[Endpoint], incoming: InferenceRequest
    ) -> None:
        scorer = instance(cls)
        assert list(scorer.score(RUN, incoming, endpoints)) == list(scorer.score(RUN, incoming, endpoints))


ORDER_IS_ITS_RULE = frozenset({"no-hit-lru-scorer"})
"""Pods that never had a cold request are ranked in the order of the configuration, by definition."""


@adopt(Filter)
class TestEveryFilter:
    @given(endpoints=fleets(), incoming=requests())
    @settings(max_examples=15, deadline=None)
    def test_it_keeps_a_subset_in_order_and_nothing_changes(
        self, cls: type[Plugin], endpoints: list[Endpoint], incoming: InferenceRequest
    ) -> None:
        before = observable(endpoints)
        survivors = list(instance(cls).filter(RUN, incoming, endpoints))
        positions = [endpoints.index(endpoint) for endpoint in survivors]
        assert positions == sorted(set(positions))
        assert observable(endpoints) == before

    @given(endpoints=fleets(), incoming=requests())
    @settings(max_examples=15, deadline=None)
    def test_filtering_does_not_depend_on_the_order(
        self, cls: type[Plugin], endpoints: list[Endpoint], incoming: InferenceRequest
    ) -> None:
        made = instance(cls)
        assert set(made.filter(RUN, incoming, endpoints)) == set(made.filter(RUN, incoming, endpoints[::-1]))


@adopt(Picker)
class TestEveryPicker:
    @given(endpoints=fleets(), incoming=requests(), data=st.data())
    @settings(max_examples=15, deadline=None)
    def test_it_ranks_every_candidate_once_and_nothing_changes(
        self, cls: type[Plugin], endpoints: list[Endpoint], incoming: InferenceRequest, data: st.DataObject
    ) -> None:
        before = observable(endpoints)
        scores = [data.draw(st.floats(0, 1)) for _ in endpoints]
        candidates = scored(endpoints, scores)
        ranked = list(instance(cls).pick(RUN, incoming, candidates))
        assert len(ranked) == len(candidates)
        assert set(ranked) == set(candidates)
        assert observable(endpoints) == before

    @given(endpoints=fleets(), incoming=requests(), data=st.data())
    @settings(max_examples=15, deadline=None)
    def test_its_order_is_that_of_its_picks(
        self, cls: type[Plugin], endpoints: list[Endpoint], incoming: InferenceRequest, data: st.DataObject
    ) -> None:
        scores = [data.draw(st.floats(0, 1)) for _ in endpoints]
        picked = instance(cls).pick(RUN, incoming, scored(endpoints, scores))
        ordered = instance(cls).order(RUN, incoming, endpoints, scores)
        assert list(ordered) == [one.endpoint for one in picked]


@adopt(ProfileHandler)
class TestEveryHandler:
    def test_it_yields_known_profiles_and_decides(self, cls: type[Plugin]) -> None:
        a = pod("a")
        plan = instance(cls).plan(request())
        name = next(plan)
        assert name == "default"
        with pytest.raises(StopIteration) as end:
            plan.send(ProfileResult(name, (ScoredEndpoint(a, 1.0),)))
        assert end.value.value.target is a


@adopt(Decider)
class TestEveryDecider:
    @given(endpoints=fleets(), incoming=requests())
    @settings(max_examples=15, deadline=None)
    def test_deciding_twice_gives_the_same_and_nothing_changes(
        self, cls: type[Plugin], endpoints: list[Endpoint], incoming: InferenceRequest
    ) -> None:
        made, (decode, *prefill) = instance(cls), endpoints
        before, state = observable(endpoints), dict(incoming.state)
        responses = [made.wants(incoming, decode) for _ in range(2)]
        if prefill and isinstance(made, PairDecider):
            responses += [made.prefers(incoming, decode, decode, prefill) for _ in range(2)]
        else:
            responses += [made.confirms(incoming, decode, prefill) for _ in range(2) if prefill]
        assert set(responses) <= {True, False}
        assert responses[0] is responses[1]
        assert responses[-1] is responses[-2]
        assert observable(endpoints) == before
        assert dict(incoming.state) == state


@adopt(DataProducer)
class TestEveryProducer:
    @pytest.mark.parametrize("tokens", [0, 1000])
    async def test_it_writes_only_declared_data(self, cls: type[Plugin], tokens: int) -> None:
        made = instance(cls)
        incoming = request(tokens, x_session_id="s")
        assert made.provides
        await made.produce(incoming, [pod("a")])
        promised = set(made.provides)
        written = set(incoming.state)
        assert written <= promised | {key.of("") for key in promised}

    async def test_a_producer_that_does_not_wait_never_suspends(self, cls: type[Plugin]) -> None:
        made = instance(cls)
        if made.waits:
            return
        with pytest.raises(StopIteration):
            made.produce(request(100, x_session_id="s"), [pod("a")]).send(None)


@adopt(EndpointRemoved)
class TestEveryoneWhoKnowsPods:
    async def test_an_unknown_pod_may_be_removed_and_returns_as_new(self, cls: type[Plugin]) -> None:
        made, a, b = instance(cls), pod("a"), pod("b")
        made.endpoint_removed(a)
        dispatched = attempt(request(100, x_session_id="s"), a, b)
        if stands_at(cls, PreRequest):
            made.pre_request(dispatched, a)
        if stands_at(cls, PostResponse):
            made.post_response(dispatched, a)
        made.endpoint_removed(a)


def stands_at(cls: type[Plugin], point: type) -> bool:
    return point in points_of(cls)
