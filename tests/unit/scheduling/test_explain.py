"""`explain` shows the result of every filter and scorer."""

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from proxy.core.decision import ProfileResult
from proxy.core.endpoint import Endpoint
from proxy.core.errors import ConfigError
from proxy.core.plugin import ProfileHandler, Scorer, plugin
from proxy.core.ports import Clock, ManualClock, Random
from proxy.core.registry import Registry
from proxy.core.request import InferenceRequest
from proxy.scheduling.explain import StatedMatch, StatedPrefixMatch, explain
from tests.helpers.scheduling.situations import REGISTRY, pod

State = dict[str, Any]
PORTS = {Clock: ManualClock(), Random: random.Random(0)}


async def explained(state: Any) -> State:
    return await explain(state, REGISTRY, PORTS)


async def faults(state: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        await explained(state)
    return [str(problem) for problem in caught.value.problems]


def config(*plugins: Any) -> State:
    return {"plugins": [{"type": one} if isinstance(one, str) else one for one in plugins]}


async def scores(plugin: Any, endpoints: Any, request: State | None = None) -> dict[str, float]:
    state = {"scheduling": config(plugin), "request": request or {}, "endpoints": endpoints}
    (scorer,) = (await explained(state))["profiles"]["default"]["scorers"]
    return scorer["scores"]  # type: ignore[no-any-return]


@plugin("forgetful-handler")
@dataclass(frozen=True, slots=True)
class ForgetfulHandler(ProfileHandler):
    """Runs a profile and returns no decision."""

    def plan(self, request: InferenceRequest) -> Generator[str, ProfileResult, Any]:
        yield "default"


@plugin("broken-scorer")
@dataclass(frozen=True, slots=True)
class BrokenScorer(Scorer):
    """Raises."""

    def score(self, run: Any, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        raise RuntimeError("no idea")


async def test_a_handler_without_a_decision_is_an_error_that_names_it() -> None:
    state = {"scheduling": config("queue-scorer", "forgetful-handler"), "endpoints": [{"name": "a"}]}
    with pytest.raises(ConfigError, match=r"scheduling\.plugins\.forgetful-handler: returned no decision"):
        await explain(state, Registry([*REGISTRY, ForgetfulHandler]), PORTS)


async def test_faults_of_other_plugins_are_part_of_the_explanation() -> None:
    state = {"scheduling": config("broken-scorer"), "endpoints": [{"name": "a"}]}
    found = await explain(state, Registry([*REGISTRY, BrokenScorer]), PORTS)
    assert found["decision"] == {"target": "a"}
    assert {"plugin": "broken-scorer", "message": "failed; each pod scores 0: RuntimeError('no idea')"} in found[
        "faults"
    ]


async def test_the_complete_explanation_of_a_small_fleet() -> None:
    state = {
        "scheduling": {
            "plugins": [{"type": "decode-filter"}, {"type": "queue-scorer"}, {"type": "kv-cache-utilization-scorer"}],
            "schedulingProfiles": [
                {
                    "name": "default",
                    "plugins": [
                        {"pluginRef": "decode-filter"},
                        {"pluginRef": "queue-scorer", "weight": 3},
                        {"pluginRef": "kv-cache-utilization-scorer"},
                    ],
                }
            ],
        },
        "request": {"model": "m", "prompt": "hello"},
        "endpoints": [
            {"name": "pod-a", "labels": {"llm-d.ai/role": "prefill"}},
            {"name": "pod-b", "metrics": {"waiting": 4, "kvUsage": 0.5}},
            {"name": "pod-c", "metrics": {"waiting": 1}},
        ],
    }
    assert await explained(state) == {
        "profiles": {
            "default": {
                "filters": [{"name": "decode-filter", "removed": ["pod-a"]}],
                "scorers": [
                    {"name": "queue-scorer", "weight": 3.0, "scores": {"pod-b": 0.0, "pod-c": 1.0}},
                    {"name": "kv-cache-utilization-scorer", "weight": 1.0, "scores": {"pod-b": 0.5, "pod-c": 1.0}},
                ],
                "totals": {"pod-b": 0.125, "pod-c": 1.0},
                "ranked": ["pod-c", "pod-b"],
            }
        },
        "decision": {"target": "pod-c"},
    }


async def test_an_empty_list_after_a_filter_is_explained() -> None:
    busy = {"type": "utilization-filter", "parameters": {"conditions": [{"metric": "waiting-queue", "maxValue": 1}]}}
    response = await explained(
        {"scheduling": config(busy, "queue-scorer"), "endpoints": [{"name": "a", "metrics": {"waiting": 2}}]}
    )
    assert response["error"]["type"] == "rate_limit_error"
    assert "utilization-filter" in response["error"]["message"]
    assert response["profiles"]["default"] == {
        "filters": [{"name": "utilization-filter", "removed": ["a"]}],
        "scorers": [],
        "totals": {},
        "ranked": [],
    }


async def test_without_pods_there_is_an_error_and_no_profile_runs() -> None:
    response = await explained({"scheduling": config("queue-scorer")})
    assert response["profiles"] == {}
    assert response["error"]["type"] == "server_error"


async def test_a_shadow_profile_is_reported() -> None:
    section = {
        **config("queue-scorer", "kv-cache-utilization-scorer"),
        "schedulingProfiles": [
            {"name": "real", "plugins": [{"pluginRef": "queue-scorer"}]},
            {"name": "trial", "shadow": True, "plugins": [{"pluginRef": "kv-cache-utilization-scorer"}]},
        ],
    }
    endpoints = [{"name": "a", "metrics": {"kvUsage": 0.9}}, {"name": "b", "metrics": {"waiting": 1}}]
    response = await explained({"scheduling": section, "endpoints": endpoints})
    assert "shadow" not in response["profiles"]["real"]
    assert response["profiles"]["trial"]["shadow"] is True
    assert response["profiles"]["trial"]["ranked"] == ["b", "a"]
    assert response["decision"] == {"target": "a"}


async def test_scores_are_reported_as_clamped() -> None:
    assert await scores("kv-cache-utilization-scorer", [{"name": "a", "metrics": {"kvUsage": 1.5}}]) == {"a": 0.0}


async def test_what_is_in_flight_counts_as_load() -> None:
    endpoints = [{"name": "a", "inflight": {"requests": 4}}, {"name": "b", "inflight": {"requests": 1}}]
    assert await scores("active-request-scorer", endpoints) == {"a": 0.0, "b": 0.75}


async def test_prompt_tokens_are_exact() -> None:
    small = {"type": "token-load-scorer", "parameters": {"queueThresholdTokens": 1000}}
    endpoints = [{"name": "a", "inflight": {"tokens": 200}}]
    assert await scores(small, endpoints, {"promptTokens": 301}) == {"a": pytest.approx(0.499)}


async def test_a_given_prefix_match_replaces_the_index() -> None:
    small = {"type": "token-load-scorer", "parameters": {"queueThresholdTokens": 1000}}
    match = {"blocks": 3, "total": 4, "blockSize": 64}
    endpoints = [{"name": "a", "prefixMatch": match}, {"name": "b", "prefixMatch": {**match, "blocks": 0}}]
    assert await scores(small, endpoints, {"promptTokens": 256}) == pytest.approx({"a": 0.936, "b": 0.744})


@pytest.mark.parametrize("match", [{}, {"blocks": 3}, {"blocks": 1, "total": 4, "blockSize": 0}, {"total": 0}])
async def test_an_incomplete_prefix_match_is_handled(match: State) -> None:
    endpoints = [{"name": "a", "prefixMatch": match}, {"name": "b"}]
    assert len(await scores("token-load-scorer", endpoints, {"promptTokens": 10})) == 2


async def test_headers_are_found_in_any_case() -> None:
    zone = {"type": "header-label-affinity-scorer", "parameters": {"headerName": "X-Zone", "labelKey": "zone"}}
    endpoints = [{"name": "a", "labels": {"zone": "north"}}, {"name": "b"}]
    assert await scores(zone, endpoints, {"headers": {"x-ZONE": "north"}}) == {"a": 1.0, "b": 0.0}


async def test_adapters_and_attributes_are_used() -> None:
    adapters = [
        {"name": "active", "metrics": {"activeModels": ["m"], "maxActiveModels": 1}},
        {"name": "room", "metrics": {"activeModels": ["x"], "maxActiveModels": 2}},
        {"name": "waits", "metrics": {"waitingModels": ["m"], "maxActiveModels": 1}},
        {"name": "full"},
    ]
    assert await scores("lora-affinity-scorer", adapters, {"model": "m"}) == {
        "active": 1.0,
        "room": 0.8,
        "waits": 0.6,
        "full": 0.0,
    }
    gpu = {"attributeKey": "gpu", "algorithm": {"type": "linear_higher_is_better"}}
    endpoints = [{"name": "a", "attributes": {"gpu": 10}}, {"name": "b", "attributes": {"gpu": 20}}, {"name": "c"}]
    scorer = {"type": "endpoint-attribute-scorer", "parameters": gpu}
    assert await scores(scorer, endpoints) == {"a": 0.0, "b": 1.0, "c": 0.0}


async def test_messages_become_a_prompt() -> None:
    length = {"type": "context-length-aware", "parameters": {"enableFiltering": True}}
    state = {
        "scheduling": config(length),
        "request": {"messages": [{"role": "user", "content": "x" * 4000}]},
        "endpoints": [
            {"name": "short", "labels": {"llm-d.ai/context-length-range": "0-100"}},
            {"name": "long", "labels": {"llm-d.ai/context-length-range": "101-2000"}},
        ],
    }
    assert (await explained(state))["decision"] == {"target": "long"}


async def test_equal_scores_go_to_the_pod_with_the_least_in_flight() -> None:
    endpoints = [{"name": "a", "inflight": {"requests": 2}}, {"name": "b"}]
    response = await explained({"scheduling": config("queue-scorer"), "endpoints": endpoints})
    assert response["decision"] == {"target": "b"}


async def test_all_faults_of_the_input_are_reported_with_their_paths() -> None:
    state = {
        "scheduling": config("queue-scorerr"),
        "request": {"promptTokens": -1, "promt": "x"},
        "endpoints": [{"nam": "a"}, {"name": "b", "metrics": {"waitng": 1}}],
    }
    assert await faults(state) == [
        "request: unknown field 'promt'; did you mean 'prompt'?",
        "request.promptTokens: must be at least 0, not -1",
        "endpoints[0]: unknown field 'nam'; did you mean 'name'?",
        "endpoints[0].name: is required",
        "endpoints[1].metrics: unknown field 'waitng'; did you mean 'waiting'?",
        "scheduling.plugins.queue-scorerr: unknown plugin type 'queue-scorerr'; did you mean 'queue-scorer'?",
    ]


@pytest.mark.parametrize(
    ("state", "fault"),
    [
        ([], "must be a mapping"),
        ("text", "must be a mapping"),
        ({"endpoints": [{"name": "a"}, {"name": "a"}]}, "two endpoints are named a"),
        ({"request": {"prompt": "a", "promptTokens": 3}}, "exclude each other"),
        ({"request": {"messages": "hello"}}, "'messages' must be a list"),
    ],
)
async def test_invalid_input_is_refused(state: Any, fault: str) -> None:
    sane = {"scheduling": config("queue-scorer")}
    assert fault in "\n".join(await faults({**sane, **state} if isinstance(state, dict) else state))


def test_matches_in_blocks_of_different_size_keep_share_and_length() -> None:
    matches = StatedPrefixMatch({"a": StatedMatch(4, 8, 16), "b": StatedMatch(1, 3, 64)})
    pods = [pod("a"), pod("b"), pod("unknown")]
    assert [blocks / matches.total for blocks in matches.matched(pods)] == pytest.approx([0.5, 1 / 3, 0.0])
    assert matches.lengths(pods) == [64, 64, 0]
    assert matches.missing(pods, prompt_tokens=130) == [64 + 2, 128, 130]
