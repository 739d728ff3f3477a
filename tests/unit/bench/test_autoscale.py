"""The closed loop of bench/autoscale.py: fleets that change under load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from bench import autoscale
from bench.autoscale import SCALERS, Cell
from bench.placement.report import Figures
from bench.scaling.figures import OBJECTIVES, Played, figures
from bench.scaling.fleet import DECODE, PREFILL, Fleet, Shape, State
from bench.scaling.hard_ratio import HardRatio
from bench.scaling.loads import LOADS, READ, WRITE, Load
from bench.scaling.scalers import Independent, Scaler
from bench.scaling.scene import Moment, Scene
from proxy.autoscale.policy import RoleSituation
from proxy.core.ports import ManualClock
from proxy.lab.simulation import SimulationOutcome
from proxy.lab.workload import Job

SHAPE = Shape(start_up=20.0)
SURGE = Load(420.0, (4.0, 2.0), lambda rng: lambda now: (4.0, 1.0) if 30 <= now < 60 else (0.5, 0.5))


def running(fleet: Fleet, role: str) -> int:
    return len(fleet.of(role, State.SERVING))


@pytest.mark.parametrize("scaler", SCALERS)
def test_no_request_is_lost_with_any_scaler(scaler: str) -> None:
    played = autoscale.play(SURGE, SURGE.jobs(1), scaler, SHAPE, {})
    found = figures(played)
    assert found["requests"] > 100
    assert found["lost"] == 0
    assert max(moment.gpus for moment in played.moments) <= SHAPE.budget
    assert (found["moves"] == 0) is scaler.startswith("fixed")


def test_the_same_seed_repeats_the_run() -> None:
    first, again = (figures(autoscale.play(SURGE, SURGE.jobs(2), "kvlane", SHAPE, {})) for _ in range(2))
    assert first == again


def test_a_fixed_fleet_has_its_configured_size() -> None:
    played = autoscale.play(SURGE, SURGE.jobs(1), "fixed mean", SHAPE, {}, pods=5)
    assert {sum(moment.serving.values()) for moment in played.moments} == {5}
    assert autoscale._mean_pods({"gpu_hours": 2.5}, Load(1800.0, (0, 0), SURGE.rates), SHAPE) == 1
    assert autoscale._mean_pods({"gpu_hours": 12.4}, Load(1800.0, (0, 0), SURGE.rates), SHAPE) == 6


class ToAndFro(Scaler):
    """Takes pods away in the middle of everything, and wants them back."""

    def decide(self, now: float, observed: Mapping[str, RoleSituation]) -> Mapping[str, int]:
        return {PREFILL: 1, DECODE: 1} if int(now / 15) % 2 else {PREFILL: 5, DECODE: 5}


def test_a_removed_pod_finishes_its_requests() -> None:
    fleet, clock = Fleet(SHAPE), ManualClock()
    fleet.start({PREFILL: 6, DECODE: 6})
    scene = Scene(SURGE.jobs(3), SURGE.seconds, fleet, ToAndFro(), clock)
    outcomes = scene.run()
    assert all(one.ended is not None and one.retries == 0 for one in outcomes)
    left = [one for one in fleet.replicas if one.pod >= 0 and one.state in (State.GONE, State.DRAINING)]
    assert len(left) > 8
    served = {one.pod for one in outcomes} | {one.prefill_pod for one in outcomes}
    assert served & {one.pod for one in left}
    assert all(one.busy == 0 for one in fleet.replicas)


def test_a_draining_pod_holds_its_gpus_until_it_is_empty() -> None:
    fleet = Fleet(SHAPE)
    fleet.start({PREFILL: 1, DECODE: 11})
    fleet.replicas[1].busy = 1
    for one in fleet.replicas[2:]:
        one.busy = 2
    fleet.scale(DECODE, 10)
    fleet.scale(PREFILL, 2)
    fleet.pass_time(0.0)
    assert fleet.replicas[1].state is State.DRAINING
    assert (running(fleet, PREFILL), len(fleet.of(PREFILL, State.PENDING))) == (1, 1)
    fleet.replicas[1].busy = 0
    fleet.pass_time(1.0)
    fleet.pass_time(20.0)
    assert running(fleet, PREFILL) == 1
    fleet.pass_time(21.0)
    assert running(fleet, PREFILL) == 2
    assert fleet.gpus == SHAPE.budget


def test_pods_that_do_not_serve_yet_are_removed_first() -> None:
    fleet = Fleet(SHAPE)
    fleet.start({PREFILL: 2, DECODE: 2})
    fleet.scale(DECODE, 4)
    fleet.pass_time(0.0)
    fleet.scale(DECODE, 1)
    assert not fleet.of(DECODE, State.STARTING, State.PENDING)
    assert (running(fleet, DECODE), fleet.moves) == (1, 5)


@pytest.mark.parametrize("name", LOADS)
def test_a_load_has_its_stated_rate(name: str) -> None:
    load = LOADS[name]
    jobs = load.jobs(7)
    assert all(0 <= job.arrival < load.seconds for job in jobs)
    for side, kind in enumerate((READ, WRITE)):
        mine = [job for job in jobs if (job.prompt_tokens > 2_000) is (kind is READ)]
        assert 0.15 < len(mine) / load.seconds / load.most[side] < 0.9


def seen(current: int, load: float) -> dict[str, RoleSituation]:
    return {PREFILL: RoleSituation(current, current, 0, {"prefill_load": load})}


def test_independent_roles_grow_at_once_and_shrink_after_five_minutes() -> None:
    role = Independent(8)
    assert role.decide(15.0, seen(2, 2 * 0.7)) == {PREFILL: 2}
    assert role.decide(30.0, seen(2, 5 * 0.7)) == {PREFILL: 5}
    assert role.decide(45.0, seen(5, 0.7)) == {PREFILL: 5}
    assert role.decide(330.0, seen(5, 0.7)) == {PREFILL: 5}
    assert role.decide(345.0, seen(5, 0.7)) == {PREFILL: 1}


BOUNDS = {PREFILL: (0, 8), DECODE: (0, 8)}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((3, 4), (3, 4)),
        ((1, 6), (3, 6)),
        ((6, 1), (6, 3)),
        ((0, 0), (0, 0)),
        ((0, 2), (1, 2)),
        ((8, 0), (8, 4)),
        ((2, 9), (4, 8)),
    ],
)
def test_a_hard_ratio_is_kept_by_adding_replicas(before: tuple[int, int], after: tuple[int, int]) -> None:
    found = HardRatio(PREFILL, DECODE, 0.5, 2.0).repair(dict(zip((PREFILL, DECODE), before, strict=True)), BOUNDS)
    assert (found[PREFILL], found[DECODE]) == after


def test_a_hard_ratio_out_of_bounds_removes_replicas() -> None:
    narrow = {PREFILL: (0, 2), DECODE: (0, 8)}
    assert HardRatio(PREFILL, DECODE, 0.5, 2.0).repair({PREFILL: 1, DECODE: 8}, narrow) == {PREFILL: 2, DECODE: 4}


def moment(at: float, prefill: int) -> Moment:
    wanted = {PREFILL: prefill, DECODE: 1}
    return Moment(at, 4 * (prefill + 1), wanted, wanted)


def judged(outcomes: list[SimulationOutcome]) -> Figures:
    return figures(Played(outcomes, [moment(at, size) for at, size in enumerate((2, 3, 3, 2, 4))], 4))


def test_a_request_meets_both_objectives_or_counts_as_failed() -> None:
    good = SimulationOutcome(
        Job(0.0, 10, 11, (1,)), first_token=OBJECTIVES.first_token, ended=OBJECTIVES.first_token + 0.3
    )
    late = replace(good, first_token=2.1, ended=2.2)
    slow = replace(good, first_token=1.0, ended=2.0)
    lost = replace(good, ended=None)
    found = judged([good, late, slow, lost])
    assert (found["attained"], found["lost"]) == (0.25, 1)
    assert found["attained_per_gpu_hour"] == pytest.approx(0.25 / (4 * 19 / 3600))


def test_a_turn_is_a_role_that_shrinks_after_it_grew() -> None:
    assert judged([SimulationOutcome(Job(0.0, 10, 1, (1,)), first_token=1.0, ended=1.0)])["turns"] == 2


def test_kvlane_is_compared_with_the_others_on_the_same_load() -> None:
    def cell(load: str, scaler: str, rate: float, moves: float) -> Cell:
        return Cell(load, scaler, [{"attained_per_gpu_hour": rate, "moves": moves}] * 2)

    cells = [cell("a", "fixed", 1.0, 0), cell("a", "kvlane", 1.5, 7), cell("b", "kvlane", 1.0, 3)]
    assert list(autoscale._verdict(cells)) == [["a", "kvlane", "fixed", "+50.0% ±0.0%", "+7 ±0"]]
