"""Which stages a request is split into, and on which pods."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from proxy.core.attempt import Attempt, Stage
from proxy.core.decision import Decision, ProfileResult, ScoredEndpoint
from proxy.core.endpoint import Endpoint
from proxy.core.errors import NoEndpoints, RequestError, Saturated
from proxy.core.params import Invalid
from proxy.core.plugin import Decider, PairDecider, Plugin
from proxy.core.ports import Deciders, InstanceName, ManualClock, ProfileNames
from proxy.core.registry import make_plugin
from proxy.core.request import DataKey, InferenceRequest
from proxy.fleet.ledger import Ledger
from proxy.plugins.endpoint_data import PEER
from proxy.plugins.profile_handlers.disagg import DisaggProfileHandler
from proxy.plugins.profile_handlers.pd import PdProfileHandler
from tests.helpers.plugins.situations import make, pod, request, score

PROFILES = ("prefill", "decode", "encode")
A, B, C, D = pod("a"), pod("b"), pod("c"), pod("d")

Found = Mapping[str, Sequence[Endpoint] | RequestError]
"""What each profile finds."""


@dataclass(frozen=True)
class Says(Decider):
    wanted: bool = True
    confirmed: bool = True

    def wants(self, request: InferenceRequest, decode: Endpoint) -> bool:
        return self.wanted

    def confirms(self, request: InferenceRequest, decode: Endpoint, prefill: Sequence[Endpoint]) -> bool:
        assert decode not in prefill
        return self.confirmed


PRICED: DataKey[Stage] = DataKey("Priced")


@dataclass(frozen=True)
class Compares(Says, PairDecider):
    """Prefers `decode` to any other decode pod."""

    best: str = "b"

    @contextmanager
    def pricing(self, request: InferenceRequest, stage: Stage) -> Iterator[None]:
        request.state[PRICED] = stage
        yield
        del request.state[PRICED]

    def prefers(
        self, request: InferenceRequest, whole: Endpoint, decode: Endpoint, prefill: Sequence[Endpoint]
    ) -> bool:
        assert decode not in prefill
        return decode.name == self.best


DECIDERS = {
    "yes": Says(),
    "no": Says(wanted=False),
    "rather-not": Says(confirmed=False),
    "pair": Compares(),
    "no-pair": Compares(wanted=False),
}


def handler(cls: type[Plugin] = DisaggProfileHandler, known: Sequence[str] = PROFILES, **given: Any) -> Any:
    ports = {
        InstanceName: InstanceName("split"),
        ProfileNames: ProfileNames(tuple(known)),
        Deciders: Deciders(DECIDERS),
    }
    return make_plugin(cls, given, "plugins.split", ports)


def deciding(prefill: str = "", encode: str = "", **given: Any) -> Any:
    return handler(deciders={"prefill": prefill, "encode": encode}, **given)


def faults(**given: Any) -> list[str]:
    with pytest.raises(Invalid) as caught:
        handler(**given)
    return list(map(str, caught.value.problems))


def fault(**given: Any) -> str:
    return faults(**given)[0]


def decided(made: Any, found: Found, incoming: InferenceRequest | None = None) -> tuple[Decision, list[str]]:
    """And the profiles that ran."""
    ran: list[str] = []
    plan = made.plan(incoming or request())
    try:
        name = next(plan)
        while True:
            ran.append(name)
            what = found[name]
            if isinstance(what, RequestError):
                name = plan.throw(what)
            else:
                name = plan.send(ProfileResult(name, tuple(ScoredEndpoint(one, 1.0) for one in what)))
    except StopIteration as end:
        return end.value, ran


NO_POD = NoEndpoints("no pod")


class TestPairs:
    """The decode profile ranks pods differently when another pod computes the prompt."""

    def decided(self, incoming: InferenceRequest, pair: Sequence[Endpoint], computing: Any, **given: Any) -> Any:
        """Return the decision, and for each profile run the priced stage and the peer."""
        ran: list[Any] = []
        plan = deciding(**{"prefill": "pair", **given}).plan(incoming)
        try:
            name = next(plan)
            while True:
                stage, peer = incoming.state.read(PRICED), incoming.state.read(PEER)
                ran.append((name, stage, peer))
                found = {"prefill": computing, "encode": [C, B]}.get(name, [A, B] if stage is None else pair)
                if isinstance(found, RequestError):
                    name = plan.throw(found)
                else:
                    name = plan.send(ProfileResult(name, tuple(ScoredEndpoint(one, 1.0) for one in found)))
        except StopIteration as end:
            assert incoming.state.read(PRICED) is None
            return end.value, ran

    def test_the_decode_pod_is_chosen_again_for_decoding_alone_with_its_prefill_pod(self) -> None:
        decision, ran = self.decided(request(), [B, A], [B, C, D])
        assert decision == Decision(B, (A,), "decode", (C, D), split_outcome="split")
        assert ran == [("decode", None, None), ("decode", Stage.DECODE, A), ("prefill", Stage.PREFILL, B)]

    def test_the_single_pod_stays_if_it_is_better(self) -> None:
        incoming = request()
        decision, _ = self.decided(incoming, [A, B], [C])
        assert decision == Decision(A, (B,), "decode", split_outcome="decided-against")
        decision, _ = self.decided(incoming, [D, A], [C])
        assert decision == Decision(A, (B,), "decode", split_outcome="decided-against")
        assert incoming.state.read(PEER) is A

    @pytest.mark.parametrize("found", [NO_POD, Saturated("busy"), [B]])
    def test_the_single_pod_stays_without_a_prefill_pod(self, found: Any) -> None:
        decision, _ = self.decided(request(), [B, A], found)
        assert decision == Decision(A, (B,), "decode", split_outcome="no-prefill-pod")

    def test_a_decode_pod_encodes_nothing(self) -> None:
        decision, _ = self.decided(request(), [B, A], [D], encode="yes")
        assert (decision.target, decision.encode, decision.prefill) == (B, (C,), (D,))

    def test_unwanted_stages_are_not_priced(self) -> None:
        _, ran = self.decided(request(), [B, A], [C], prefill="no-pair")
        assert ran == [("decode", None, None)]


class TestDecodeFirst:
    def test_decode_is_chosen_first_and_prefill_pods_are_ranked(self) -> None:
        decision, ran = decided(deciding(prefill="yes"), {"decode": [A, B], "prefill": [C, D]})
        assert decision == Decision(A, (B,), "decode", (C, D), split_outcome="split")
        assert ran == ["decode", "prefill"]

    def test_media_are_encoded_before_the_prompt_is_computed(self) -> None:
        found: Found = {"decode": [A], "encode": [B], "prefill": [C]}
        decision, ran = decided(deciding(prefill="yes", encode="yes"), found)
        assert (decision.encode, decision.prefill) == ((B,), (C,))
        assert ran == ["decode", "encode", "prefill"]

    def test_a_stage_without_a_decider_never_runs_and_has_no_reason(self) -> None:
        decision, ran = decided(handler(), {"decode": [A]})
        assert (decision, ran) == (Decision(A, (), "decode"), ["decode"])

    def test_a_decider_can_skip_the_profile(self) -> None:
        decision, ran = decided(deciding(prefill="no"), {"decode": [A]})
        assert (decision.prefill, decision.split_outcome, ran) == ((), "decided-against", ["decode"])

    def test_a_decider_may_change_its_decision_for_known_pods(self) -> None:
        decision, ran = decided(deciding(prefill="rather-not"), {"decode": [A], "prefill": [C]})
        assert (decision.prefill, decision.split_outcome, ran) == ((), "decided-against", ["decode", "prefill"])

    def test_the_decode_pod_is_not_its_own_prefill_pod(self) -> None:
        decision, _ = decided(deciding(prefill="yes"), {"decode": [A, B], "prefill": [A, B]})
        assert (decision.target, decision.prefill) == (A, (B,))

    @pytest.mark.parametrize("found", [NO_POD, Saturated("busy"), [A]])
    def test_without_a_prefill_pod_the_decode_pod_does_all(self, found: Any) -> None:
        decision, _ = decided(deciding(prefill="yes"), {"decode": [A], "prefill": found})
        assert decision == Decision(A, (), "decode", split_outcome="no-prefill-pod")

    def test_without_an_encode_pod_the_next_stage_does_its_work(self) -> None:
        found: Found = {"decode": [A], "encode": NO_POD, "prefill": [C]}
        decision, _ = decided(deciding(prefill="yes", encode="yes"), found)
        assert decision == Decision(A, (), "decode", (C,), split_outcome="no-encode-pod")

    def test_a_request_without_media_has_no_reason_for_encoding(self) -> None:
        decision, _ = decided(deciding(encode="no"), {"decode": [A]})
        assert decision == Decision(A, (), "decode")
        decision, _ = decided(deciding(encode="rather-not"), {"decode": [A], "encode": [B]})
        assert decision == Decision(A, (), "decode")

    @pytest.mark.parametrize("decider", ["", "yes", "no"])
    def test_without_a_decode_pod_a_prefill_pod_does_all(self, decider: str) -> None:
        decision, ran = decided(deciding(prefill=decider), {"decode": NO_POD, "prefill": [C, D]})
        assert decision == Decision(C, (D,), "prefill", split_outcome="no-decode-pod")
        assert ran == ["decode", "prefill"]

    def test_without_any_pod_the_first_error_counts(self) -> None:
        with pytest.raises(NoEndpoints, match="decode"):
            decided(handler(), {"decode": NoEndpoints("none to decode"), "prefill": NO_POD})
        with pytest.raises(NoEndpoints, match="decode"):
            decided(handler(known=["decode"]), {"decode": NoEndpoints("none to decode")})

    def test_busy_decode_pods_are_waited_for(self) -> None:
        with pytest.raises(Saturated):
            decided(deciding(prefill="yes"), {"decode": Saturated("busy"), "prefill": [C]})

    def test_later_profiles_see_the_chosen_pods(self) -> None:
        made, incoming = deciding(prefill="yes"), request()
        for target in (A, B):  # a request may be scheduled again
            decided(made, {"decode": [target], "prefill": [C]}, incoming)
            assert incoming.state.read(PEER) is incoming.state.read(PEER.of("split")) is target
        assert made.provides == (PEER.of("split"),)


class TestPrefillFirst:
    FIRST: Mapping[str, Any] = {"stageOrder": "prefill-first"}

    def test_every_prompt_is_split_and_the_decode_pod_can_be_near(self) -> None:
        incoming = request()
        decision, ran = decided(handler(**self.FIRST), {"prefill": [C, D], "decode": [A, B]}, incoming)
        assert decision == Decision(A, (B,), "decode", (C, D), split_outcome="split")
        assert ran == ["prefill", "decode"]
        assert incoming.state.read(PEER) is C

    @pytest.mark.parametrize("found", [NO_POD, Saturated("busy"), [A]])
    def test_without_a_prefill_pod_the_decode_pod_does_all(self, found: Any) -> None:
        decision, _ = decided(handler(**self.FIRST), {"prefill": found, "decode": [A]})
        assert decision == Decision(A, (), "decode", split_outcome="no-prefill-pod")

    def test_without_a_decode_pod_the_prefill_pod_does_all(self) -> None:
        decision, _ = decided(handler(**self.FIRST), {"prefill": [C, D], "decode": NO_POD})
        assert decision == Decision(C, (D,), "prefill", split_outcome="no-decode-pod")

    def test_without_any_pod_there_is_an_error(self) -> None:
        with pytest.raises(NoEndpoints):
            decided(handler(**self.FIRST), {"prefill": NO_POD, "decode": NO_POD})

    def test_a_prefill_decider_is_refused_with_prefill_first(self) -> None:
        assert "deciders.prefill" in fault(**self.FIRST, deciders={"prefill": "yes"})

    def test_media_may_be_encoded_separately(self) -> None:
        made = handler(**self.FIRST, deciders={"encode": "yes"})
        decision, ran = decided(made, {"prefill": [C], "decode": [A], "encode": [B]})
        assert (decision.prefill, decision.encode, ran) == ((C,), (B,), ["prefill", "decode", "encode"])


class TestParameters:
    def test_older_flat_parameters_are_equivalent(self) -> None:
        made = handler(
            known=["p", "d"], decodeProfile="d", prefillProfile="p", prefillDeciderPluginName="yes", encodeProfile=""
        )
        assert decided(made, {"d": [A], "p": [C]})[0].prefill == (C,)
        assert decided(handler(deciderPluginName="yes"), {"decode": [A], "prefill": [C]})[0].prefill == (C,)
        made = handler(encodeProfile="prefill", encodeDeciderPluginName="yes")
        assert decided(made, {"decode": [A], "prefill": [C]})[0].encode == (C,)

    @pytest.mark.parametrize("given", [{"deciders": {"prefill": "yes"}}, {"profiles": {"encode": "prefill"}}])
    def test_both_spellings_at_once_are_refused(self, given: Any) -> None:
        assert "exclude profiles and deciders" in fault(decodeProfile="decode", **given)

    def test_unknown_names_are_all_reported_with_suggestions(self) -> None:
        found = faults(profiles={"decode": "decod"}, deciders={"prefill": "yess", "encode": "z"})
        assert "plugins.split.parameters.profiles.decode: there is no profile 'decod'; did you mean 'decode'?" in found
        assert "plugins.split.parameters.deciders.prefill: no decider is named 'yess'; did you mean 'yes'?" in found
        assert "plugins.split.parameters.deciders.encode: no decider is named 'z'" in found

    def test_a_missing_profile_of_a_stage_is_an_error(self) -> None:
        assert "profiles.prefill: there is no profile" in fault(known=["decode"], deciders={"prefill": "yes"})
        assert "profiles.prefill: there is no profile" in fault(known=["decode"], stageOrder="prefill-first")
        assert "profiles.encode: there is no profile" in fault(known=["decode"], profiles={"encode": "x"})
        assert decided(handler(known=["decode"]), {"decode": [A]})[0].target is A

    def test_a_missing_producer_of_the_match_is_an_error(self) -> None:
        (needed,) = handler(prefixMatchInfoProducerName="approx").requires
        assert needed.producer == "approx"
        assert handler().requires == ()


class TestLoad:
    """What scorers of either stage see of a request that was split."""

    async def test_prompt_tokens_count_on_the_prefill_pod_and_the_response_on_the_decode_pod(self) -> None:
        ledger, incoming = Ledger(ManualClock()), replace(request(1000), max_tokens=300)
        estimate = make("inflight-load-producer", addEstimatedOutputTokens=True)
        await estimate.produce(incoming, ())
        computes, responses, idle = pod("computes"), pod("answers"), pod("idle")
        attempts = [Attempt(incoming, Decision(one), one, 0, 0.0) for one in (responses, computes)]
        for attempt, stage in zip(attempts, (Stage.DECODE, Stage.PREFILL), strict=True):
            attempt.stage = stage
            ledger.attempt_started(attempt)
        assert (computes.load.tokens, responses.load.tokens) == (1000, 300)
        busy, free = score("token-load-scorer", [computes, idle], request(), queueThresholdTokens=2000)
        assert (busy, free) == (0.5, 1.0)
        ledger.first_byte(attempts[1])  # the prompt is computed, and kept until it is fetched
        assert score("token-load-scorer", [computes, idle], request(), queueThresholdTokens=2000) == [1.0, 1.0]
        assert computes.load.requests == 1


class TestOlderHandler:
    def test_two_stages_are_equivalent(self) -> None:
        made = handler(PdProfileHandler, deciderPluginName="yes")
        decision, ran = decided(made, {"decode": [A, B], "prefill": [C]})
        assert (decision, ran) == (Decision(A, (B,), "decode", (C,), split_outcome="split"), ["decode", "prefill"])
        assert made.provides == (PEER.of("split"),)

    def test_parameters_without_effect_are_accepted(self) -> None:
        made = handler(
            PdProfileHandler,
            deciderPluginName="no",
            prefixPluginType="x",
            prefixPluginName="y",
            primaryPort=8000,
            prefixMatchInfoProducerName="approx",
        )
        assert decided(made, {"decode": [A]})[0].split_outcome == "decided-against"
        assert made.requires[0].producer == "approx"

    def test_a_decider_is_required(self) -> None:
        assert "no decider is named 'prefix-based-pd-decider'" in fault(cls=PdProfileHandler)
