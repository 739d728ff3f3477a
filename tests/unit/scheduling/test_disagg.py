"""Configurations that split requests: from the document to the pod of each stage."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.core.endpoint import ROLE_LABEL, Endpoint
from proxy.core.errors import ConfigError
from proxy.core.request import InferenceRequest
from proxy.core.state import State
from proxy.prefix.match import PREFIX_MATCH
from proxy.scheduling.build import Scheduling, build
from proxy.scheduling.document import read
from proxy.scheduling.explain import explain
from tests.helpers.plugins.situations import Held
from tests.helpers.scheduling.situations import REGISTRY, names, ports, ranking, request, scheduling

CONFIG = Path(__file__).parents[3] / "config"
HANDLER, DECIDER = "disagg-profile-handler", "prefix-based-pd-decider"
THRESHOLD = {"nonCachedTokens": 512}


def document(
    parameters: dict[str, Any] | None = None, decider: dict[str, Any] | None = None, *more: Any
) -> dict[str, Any]:
    """The handler stands before the decider that it names."""
    return {
        "plugins": [
            {"type": HANDLER, "parameters": {"deciders": {"prefill": DECIDER}} if parameters is None else parameters},
            {"type": "decode-filter"},
            {"type": "prefill-filter"},
            {"type": "queue-scorer"},
            {"type": DECIDER, "parameters": THRESHOLD if decider is None else decider},
            *more,
        ],
        "schedulingProfiles": [
            {"name": "prefill", "plugins": [{"pluginRef": "prefill-filter"}, {"pluginRef": "queue-scorer"}]},
            {"name": "decode", "plugins": [{"pluginRef": "decode-filter"}, {"pluginRef": "queue-scorer"}]},
        ],
    }


def faults(given: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        scheduling(given)
    return [str(problem) for problem in caught.value.problems]


def fleet(*roles: str) -> list[Endpoint]:
    return [Endpoint(f"{role}-{at}", role=role) for at, role in enumerate(roles)]


def request_with(tokens: int, **cached: int) -> InferenceRequest:
    incoming = request(tokens)
    held = {name.replace("_", "-"): blocks for name, blocks in cached.items()}
    incoming.state.write(PREFIX_MATCH, Held(tokens // 16, held))
    return incoming


def test_a_long_prompt_is_split_and_a_short_or_cached_one_is_not() -> None:
    scheduler, pods = scheduling(document()).scheduler, fleet("prefill", "prefill", "decode")
    long = scheduler.schedule(request_with(1600), pods)
    assert (ranking(long), sorted(names(long.prefill))) == (["decode-2"], ["prefill-0", "prefill-1"])
    for incoming in (request_with(160), request_with(1600, decode_2=90)):
        short = scheduler.schedule(incoming, pods)
        assert (ranking(short), short.prefill, short.split_outcome) == (["decode-2"], (), "decided-against")


@pytest.mark.parametrize(
    ("roles", "target", "why"),
    [
        (("decode", "decode"), "decode", "no-prefill-pod"),
        (("prefill", "prefill"), "prefill", "no-decode-pod"),
        (("both",), "both", "no-prefill-pod"),
        (("both", "both"), "both", "split"),
    ],
)
def test_a_role_without_pods_falls_back_to_pods_that_do_all(roles: tuple[str, ...], target: str, why: str) -> None:
    decision = scheduling(document()).scheduler.schedule(request_with(1600), fleet(*roles))
    assert (decision.target.role, decision.split_outcome) == (target, why)
    assert bool(decision.prefill) is (why == "split")


def test_a_prefill_pod_is_chosen_near_the_decode_pod() -> None:
    given = document(None, None, {"type": "topology-affinity-scorer"})
    given["schedulingProfiles"][0]["plugins"].append({"pluginRef": "topology-affinity-scorer"})
    scheduler = scheduling(given).scheduler
    zone = "topology.kubernetes.io/zone"
    for near in ("x", "y"):
        pods = [Endpoint(name, labels={ROLE_LABEL: "prefill", zone: name}) for name in "xy"]
        pods.append(Endpoint("d", labels={ROLE_LABEL: "decode", zone: near}))
        assert scheduler.schedule(request_with(1600), pods).prefill[0].name == near


class TestFaults:
    def test_a_missing_decider_is_an_error(self) -> None:
        (fault,) = faults(document({"deciders": {"prefill": "prefix-based-decider"}}))
        assert fault == (
            f"plugins.{HANDLER}.parameters.deciders.prefill: no decider is named 'prefix-based-decider'; "
            f"did you mean '{DECIDER}'?"
        )

    def test_a_plugin_that_is_no_decider_is_an_error(self) -> None:
        (fault,) = faults(document({"deciders": {"prefill": "queue-scorer"}}))
        assert "no decider is named 'queue-scorer'" in fault

    def test_a_faulty_decider_is_not_also_missing(self) -> None:
        (fault,) = faults(document(None, {"nonCachedTokens": -1}))
        assert fault == f"plugins.{DECIDER}.parameters.nonCachedTokens: must be at least 0, not -1"

    def test_a_peer_scorer_without_a_peer_is_an_error(self) -> None:
        name = "topology-affinity-scorer"
        (fault,) = faults({"plugins": [{"type": name}]})
        assert fault == f"plugins.{name}: nothing provides PeerEndpoint; add a producer of it to plugins"

    def test_a_faulty_handler_is_not_also_missing(self) -> None:
        (fault,) = faults(document({"deciders": {"prefill": "x"}}, None, {"type": "topology-affinity-scorer"}))
        assert "no decider is named 'x'" in fault

    def test_an_accepted_hook_is_no_profile_handler(self) -> None:
        given = document()
        given["plugins"][0] = {"type": "disagg-headers-handler", "parameters": {"prefillProfile": "p"}}
        assert faults(given) == [
            "schedulingProfiles: several profiles (prefill, decode) and no profile handler that chooses"
        ]

    def test_topology_labels_are_configurable(self) -> None:
        extractor = {"type": "topology-extractor", "parameters": {"zone": "my/zone", "rack": ""}}
        (fault,) = faults(document(None, None, extractor))
        assert fault.endswith("zone: another label than topology.kubernetes.io/zone is not yet supported")


@pytest.mark.parametrize("hook", ["disagg-headers-handler", "prefill-header-handler", "topology-extractor"])
def test_plugins_without_effect_are_accepted(hook: str) -> None:
    assert hook not in scheduling(document(None, None, {"type": hook})).instances


class TestReload:
    def test_with_the_same_decider_the_handler_stays_itself(self) -> None:
        old, new = self.after_each_other(document(), document())
        assert new.instances[HANDLER] is old.instances[HANDLER]

    def test_with_another_decider_the_handler_uses_it(self) -> None:
        old, new = self.after_each_other(document(), document(None, {"nonCachedTokens": 10_000}))
        pods = fleet("prefill", "decode")
        assert old.scheduler.schedule(request_with(1600), pods).prefill
        assert not new.scheduler.schedule(request_with(1600), pods).prefill

    def after_each_other(self, *documents: Any) -> list[Scheduling]:
        state, own, made = State(), ports(), []
        for given in documents:
            draft = state.draft()
            made.append(build(read(given), REGISTRY, own, draft=draft))
            draft.commit()
        return made


class TestExplanation:
    async def explained(self, given: Any, *roles: str, tokens: int = 1600, running: int = 0) -> dict[str, Any]:
        """Responses run on the decode pods."""
        pods: list[dict[str, Any]] = [
            {
                "name": one.name,
                "labels": {ROLE_LABEL: one.role},
                "metrics": {"running": running if one.role == "decode" else 0},
                "prefixMatch": {"blocks": 0, "total": 25},
            }
            for one in fleet(*roles)
        ]
        state = {"scheduling": given, "request": {"promptTokens": tokens}, "endpoints": pods}
        return await explain(state, REGISTRY, ports())

    async def test_stages_are_listed_in_their_order(self) -> None:
        explanation = await self.explained(document(), "prefill", "decode")
        assert list(explanation["profiles"]) == ["decode", "prefill"]
        assert explanation["decision"] == {"target": "decode-1", "prefill": ["prefill-0"], "why": "split"}

    async def test_a_skipped_stage_has_a_reason(self) -> None:
        explanation = await self.explained(document(), "prefill", "decode", tokens=100)
        assert list(explanation["profiles"]) == ["decode"]
        assert explanation["decision"] == {"target": "decode-1", "why": "decided-against"}

    async def test_a_predicted_split_avoids_running_responses(self) -> None:
        given = yaml.safe_load((CONFIG / "disaggregated.yaml").read_text())["scheduling"]
        idle, busy = [
            await self.explained(given, "prefill", "prefill", "decode", tokens=1600, running=running)
            for running in (0, 20)
        ]
        assert idle["decision"] == {"target": "decode-2", "why": "decided-against"}
        assert sorted(busy["decision"]["prefill"]) == ["prefill-0", "prefill-1"]
        scorers = [one["name"] for one in busy["profiles"]["prefill"]["scorers"]]
        assert scorers == ["latency-scorer", "topology-affinity-scorer"]
