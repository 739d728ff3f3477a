from __future__ import annotations

import math
from dataclasses import replace

import pytest

from proxy.lab.replay import ReplayObjectives, RequestResult, TooLarge, figures, recorded, repeated, replay
from proxy.lab.workload import RequestParams
from proxy.settings import Settings, from_mapping
from tests.helpers.lab.traffic import conversations, fleet, record

RANDOM = from_mapping({"scheduling": {"plugins": [{"type": "random-picker"}]}})


def test_repeating_the_recorded_placement_gives_the_recorded_times() -> None:
    pods = fleet(warm_up=0.0)
    of = record(conversations(200, 6.0), pods)
    was, again = recorded(of, pods), repeated(of, pods, seed=0).figures
    for figure in ("ttft_mean", "ttft_p90", "tpot_mean", "e2e_mean", "goodput", "hit"):
        assert again[figure] == pytest.approx(was[figure], rel=1e-6), figure


def test_a_configuration_without_prefixes_is_worse() -> None:
    workload, pods = conversations(300, 6.0), fleet()
    ours, chance = (replay(settings, workload, pods, seed=1).figures for settings in (Settings(), RANDOM))
    assert ours["hit"] > chance["hit"] + 0.1
    assert ours["ttft_mean"] < chance["ttft_mean"]


def test_the_same_seed_gives_the_same_figures() -> None:
    workload, pods = conversations(100, 6.0), fleet()
    assert replay(RANDOM, workload, pods, 5).figures == replay(RANDOM, workload, pods, 5).figures
    assert replay(RANDOM, workload, pods, 5).figures != replay(RANDOM, workload, pods, 6).figures


def test_more_pods_respond_sooner_and_more_requests_later() -> None:
    workload = conversations(200, 12.0)
    few, many = (replay(Settings(), workload, fleet(2).of_size(size), 1).figures for size in (2, 6))
    assert many["ttft_p90"] < few["ttft_p90"]
    denser = replay(Settings(), workload.at_rate(workload.rate * 4), fleet(2), 1).figures
    assert denser["ttft_p90"] > few["ttft_p90"]


def test_added_pods_have_the_usual_speed() -> None:
    assert [config.slowdown for config in fleet(2, slow=3.0).of_size(4).configs] == [3.0, 1.0, 1.0, 1.0]
    assert [config.slowdown for config in fleet(2, slow=3.0).of_size(1).configs] == [3.0]


def test_the_first_token_of_a_complete_response_comes_with_the_last() -> None:
    workload = conversations(60, 3.0)
    silent = replace(workload, jobs=tuple(replace(job, params=RequestParams(stream=False)) for job in workload.jobs))
    run = replay(Settings(), silent, fleet(), 1)
    assert all(one.ttft == one.e2e for one in run.fared)
    assert math.isnan(run.figures["tpot_mean"])


def test_a_request_is_judged_by_its_own_objectives() -> None:
    workload = conversations(60, 3.0)

    def goodput(params: RequestParams) -> float:
        jobs = tuple(replace(job, params=params) for job in workload.jobs)
        return replay(Settings(), replace(workload, jobs=jobs), fleet(), 1).figures["goodput"]

    assert goodput(RequestParams()) == 1.0
    assert goodput(RequestParams(ttft=1e-6)) == 0.0
    assert goodput(RequestParams(tpot=1e-6)) == 0.0


def test_the_first_requests_warm_the_caches_and_do_not_count() -> None:
    run = replay(Settings(), conversations(100, 6.0), fleet(warm_up=0.25), 1)
    assert len(run.fared) == 75


def test_filters_that_need_labels_find_those_of_the_file() -> None:
    labelled = {"url": "http://a:1", "labels": {"gpu": "h100"}}
    scheduling = {
        "plugins": [{"type": "label-selector-filter", "parameters": {"matchLabels": {"gpu": "h100"}}}],
    }
    settings = from_mapping({"pods": {"static": [labelled, {"url": "http://b:1"}]}, "scheduling": scheduling})
    run = replay(settings, conversations(40, 3.0), fleet(4), 1)
    assert {outcome.pod for outcome in run.outcomes} == {0, 2}


def test_refused_requests_are_counted_and_meet_no_objective() -> None:
    scheduling = {
        "plugins": [{"type": "label-selector-filter", "parameters": {"matchLabels": {"gpu": "none"}}}],
    }
    found = replay(from_mapping({"scheduling": scheduling}), conversations(20, 3.0), fleet(warm_up=0.0), 1).figures
    assert (found["failed"], found["goodput"]) == (20, 0.0)
    assert math.isnan(found["ttft_mean"])


def test_requests_larger_than_every_pod_are_reported() -> None:
    pods = fleet()
    small = replace(pods, configs=tuple(replace(config, num_gpu_blocks=2) for config in pods.configs))
    with pytest.raises(TooLarge, match="--kv-tokens"):
        small.fitting(record(conversations(20, 3.0), pods))


def test_figures_are_over_the_requests() -> None:
    fared = [RequestResult(at / 10, 0.01 * at, float(at), at < 5, 100, 50) for at in range(10)]
    never = RequestResult(math.inf, math.nan, math.inf, False, 100, 0)
    found = figures([*fared, never])
    assert found["ttft_mean"] == pytest.approx(0.45)
    assert found["ttft_p90"] == 0.9
    assert found["goodput"] == pytest.approx(5 / 11)
    assert (found["hit"], found["failed"]) == (0.5, 1)


def test_a_default_objective_applies_to_requests_without_one() -> None:
    workload = conversations(40, 3.0)
    strict = fleet(objectives=ReplayObjectives(ttft=1e-6))
    assert replay(Settings(), workload, strict, 1).figures["goodput"] == 0.0
