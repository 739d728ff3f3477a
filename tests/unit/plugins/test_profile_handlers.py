"""Which profile runs."""

from typing import Any

import pytest

from proxy.core.decision import ProfileResult, ScoredEndpoint
from proxy.core.errors import BadRequest, NoEndpoints, NotCached
from proxy.core.params import Invalid
from proxy.core.ports import ProfileNames
from proxy.core.registry import make_plugin
from proxy.core.request import InferenceRequest
from proxy.plugins.profile_handlers.header import HeaderProfileHandler
from proxy.plugins.profile_handlers.single import SingleProfileHandler
from proxy.prefix.match import PREFIX_MATCH
from tests.helpers.plugins.situations import Held, pod, request


def header(*profiles: str, **given: Any) -> HeaderProfileHandler:
    made = make_plugin(HeaderProfileHandler, given, "handler", {ProfileNames: ProfileNames(profiles)})
    assert isinstance(made, HeaderProfileHandler)
    return made


def chosen(handler: HeaderProfileHandler, incoming: InferenceRequest) -> str:
    return next(handler.plan(incoming))


def test_the_single_handler_decides_by_the_result_of_the_only_profile() -> None:
    a, b = pod("a"), pod("b")
    plan = SingleProfileHandler(ProfileNames(("only",))).plan(request())
    assert next(plan) == "only"
    with pytest.raises(StopIteration) as end:
        plan.send(ProfileResult("only", (ScoredEndpoint(b, 1.0), ScoredEndpoint(a, 0.0))))
    assert (end.value.value.target, end.value.value.fallbacks) == (b, (a,))


def test_the_single_handler_passes_the_error() -> None:
    plan = SingleProfileHandler(ProfileNames(("only",))).plan(request())
    next(plan)
    with pytest.raises(NoEndpoints):
        plan.throw(NoEndpoints("none"))


def test_the_single_handler_refuses_several_profiles() -> None:
    with pytest.raises(Invalid, match="exactly one profile"):
        make_plugin(SingleProfileHandler, {}, "handler", {ProfileNames: ProfileNames(("a", "b"))})


@pytest.mark.parametrize(
    ("value", "profile"), [("prefill", "prefill"), (" prefill ", "prefill"), ("", "decode"), ("  ", "decode")]
)
def test_the_header_names_the_profile(value: str, profile: str) -> None:
    assert chosen(header("prefill", "decode"), request(epp_profile=value)) == profile


def test_empty_names_are_the_defaults() -> None:
    handler = header("prefill", "decode", headerName="", defaultProfile=" ")
    assert [chosen(handler, request(epp_profile=name)) for name in ("prefill", "")] == ["prefill", "decode"]


class TestOnlyIfAvailable:
    """`Prefer: if-available` of llm-d's coordinator."""

    def target(self, prefer: str, **blocks: int) -> str:
        incoming = request(prefer=prefer)
        if blocks:
            incoming.state.write(PREFIX_MATCH, Held(10, blocks))
        plan = header("prefill", "decode").plan(incoming)
        best, *_ = [pod("a"), pod("b")]
        with pytest.raises(StopIteration) as end:
            plan.send(ProfileResult(next(plan), (ScoredEndpoint(best, 1.0),)))
        target: str = end.value.value.target.name
        return target

    @pytest.mark.parametrize("prefer", ["if-available", "respond-async, If-Available;x=1", " if-available "])
    def test_a_pod_without_the_start_of_the_prompt_is_refused_with_412(self, prefer: str) -> None:
        assert self.target(prefer, a=1) == "a"
        for blocks in ({"b": 5}, {}):
            with pytest.raises(NotCached) as caught:
                self.target(prefer, **blocks)
            assert (caught.value.status, caught.value.code) == (412, "not_cached")

    @pytest.mark.parametrize("prefer", ["", "wait=5", "not-if-available", "return=if-available"])
    def test_other_preferences_are_ignored(self, prefer: str) -> None:
        assert self.target(prefer) == "a"


def test_without_the_header_the_default_profile_runs() -> None:
    assert chosen(header("prefill", "decode"), request()) == "decode"
    assert chosen(header("x", "y", defaultProfile="y"), request()) == "y"


def test_the_header_name_is_configurable() -> None:
    assert chosen(header("a", "b", headerName="X-Profile"), request(x_profile="b")) == "b"


@pytest.mark.parametrize("value", ["Prefill", "nowhere"])
def test_an_unknown_name_is_the_clients_error(value: str) -> None:
    with pytest.raises(BadRequest, match="EPP-Profile can be one of prefill, decode"):
        chosen(header("prefill", "decode"), request(epp_profile=value))


def test_the_only_profile_always_runs() -> None:
    assert chosen(header("mine"), request(epp_profile="nowhere")) == "mine"
